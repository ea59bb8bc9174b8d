"""The arithmetic of a step: layouts, the order of samples, and exact sums."""
