"""Programs: each module of this package, but `main`, is a command. `lockstep parity` calls `parity.main`."""
