"""The warden: a small program of its own that owns every child process of the engine (see program.py)."""
