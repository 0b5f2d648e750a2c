"""Kernels of the verification pass, one folder an operation: signature, definition, TPU, GPU."""
