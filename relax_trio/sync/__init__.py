"""The only home of Trio primitives of our own."""
