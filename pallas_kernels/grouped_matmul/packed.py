"""Expert weights as the release stores them: FP8 and FP4 with powers of two as scales."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.e8m0 import E2M1_MAX, E4M3_MAX, exponent_for, power

FP8_BLOCK = 128  # rows and columns that share a scale
FP4_GROUP = 32  # inputs that share a scale


class Fp8Weights(NamedTuple):
    """Weights `[X, out, in]` in e4m3, with a scale for each block of 128 outputs and 128 inputs."""

    value: Array  # [X, out, in] float8_e4m3fn
    scale: Array  # [X, ceil(out / 128), ceil(in / 128)] float8_e8m0fnu

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights that they stand for."""
        return self.value.shape


class Fp4Weights(NamedTuple):
    """Weights `[X, out, in]` in e2m1, with a scale for every 32 inputs of an output."""

    value: Array  # [X, out, in / 2] uint8: the low four bits are the even input
    scale: Array  # [X, out, in / 32] float8_e8m0fnu

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights that they stand for."""
        return *self.value.shape[:-1], 2 * self.value.shape[-1]


Weights = Array | Fp8Weights | Fp4Weights
"""Stacked weights of all experts, `[X, out, in]`."""


def pack_fp8(w: Array) -> Fp8Weights:
    """Rounds `[X, out, in]` to the nearest; a block's scale is the least that holds its largest."""
    w = w.astype(jnp.float32)
    experts, rows, columns = w.shape
    blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    short = [size * FP8_BLOCK - n for size, n in zip(blocks, (rows, columns), strict=True)]
    padded = jnp.pad(w, [(0, 0), (0, short[0]), (0, short[1])])
    tiles = padded.reshape(experts, blocks[0], FP8_BLOCK, blocks[1], FP8_BLOCK)
    exponent = exponent_for(jnp.abs(tiles).max((2, 4)), E4M3_MAX)
    value = tiles * power(-exponent)[:, :, None, :, None]
    value = value.reshape(padded.shape)[:, :rows, :columns].astype(jnp.float8_e4m3fn)
    return Fp8Weights(value, power(exponent).astype(jnp.float8_e8m0fnu))


def pack_fp4(w: Array) -> Fp4Weights:
    """Rounds `[X, out, in]` to the nearest, ties to even; `in` is a multiple of 32."""
    groups = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, FP4_GROUP)
    exponent = exponent_for(jnp.abs(groups).max(-1), E2M1_MAX)
    value = (groups * power(-exponent)[..., None]).reshape(w.shape)
    size = jnp.abs(value)
    # Between 0, .5, 1, 1.5, 2, 3, 4, 6 the midpoints go to the code whose last bit is 0.
    code = jnp.zeros(w.shape, jnp.uint8)
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        beyond = size >= middle if i % 2 else size > middle
        code += beyond.astype(jnp.uint8)
    code |= jnp.signbit(value).astype(jnp.uint8) << 3
    return Fp4Weights(
        code[..., ::2] | code[..., 1::2] << 4, power(exponent).astype(jnp.float8_e8m0fnu)
    )
