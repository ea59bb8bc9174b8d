"""Processes: parent.py starts workers, rendezvous.py joins them to a group, failures.py says why one has failed."""
