"""The model API over HTTP: dialects, front halves, server. Sees Sessions through the Protocols of sessions.py only."""
