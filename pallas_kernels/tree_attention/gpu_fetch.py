"""How keys come into shared memory on Hopper: fetched, unpacked, cleared and replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    Rows,
    Scratch,
    Shape,
    along,
    is_fp8,
    pieces,
)
from pallas_kernels.tree_attention.gpu_rows import await_copies, close_group, copy_rows, together
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
        return any(is_fp8(source) for source in self.ref.sources)

    @property
    def node_set(self) -> Array:
        """The set of nodes that the query rows belong to."""
        return self.row // max(self.shape.heads, TILE)

    def tile(self, step: Array, group: Any) -> Array:
        """The tile that a warpgroup has at a step."""
        return self.ref.tiles[self.line, step * self.groups + group]

    def when_of(self, step: Array, wanted: Callable[[Any], bool], do: Callable[..., None]) -> None:
        """`do(source, key)` with the source of this warpgroup's tile and its first key there."""
        tile = self.tile(step, self.group)
        for index, source in enumerate(self.ref.sources):
            start, end = self.shape.starts[index : index + 2]
            if wanted(source):
                within = (tile >= start) & (tile < end)
                pl.when(within)(partial(do, source, (tile - start) * TILE))


def fetch(at: Place, step: Array) -> None:
    """Starts the copy of the warpgroup's tile; rows beyond a source's end come as zeros."""

    def start(source: Any, first: Array) -> None:
        keys, column = source.keys if isinstance(source, Rows) else source, 0
        if isinstance(keys, Fp8Source):  # the rest follows in `unpack`
            keys, column = keys.rotary, at.ref.q.shape[2] - TILE
        if isinstance(source, Rows):
            index = source.listed.at[at.batch, at.node_set, pl.ds(first, TILE)]
            place = at.scratch.keys.at[at.group, :, column:]
            _copy_tile(at, keys.at[at.batch], index, place, at.group)
            _close(at)
            return
        count = pieces(at.fp8)
        for piece in range(count):
            lines = pl.ds(piece * (TILE // count), TILE // count)
            rows = pl.ds(first + piece * (TILE // count), TILE // count)
            plgpu.copy_gmem_to_smem(
                keys.at[at.batch, rows],
                at.scratch.keys.at[at.group, lines, column:],
                at.scratch.key_ready.at[at.group],
            )

    at.when_of(step, lambda source: True, start)


def _copy_tile(at: Place, keys: Any, index: Any, place: Any, number: Any) -> None:
    """Starts the copy of single rows, `[M, ..]` by `[64]` to `[64, ..]`.

    The interpreter knows no `cp.async`: there each row is a copy to its line of the tile, on
    barrier `number` of `rows_copied`.
    """
    if at.shape.interpret:

        @pl.loop(0, TILE)
        def _(line: Array) -> None:
            row, barrier = keys.at[pl.ds(index[line], 1)], at.scratch.rows_copied.at[number]
            plgpu.copy_gmem_to_smem(row, place.at[pl.ds(line, 1)], barrier)

        return
    count = together(place)

    @pl.loop(0, TILE // count)
    def _(turn: Array) -> None:
        lines = pl.ds(turn * count, count)
        copy_rows(keys, index.at[lines], place.at[lines])


def _close(at: Place) -> None:
    if not at.shape.interpret:
        close_group()


def _await(at: Place, number: Any, under_way: int) -> None:
    """Waits for the copies of barrier `number`: all groups but the last so many."""
    if at.shape.interpret:
        plgpu.barrier_wait(at.scratch.rows_copied.at[number])
    else:
        await_copies(under_way)
    plgpu.commit_smem()


def receive(at: Place, step: Array) -> None:
    """Waits for what `fetch` started."""

    def whole(source: Any, first: Array) -> None:
        plgpu.barrier_wait(at.scratch.key_ready.at[at.group])

    def single(source: Any, first: Array) -> None:
        _await(at, at.group, 0)

    at.when_of(step, lambda source: not isinstance(source, Rows), whole)
    at.when_of(step, lambda source: isinstance(source, Rows), single)


def unpack(at: Place, step: Array) -> None:
    """Brings the warpgroup's tile from FP8 to bfloat16, a group of 64 values a key at a time."""
    at.when_of(step, is_fp8, partial(_unpack_tile, at))


def _unpack_tile(at: Place, source: Any, first: Array) -> None:
    scratch = at.scratch
    keys = source.keys if isinstance(source, Rows) else source
    count = keys.scale.shape[-2]

    @pl.loop(0, STAGES)
    def _(part: Array) -> None:
        _bring(at, source, first, part)

    @pl.loop(0, count)
    def _(part: Array) -> None:
        stage = at.group * STAGES + lax.rem(part, STAGES)
        plgpu.barrier_wait(scratch.staged_ready.at[stage])
        if isinstance(source, Rows):
            _await(at, at.groups + stage, STAGES - 1)
        values = plgpu.layout_cast(scratch.staged[stage], MATRIX).astype(jnp.float32)
        exponent = plgpu.layout_cast(scratch.scales[stage, :TILE], ROW).astype(jnp.uint32)
        scale = lax.bitcast_convert_type(exponent << jnp.uint32(23), jnp.float32)
        place = scratch.keys.at[at.group, :, pl.ds(part * TILE, TILE)]
        place[...] = (values * along(scale, TILE)).astype(place.dtype)
        plgpu.commit_smem()
        _bring(at, source, first, part + STAGES)


def _bring(at: Place, source: Any, first: Array, part: Array) -> None:
    """Starts the copy of one group of 64 FP8 values a key, and of their scales."""
    keys = source.keys if isinstance(source, Rows) else source
    stage = at.group * STAGES + lax.rem(part, STAGES)
    barrier, place = at.scratch.staged_ready.at[stage], at.scratch.staged.at[stage]

    @pl.when(part < keys.scale.shape[-2])
    def _() -> None:
        columns = pl.ds(part * TILE, TILE)
        if isinstance(source, Rows):
            index = source.listed.at[at.batch, at.node_set, pl.ds(first, TILE)]
            values = keys.values.at[at.batch, :, columns]
            _copy_tile(at, values, index, place, at.groups + stage)
            scale = keys.scale.at[at.batch, at.node_set]
            plgpu.barrier_arrive(barrier)
        else:
            values = keys.values.at[at.batch, pl.ds(first, TILE), columns]
            plgpu.copy_gmem_to_smem(values, place, barrier)
            scale = keys.scale.at[at.batch]
        scales = scale.at[part, pl.ds(first, 2 * TILE)]
        plgpu.copy_gmem_to_smem(scales, at.scratch.scales.at[stage], barrier)

    if isinstance(source, Rows):
        _close(at)  # an empty group too, so that there are always as many to leave under way


def refill(at: Place, step: Array, group: int) -> None:
    """Fetches a warpgroup's next tile into a place that every warpgroup has used."""
    if at.groups > 1:
        plgpu.barrier_arrive(at.scratch.keys_used.at[group])

    @pl.when(at.group == group)
    def _() -> None:
        if at.groups > 1:
            plgpu.barrier_wait(at.scratch.keys_used.at[group])

        @pl.when(step + 1 < at.first + at.steps)
        def _() -> None:
            fetch(at, step + 1)


def clear(at: Place, step: Array) -> None:
    """Zeroes the keys of the warpgroup's tile that hold nothing: zero times NaN is NaN."""
    tile = at.tile(step, at.group)
    words = [at.ref.valid[at.batch, at.node_set, 2 * tile + half] for half in range(2)]

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
