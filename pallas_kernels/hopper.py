"""What the kernels for Hopper GPUs know of the device and of its interpreter."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

SMS = 132
"""Streaming multiprocessors of an H100 or H200, each of which holds one block of threads."""


def check_interpreter(interpret: Any) -> None:
    """Refuses interpretation where it cannot be; `interpret` is what `plgpu.kernel` takes.

    Raises:
        ValueError: interpretation is asked of a JAX that has no interpreter for such kernels.
    """
    if interpret and not hasattr(plgpu, "InterpretGPUParams"):
        raise ValueError("this jax's interpreter of GPU kernels transposes no operand; 0.12's does")
