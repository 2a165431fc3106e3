"""Configuration: one frozen tree, its flags, its files and its rules."""
