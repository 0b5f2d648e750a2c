"""Masks packed into words of 32 bits, the lowest bit first."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

WORD = 32
ALL_BITS = 0xFFFFFFFF


def pack(mask: Array) -> Array:
    """`[..., M]` bool to `[..., ceil(M / 32)]` uint32; bits beyond M are 0."""
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % WORD)])
    every = padded.reshape(*mask.shape[:-1], -1, WORD).astype(jnp.uint32)
    return (every << jnp.arange(WORD, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def leading(count: Array, words: int) -> Array:
    """Words of which the first `count` bits are set, `[...]` to `[..., words]` uint32.

    Any count will do: below 0 it sets no bit, and beyond the words all of them.
    """
    left = jnp.clip(count[..., None] - WORD * jnp.arange(words), 0, WORD)
    some = (jnp.uint32(1) << (left % WORD).astype(jnp.uint32)) - 1
    return jnp.where(left == WORD, jnp.uint32(ALL_BITS), some)


def merge(words: Array, axis: int) -> Array:
    """The bits that are set anywhere along an axis, without that axis."""
    return lax.reduce(words, jnp.uint32(0), lax.bitwise_or, (axis,))
