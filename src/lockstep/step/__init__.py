"""One optimizer step from its pieces: micro-batches, the loop, gradients, BatchNorm, strategies."""
