"""How keys come into shared memory on Hopper: fetched, unpacked, cleared and replaced."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention.gpu_layout import (
    MATRIX,
    ROW,
    STAGES,
    TILE,
    Fp8Source,
    Operands,
    Scratch,
    Shape,
    along,
    pieces,
)
from pallas_kernels.words import ALL_BITS


class Place(NamedTuple):
    """Where a warpgroup works: its part of the lists, and the references that it works on."""

    ref: Operands
    scratch: Scratch
    shape: Shape
    group: Array
    groups: int
    batch: Array
    row: Array  # its first query row
    line: Array  # of the list of tiles
    first: Array  # step of this split
    steps: Array  # of this split
    listed: Array  # tiles on the list

    @property
    def fp8(self) -> bool:
        """Whether a source is in FP8."""
        return any(isinstance(source, Fp8Source) for source in self.ref.sources)

    def tile(self, step: Array, group: Any) -> Array:
        """The tile that a warpgroup has at a step."""
        return self.ref.tiles[self.line, step * self.groups + group]


def fetch(at: Place, step: Array, group: int) -> None:
    """Starts the copy of a warpgroup's tile; rows beyond the source's end come as zeros."""
    tile = at.tile(step, group)
    for index, source in enumerate(at.ref.sources):
        start, end = at.shape.starts[index : index + 2]

        @pl.when((tile >= start) & (tile < end))
        def _(source: Any = source, start: int = start) -> None:
            keys, first = source, 0
            if isinstance(source, Fp8Source):  # the rest follows in `unpack`
                keys, first = source.rotary, at.ref.q.shape[2] - TILE
            count = pieces(at.fp8)
            for piece in range(count):
                lines = pl.ds(piece * (TILE // count), TILE // count)
                rows = pl.ds((tile - start) * TILE + piece * (TILE // count), TILE // count)
                plgpu.copy_gmem_to_smem(
                    keys.at[at.batch, rows],
                    at.scratch.keys.at[group, lines, first:],
                    at.scratch.key_ready.at[group],
                )


def unpack(at: Place, step: Array) -> None:
    """Brings the warpgroup's tile from FP8 to bfloat16, a group of 64 values a key at a time."""
    tile = at.tile(step, at.group)
    for index, source in enumerate(at.ref.sources):
        start, end = at.shape.starts[index : index + 2]
        if isinstance(source, Fp8Source):

            @pl.when((tile >= start) & (tile < end))
            def _(source: Fp8Source = source, start: int = start) -> None:
                _unpack_tile(at, source, (tile - start) * TILE)


def _unpack_tile(at: Place, source: Fp8Source, row: Array) -> None:
    scratch, count = at.scratch, source.scale.shape[1]

    def bring(part: Array, stage: Array) -> None:
        rows, barrier = pl.ds(row, TILE), scratch.staged_ready.at[stage]
        values = source.values.at[at.batch, rows, pl.ds(part * TILE, TILE)]
        plgpu.copy_gmem_to_smem(values, scratch.staged.at[stage], barrier)
        scales = source.scale.at[at.batch, part, pl.ds(row, 2 * TILE)]
        plgpu.copy_gmem_to_smem(scales, scratch.scales.at[stage], barrier)

    for part in range(min(STAGES, count)):
        bring(jnp.int32(part), at.group * STAGES + part)

    @pl.loop(0, count)
    def _(part: Array) -> None:
        stage = at.group * STAGES + lax.rem(part, STAGES)
        plgpu.barrier_wait(scratch.staged_ready.at[stage])
        values = plgpu.layout_cast(scratch.staged[stage], MATRIX).astype(jnp.float32)
        exponent = plgpu.layout_cast(scratch.scales[stage, :TILE], ROW).astype(jnp.uint32)
        scale = lax.bitcast_convert_type(exponent << jnp.uint32(23), jnp.float32)
        keys = scratch.keys.at[at.group, :, pl.ds(part * TILE, TILE)]
        keys[...] = (values * along(scale, TILE)).astype(keys.dtype)
        plgpu.commit_smem()

        @pl.when(part + STAGES < count)
        def _() -> None:
            bring(part + STAGES, stage)


def refill(at: Place, step: Array, group: int) -> None:
    """Fetches the next tile into a place that every warpgroup has used."""
    if at.groups > 1:
        plgpu.barrier_arrive(at.scratch.keys_used.at[group])

    @pl.when(at.group == 0)
    def _() -> None:
        if at.groups > 1:
            plgpu.barrier_wait(at.scratch.keys_used.at[group])

        @pl.when(step + 1 < at.first + at.steps)
        def _() -> None:
            fetch(at, step + 1, group)


def clear(at: Place, step: Array) -> None:
    """Zeroes the keys of the warpgroup's tile that hold nothing: zero times NaN is NaN."""
    tile = at.tile(step, at.group)
    words = [at.ref.valid[at.batch, 2 * tile + half] for half in range(2)]

    @pl.when((words[0] & words[1]) != jnp.uint32(ALL_BITS))
    def _() -> None:
        @pl.loop(0, at.ref.q.shape[2] // TILE)
        def _(column: Array) -> None:
            keys = at.scratch.keys.at[at.group, :, pl.ds(column * TILE, TILE)]
            held = plgpu.layout_cast(keys[...], MATRIX)
            keys[...] = jnp.where(bits_at(words, 0), held, jnp.zeros_like(held))

        plgpu.commit_smem()


def bits_at(words: list[Array], axis: int) -> Array:
    """Bit i of two words at place i of an axis of a matrix."""
    place = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=MATRIX)
    word = jnp.where(place < 32, words[0], words[1])
    return ((word >> (place & 31).astype(jnp.uint32)) & jnp.uint32(1)) == jnp.uint32(1)
