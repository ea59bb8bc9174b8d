"""Many runs in one command: Hydra's own sweeper lists them (grid), each runs in a process of its own (jobs)."""
