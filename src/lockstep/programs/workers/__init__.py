"""Workers of torchrun as forks of a process that has imported everything: `lockstep torchrun`."""
