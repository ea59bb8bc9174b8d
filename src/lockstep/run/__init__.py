"""One run, from a checked config to its summary."""
