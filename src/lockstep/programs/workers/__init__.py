"""Workers of torchrun as forks of a process that has imported everything: scripts/torchrun.sh."""
