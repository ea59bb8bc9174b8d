"""The pages of the extras: `hydra.searchpath: [pkg://lockstep_extras.conf]`."""
