"""Checkpoints: the file format, writing and reading, the best and the last, resuming, and initial weights."""
