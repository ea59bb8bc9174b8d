"""Everything about checkpoints: the file, when it is written, which is best, and going on from one."""
