"""A run's worker processes: what they are told, how they find each other, and how a signal ends them."""
