"""Faster ways to compute the same moves: Triton kernels and CUDA graphs."""
