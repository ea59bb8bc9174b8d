"""Trials of `lockstep parity`: short runs that are recorded, and compared to the bit."""
