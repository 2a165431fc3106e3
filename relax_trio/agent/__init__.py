"""The agent process of a Session: environment, IO directory, output, launch."""
