"""A run: what a command does once its configuration stands."""
