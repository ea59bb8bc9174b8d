"""One optimizer step from its pieces: micro-batches, passes, gradients, buffers, and the loop."""
