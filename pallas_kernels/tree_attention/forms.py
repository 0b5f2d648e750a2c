"""Forms of the compressed entries: how each is made from plain values, and what it means."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.dispatch import target_platform
from pallas_kernels.e8m0 import E4M3_MAX, exponent_for, power
from pallas_kernels.tree_attention.sources import (
    FP8_GROUP,
    Bf16Words,
    Entries,
    Fp8Bytes,
    Fp8Entries,
)


def quantise(entries: Array, rotary: int) -> Fp8Entries:
    """Rounds entries `[B, C, K]` to FP8, all but their last `rotary` dims.

    The scale of a group is the least power of two that brings its largest value (1e-4 at the least)
    within the 448 of e4m3.
    """
    whole = entries[..., : entries.shape[-1] - rotary].astype(jnp.float32)
    dims = whole.shape[-1]
    groups = -(-dims // FP8_GROUP)
    padded = jnp.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, groups * FP8_GROUP - dims)])
    largest = jnp.abs(padded.reshape(*whole.shape[:-1], groups, FP8_GROUP)).max(-1)
    exponent = exponent_for(jnp.maximum(largest, 1e-4), E4M3_MAX)
    inverse = jnp.repeat(power(-exponent), FP8_GROUP, axis=-1)[..., :dims]
    return Fp8Entries(
        values=(whole * inverse).astype(jnp.float8_e4m3fn),
        scale=(exponent + 127).astype(jnp.uint8),
        rotary=entries[..., dims:].astype(jnp.bfloat16),
    )


def dequantise(entries: Fp8Entries) -> Array:
    """The values of FP8 entries, `[B, C, K]` bfloat16: exact, as a power of two scales them."""
    exponent = jnp.repeat(entries.scale.astype(jnp.int32) - 127, FP8_GROUP, axis=-1)
    scale = power(exponent[..., : entries.values.shape[-1]])
    whole = entries.values.astype(jnp.float32) * scale
    return jnp.concatenate([whole.astype(jnp.bfloat16), entries.rotary], axis=-1)


def to_bytes(entries: Fp8Entries) -> Fp8Bytes:
    """FP8 entries as rows of bytes."""
    rotary = lax.bitcast_convert_type(entries.rotary, jnp.uint8)  # low byte first
    dim = entries.values.shape[-1] + rotary.shape[-2]
    spare = min(dim, 128) - entries.scale.shape[-1] - rotary.shape[-2]
    if spare < 0:
        raise ValueError(f"no room for the scales of a row of {dim} dims")
    padded = jnp.pad(entries.scale, [(0, 0), (0, 0), (0, spare)])
    values = lax.bitcast_convert_type(entries.values, jnp.uint8)
    rows = jnp.concatenate([values, rotary[..., 0], padded, rotary[..., 1]], axis=-1)
    return Fp8Bytes(rows, rotary.shape[-2])


def from_bytes(entries: Fp8Bytes) -> Fp8Entries:
    """The inverse of `to_bytes`."""
    rows, rotary = entries
    tail = min(rows.shape[-1] // 2, 128)
    dim = rows.shape[-1] - tail
    low, high = rows[..., dim - rotary : dim], rows[..., rows.shape[-1] - rotary :]
    groups = -(-(dim - rotary) // FP8_GROUP)
    return Fp8Entries(
        values=lax.bitcast_convert_type(rows[..., : dim - rotary], jnp.float8_e4m3fn),
        scale=rows[..., dim : dim + groups],
        rotary=lax.bitcast_convert_type(jnp.stack([low, high], axis=-1), jnp.bfloat16),
    )


def to_words(entries: Array) -> Bf16Words:
    """Entries `[B, C, K]` as rows of words."""
    halves = jnp.split(lax.bitcast_convert_type(entries.astype(jnp.bfloat16), jnp.uint16), 2, -1)
    low, high = (half.astype(jnp.uint32) for half in halves)
    return Bf16Words(low | high << 16)


def from_words(entries: Bf16Words) -> Array:
    """The inverse of `to_words`, `[B, C, K]` bfloat16."""
    halves = [(entries.words >> shift).astype(jnp.uint16) for shift in (0, 16)]
    return lax.bitcast_convert_type(jnp.concatenate(halves, axis=-1), jnp.bfloat16)


def plain(entries: Entries, dtype: jnp.dtype) -> Array:
    """Entries of any form as `[B, C, K]`; other forms than plain ones are cast to `dtype`."""
    if isinstance(entries, Fp8Bytes):
        entries = from_bytes(entries)
    if isinstance(entries, Fp8Entries):
        return dequantise(entries).astype(dtype)
    if isinstance(entries, Bf16Words):
        return from_words(entries).astype(dtype)
    return entries


def fitting(entries: Array, impl: str) -> Entries:
    """Plain entries `[B, C, K]` in the form that an implementation reads with the fewest bytes.

    A TPU fetches a selected row alone only if it is one of words.
    """
    on_tpu = impl == "tpu" or (impl == "auto" and target_platform() == "tpu")
    if on_tpu and entries.dtype == jnp.bfloat16 and entries.shape[-1] % 2 == 0:
        return to_words(entries)
    return entries


def alike(entries: Array, stored: Entries) -> Entries:
    """Plain entries `[B, J, K]` in the form of stored ones: as they are, or as bfloat16 words.

    Raises:
        TypeError: stored ones are FP8, which is rounding and not a change of form.
    """
    if isinstance(stored, Bf16Words):
        return to_words(entries)
    if isinstance(stored, Fp8Entries | Fp8Bytes):
        raise TypeError("rounding to FP8 is no change of form; call quantise")
    return entries
