"""Lightning's Trainer with Lockstep's step, for any project, with a config system of its own or none."""
