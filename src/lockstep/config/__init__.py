"""From the command line and the yaml files to a checked config."""
