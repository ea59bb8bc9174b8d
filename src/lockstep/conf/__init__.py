"""The pages of the config that a project inherits: `hydra.searchpath: [pkg://lockstep.conf]`."""
