"""What a run tells: lines, loggers, its summary and where it came from."""
