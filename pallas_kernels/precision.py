"""How exactly matrix products are computed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def precision_of(dtype: Any) -> lax.Precision | None:
    """For operands of a dtype: products of float32 are products of float32.

    Unless asked, TPUs round them to bfloat16 first, and GPUs to TF32. CPUs do neither.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
