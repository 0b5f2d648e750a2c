"""Keys of the indexer in eight bits."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.e8m0 import E4M3_MAX, exponent_for, power


class PackedKeys(NamedTuple):
    """Keys as e4m3 values with one power of two a key: key = value * scale.

    A power of two leaves the order of roundings alone, so a score of packed keys equals that of
    the unpacked ones bit for bit, whether the scale is applied before the product or after it.
    """

    value: Array  # [B, C, ci] float8_e4m3fn
    scale: Array  # [B, C] float8_e8m0fnu


def pack_keys(keys: Array) -> PackedKeys:
    """Rounds `[B, C, ci]` keys; the scale is the least that keeps a key within e4m3's range."""
    keys = keys.astype(jnp.float32)
    # The floor keeps scales of keys near zero far from the end of float32.
    exponent = exponent_for(jnp.maximum(jnp.abs(keys).max(-1), 1e-4), E4M3_MAX)
    value = keys * power(-exponent)[..., None]
    return PackedKeys(value.astype(jnp.float8_e4m3fn), power(exponent).astype(jnp.float8_e8m0fnu))


def unpack_keys(keys: Array | PackedKeys) -> Array:
    """The keys `[B, C, ci]` that packed ones stand for, in float32; others as they are."""
    if not isinstance(keys, PackedKeys):
        return keys
    return keys.value.astype(jnp.float32) * keys.scale.astype(jnp.float32)[..., None]


def values(keys: Array | PackedKeys) -> Array:
    """What holds the keys' entries `[B, C, ci]`, in whatever precision."""
    return keys.value if isinstance(keys, PackedKeys) else keys
