"""Evidence of a run: metrics, log, dumps, progress, curves and the directory they lie in."""
