"""Triton kernels, one module a family."""
