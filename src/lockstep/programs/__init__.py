"""Programs: each module of this package is a command, `lockstep <name>`."""
