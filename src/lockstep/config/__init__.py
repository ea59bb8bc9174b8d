"""The config: from the command line and the yaml files to a checked `Config`."""
