"""Commands of the extras, found as those in `lockstep.programs`."""
