"""The pages of the streams: `hydra.searchpath: [pkg://lockstep_streams.conf]`."""
