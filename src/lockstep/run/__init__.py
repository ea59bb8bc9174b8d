"""Run a checked config from its start to its summary."""
