"""Commands: from the command line, a sweep or Python to a run."""
