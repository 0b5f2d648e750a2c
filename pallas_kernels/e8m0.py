"""Powers of two as scales of narrow formats (E8M0 of the OCP microscaling formats)."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

E4M3_MAX, E2M1_MAX = 448.0, 6.0
"""The largest numbers of the formats that are scaled: FP8 and FP4."""
LEAST, MOST = -126, 126
"""Exponents whose powers of two, and their inverses, are normal numbers of float32: XLA takes
smaller ones for zero."""


def exponent_for(largest: Array, top: float) -> Array:
    """Exponent of the least power of two whose product with `top` is not below `largest`.

    It is read from the floats' bits: neither logarithms nor quotients of float32 are exact, and an
    exponent that is too small by one makes the largest value of a group overflow.

    Args:
        largest: magnitude of the largest value of each group, float32.
        top: largest number of the narrow format.

    Returns:
        int32 in `LEAST` to `MOST`; `LEAST` for a group of zeros.
    """
    bound, offset = math.frexp(top)
    fraction, exponent = jnp.frexp(largest)
    exponent = exponent - offset + (fraction > bound)
    return jnp.where(largest > 0, jnp.clip(exponent, LEAST, MOST), LEAST).astype(jnp.int32)


def power(exponent: Array) -> Array:
    """Two to an exponent in `LEAST` to `MOST`, exact, float32."""
    return jnp.ldexp(jnp.float32(1), exponent)
