"""Processes: the parent that starts workers, how they meet, signals, and who notices a silent one."""
