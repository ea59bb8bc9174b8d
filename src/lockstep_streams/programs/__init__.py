"""Commands of the streams, found as those in `lockstep.programs`."""
