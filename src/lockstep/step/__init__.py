"""One optimizer step from its pieces: micro-batches, passes, gradients, BatchNorm, and the loop."""
