"""The embedded engine: a Hugging Face causal LM in this process, batched in one worker thread."""

from relax_trio.backend.embedded.backend import EmbeddedBackend, EmbeddedOptions

__all__ = ["EmbeddedBackend", "EmbeddedOptions"]
