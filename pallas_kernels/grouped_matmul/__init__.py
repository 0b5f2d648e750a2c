"""Routed experts of a mixture-of-experts layer."""

from pallas_kernels.grouped_matmul.op import grouped_matmul

__all__ = ["grouped_matmul"]
