"""Mixing weights of hyper-connections: sigmoids and Sinkhorn's iteration."""

from pallas_kernels.hyper_mixing.op import Mixing, hyper_mixing

__all__ = ["Mixing", "hyper_mixing"]
