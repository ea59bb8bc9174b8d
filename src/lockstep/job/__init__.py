"""One run in a worker: its module, data and trainer, from its start to its summary."""
