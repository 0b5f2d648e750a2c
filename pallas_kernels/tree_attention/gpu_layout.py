"""Arrays, shared memory and registers of the Hopper kernel of tree attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Query rows of a block of threads, and keys of a tile: the rows of one wgmma."""
LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2E = math.log2(math.e)
STAGES = 2
"""Groups of FP8 values that a warpgroup has under way."""
MATRIX = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)


class Shape(NamedTuple):
    """Static sizes of one call."""

    heads: int  # padded: a power of two up to 64, or a multiple of 64
    splits: int  # blocks of threads that share a list of tiles: a cluster
    starts: tuple[int, ...]  # first tile of each source, then the number of tiles
    interpret: Any

    @property
    def clustered(self) -> bool:
        """Whether blocks join their parts in shared memory; the interpreter knows no peers."""
        return self.splits > 1 and not self.interpret

    @property
    def last(self) -> int:
        """The number of tiles of all sources."""
        return self.starts[-1]


class Fp8Source(NamedTuple):
    """Keys in FP8, all but the last 64 dims; scales lie along the keys, as TMA wants them."""

    values: Any  # [B, M, K - 64] float8_e4m3fn
    scale: Any  # [B, (K - 64) / 64, M up to a multiple of 16] uint8; of `Rows` [B, S, .., U]
    rotary: Any  # [B, M, 64] bfloat16


class Rows(NamedTuple):
    """Keys of which each set of nodes reads its own list of single rows."""

    keys: Any  # [B, M, K] or `Fp8Source`
    listed: Any  # [B, S, U] int32: 64 of them are a tile


class Operands(NamedTuple):
    """Arrays, or references to them in global memory."""

    q: Any  # [B, R, K]: a row is a (node, head) pair
    sources: Sequence[Any]  # of keys, [B, M, K] each, `Fp8Source` or `Rows`
    words: Any  # [B, nodes, 2 last] uint32: which keys of a tile a node sees
    valid: Any  # [B, S, 2 last] uint32: which keys of a tile hold anything, for each set of nodes
    tiles: Any  # [B R / 64, even] int32: the tiles that matter to 64 rows, then padding
    counts: Any  # [B R / 64] int32: how many these are
    sink: Any  # [max(heads, 64)] float32, repeated over the rows of a tile


class Results(NamedTuple):
    """Arrays, or references to them; the parts of several splits in interpretation alone."""

    out: Any  # [B, 1, R, K] float32, or parts [B, splits, R, K]
    top: Any = None  # [B, splits, R] float32: maxima of the scores, times log2(e)
    total: Any = None  # [B, splits, R] float32: sums of the weights


class Part(NamedTuple):
    """What a block of a cluster leaves to its peers: references to its shared memory."""

    out: Any  # [64, K] float32: of the softmax against the maxima, not normalised
    statistics: Any  # [2, 64] float32: maxima of the scores, times log2(e); sums of the weights


class Scratch(NamedTuple):
    """References to shared memory and barriers."""

    q: Any  # [1, 64, K]
    keys: Any  # [groups, 64, K]
    weights: Any  # [groups, 64, 64]
    rows: Any  # [groups + 1, 64] float32: of each warpgroup, and the sinks
    staged: Any  # [groups STAGES, 64, 64] float8_e4m3fn; one byte without FP8
    scales: Any  # [groups STAGES, 128] uint8: no copy is smaller; 64 are used
    q_ready: Any
    key_ready: Any
    rows_ready: Any
    weights_ready: Any
    keys_used: Any
    staged_ready: Any
    rows_copied: Any  # of each warpgroup, then of each stage: single rows, in interpretation alone
    part: Any = None  # `Part` of a cluster, in the place of keys and weights


class Softmax(NamedTuple):
    """The state of the online softmax of one warpgroup, in registers."""

    top: Array  # [64]: over the keys of both warpgroups
    total: Array  # [64]: over its own keys
    out: Array  # [64, its columns]


def is_fp8(source: Any) -> bool:
    """Whether keys are unpacked in the kernel."""
    return isinstance(source.keys if isinstance(source, Rows) else source, Fp8Source)


def warpgroups(width: int) -> int:
    """How many share a block of threads; each needs 64 columns of the output at the least."""
    return 2 if width % 128 == 0 else 1


def pieces(fp8: bool) -> int:
    """Copies that bring a tile of keys.

    The last 64 dims alone have no contiguous place in shared memory but 8 lines at a time, and a
    barrier counts the same copies for any source.
    """
    return TILE // 8 if fp8 else 1


def scratch_types(groups: int, width: int, dtype: Any, fp8: bool) -> list[Any]:
    """Shared memory and barriers of a block of threads."""
    columns = 128 // jnp.dtype(dtype).itemsize
    swizzle = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    stages = groups * STAGES if fp8 else 1
    staged = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(TILE))
    return [
        plgpu.SMEM((1, TILE, width), dtype, transforms=swizzle),
        plgpu.SMEM((groups, TILE, width), dtype, transforms=swizzle),
        plgpu.SMEM((groups, TILE, TILE), dtype, transforms=swizzle),
        plgpu.SMEM((groups + 1, TILE), jnp.float32),
        plgpu.SMEM((stages, TILE if fp8 else 8, TILE), jnp.float8_e4m3fn, transforms=staged),
        plgpu.SMEM((stages, 2 * TILE), jnp.uint8),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=pieces(fp8), num_barriers=groups),
        plgpu.Barrier(num_arrivals=groups),
        plgpu.Barrier(num_arrivals=groups),
        plgpu.Barrier(num_arrivals=groups, num_barriers=groups),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=TILE, num_barriers=groups + stages),
    ]


def full(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> Array:
    """A constant in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along(rows: Array, columns: int) -> Array:
    """A value for each row, `[64]`, to `[64, columns]`."""
    return lax.broadcast_in_dim(rows, (TILE, columns), (0,))
