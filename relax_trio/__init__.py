"""relax_trio: agentic reinforcement learning for one machine, in one Trio nursery tree."""

__version__ = "0.1.0"
