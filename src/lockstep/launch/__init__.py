"""Processes: the parent that starts workers, the process group, signals, and the detection of a hanging worker."""
