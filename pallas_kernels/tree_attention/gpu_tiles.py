"""What the Hopper kernel works on: sources of keys cut into tiles, with packed bits over all.

Every mask is brought to one form outside the kernel, two words for each node and tile of 64 keys:
these words are all that says who sees what. They hold an eighth of a byte for each node and key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.hopper import SMS
from pallas_kernels.tree_attention.gpu_layout import TILE, Fp8Source, Rows, warpgroups
from pallas_kernels.tree_attention.gpu_selected import (
    gathers,
    list_selected,
    list_size,
    nodes_together,
)
from pallas_kernels.tree_attention.sources import Committed, Fp8Entries, Own
from pallas_kernels.words import WORD, leading, merge, pack

LEAST_STEPS = 4
"""Steps of a split at the least: a block of threads first fetches its queries."""
MOST_SPLITS = 8
"""Blocks that are a cluster on every device that has clusters."""
TOGETHER = 16
"""Multiprocessors that are counted on in each group that can hold a cluster (a GPC): 132 are 8
groups of up to 18."""


class Tiles(NamedTuple):
    """Sources in the order of the kernel, and who sees what of them."""

    sources: list[Any]  # [B, M, K], `Fp8Source` or `Rows`
    starts: tuple[int, ...]  # first tile of each source, then the number of tiles
    words: Array  # [B, N, 2 tiles] uint32
    valid: Array  # [B, S, 2 tiles] uint32: keys that hold something, for each set of nodes


class Lists(NamedTuple):
    """The tiles that matter to each 64 query rows."""

    tiles: Array  # [B R / 64, even] int32
    counts: Array  # [B R / 64] int32


def tiles_of(committed: Committed, own: Own, position: Array, heads: int, mode: str) -> Tiles:
    """Ring, own rows, entries and own entries of a call, each padded to whole tiles by bits.

    `heads` is padded.
    """
    window, rows = committed.ring.shape[1], own.rows.shape[1]
    oldest = position[..., None] - window
    newest = committed.length[:, None] - 1
    held = newest - (newest - jnp.arange(window)) % window
    ring = (held >= 0)[:, None] & (held[:, None] > oldest)
    near = pack(own.row_position[:, None] > oldest)
    if own.row_bits is None:
        mine = near & pack(jnp.arange(rows) <= jnp.arange(position.shape[1])[:, None])
    else:
        mine = near & own.row_bits
    sources: list[Any] = [committed.ring, own.rows]
    words = [pack(ring), mine]
    valid = [pack(held >= 0), merge(mine, 1)]
    if committed.entries is not None:
        entries, every, there = _entries(committed, position.shape[1], heads, mode)
        ours = own.entry_bits & leading(jnp.array([rows_of(own.entries)]), own.entry_bits.shape[2])
        sources += [entries, own.entries]
        words += [every, ours]
        valid += [there, merge(ours, 1)]
    starts, padded = [0], []
    for source in sources:
        starts.append(starts[-1] + -(-rows_of(source) // TILE))
    for source, bits in zip(sources + sources, words + valid, strict=True):
        spare = -(-rows_of(source) // TILE) * (TILE // WORD) - bits.shape[-1]
        padded.append(jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, spare)]))
    count, batch = len(sources), position.shape[0]
    sets = -(-position.shape[1] // nodes_together(heads))
    holds = [
        jnp.broadcast_to(bits.reshape(batch, -1, bits.shape[-1]), (batch, sets, bits.shape[-1]))
        for bits in padded[count:]
    ]
    return Tiles(
        [_whole(source) for source in sources],
        tuple(starts),
        jnp.concatenate(padded[:count], axis=-1),
        jnp.concatenate(holds, axis=-1),
    )


def _entries(committed: Committed, nodes: int, heads: int, mode: str) -> tuple[Any, Array, Array]:
    """Committed entries or single rows of them; who sees what; what holds anything."""
    capacity = rows_of(committed.entries)
    count = jnp.minimum(committed.length // committed.ratio, capacity)
    if gathers(committed, nodes, heads, mode):
        size = list_size(committed, nodes, heads)
        found = list_selected(committed.selected, count, nodes_together(heads), size)
        rows = Rows(_by_rows(committed.entries, found.rows), found.rows)
        return rows, found.words, leading(found.held, size // WORD)
    there = leading(count, -(-capacity // WORD))
    every = jnp.broadcast_to(there[:, None], (there.shape[0], nodes, there.shape[1]))
    if committed.selected is not None:
        every = every & committed.selected
    return committed.entries, every, there


def _by_rows(entries: Any, listed: Array) -> Any:
    """Keys as single rows are read: as they are, but FP8's scales, few bytes, by lists."""
    if not isinstance(entries, Fp8Entries):
        return entries
    places = listed.reshape(listed.shape[0], -1, 1)
    scale = jnp.take_along_axis(entries.scale, places, axis=1)
    scale = scale.reshape(*listed.shape, -1).swapaxes(2, 3)
    return Fp8Source(entries.values, scale, entries.rotary)


def lists_of(words: Array, heads: int) -> Lists:
    """Tiles of which a node of the 64 rows sees a key, in order, then padding.

    Args:
        words: `[B, nodes, 2 tiles]`, nodes padded to whole tiles of rows.
        heads: of a node, padded: a power of two up to 64 or a multiple of 64.
    """
    batch, nodes, count = words.shape
    count //= TILE // WORD
    together, apart = max(1, TILE // heads), max(1, heads // TILE)
    seen = words.reshape(batch, nodes // together, together, count, TILE // WORD) != 0
    seen = jnp.repeat(seen.any((2, 4)), apart, axis=1).reshape(-1, count)
    order = jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32)
    counts = seen.sum(-1, dtype=jnp.int32)
    # Padding names a tile like any other, of the own rows: it is small.
    return Lists(jnp.pad(order, [(0, 0), (0, count % 2)]), counts)


def padded_heads(heads: int) -> int:
    """Heads so that 64 rows hold whole nodes, or a node whole 64 rows."""
    if heads > TILE:
        return -(-heads // TILE) * TILE
    return 1 << (heads - 1).bit_length()


def default_splits(blocks: int, tiles: int, width: int) -> int:
    """As many as give multiprocessors a block of threads and each block enough to do.

    A power of two: clusters of other sizes leave some of the 16 multiprocessors over that share
    their memory at the least.
    """
    steps = -(-tiles // warpgroups(width))
    most = min(SMS // TOGETHER * TOGETHER // blocks, steps // LEAST_STEPS, MOST_SPLITS)
    return 1 << max(0, most.bit_length() - 1)


def unpacks(entries: Fp8Entries) -> bool:
    """Whether the kernel reads these FP8 entries as they are."""
    return entries.values.shape[-1] % TILE == 0 and entries.rotary.shape[-1] == TILE


def rows_of(keys: Any) -> int:
    """The number of keys of a sequence, or of each list of rows."""
    if isinstance(keys, Rows):
        return keys.listed.shape[2]
    return jax.tree.leaves(keys)[0].shape[1]


def _whole(source: Any) -> Any:
    """Keys in whole lines of 8, as TMA reads them: a copy of a cache of another capacity."""
    if isinstance(source, Rows):  # which TMA does not read
        return source
    if isinstance(source, Fp8Entries):
        scale = jnp.pad(source.scale, [(0, 0), (0, -rows_of(source) % 16), (0, 0)])
        return Fp8Source(_whole(source.values), scale.swapaxes(1, 2), _whole(source.rotary))
    return jnp.pad(source, [(0, 0), (0, -source.shape[1] % 8), (0, 0)])
