"""The arithmetic of a step: who computes which piece, which samples it holds, and sums without an order."""
