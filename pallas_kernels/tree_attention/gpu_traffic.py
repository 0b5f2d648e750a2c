"""Bytes that the GPU kernel moves between device memory and the chip, by its own schedule."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from pallas_kernels.memory import nbytes, row_nbytes
from pallas_kernels.tree_attention.gpu_layout import TILE
from pallas_kernels.tree_attention.gpu_selected import BLOCK, gathers, list_size, nodes_together
from pallas_kernels.tree_attention.gpu_tiles import padded_heads, unpacks
from pallas_kernels.tree_attention.sources import Committed, Fp8Entries, Own
from pallas_kernels.words import WORD

LISTED = 24
"""Bytes a place of a list that XLA writes, and reads again, until it knows the row."""


def traffic(
    q: Array,
    sink: Array,
    committed: Committed,
    own: Own,
    *,
    position: Array,
    splits: int = 0,
    mode: str = "auto",
) -> tuple[int, int, int]:
    """Bytes that a call reads and writes, and the fewest that any kernel could move.

    Arguments are those of the kernel; abstract lengths stand for full caches and abstract
    selections for ones that have nothing in common. Blocks of threads that share keys run side by
    side, so a tile or a row is counted once for a sequence: the others find it in L2 (50 MB and
    more). Whatever `splits` is, their parts stay in the shared memory of a cluster.
    """
    batch, nodes, heads, width = q.shape
    padded = padded_heads(heads)
    least = nbytes((q, sink, position, own, committed.length)) + 4 * math.prod(q.shape)
    ring = np.minimum(_known(committed.length, batch, 1 << 30), committed.ring.shape[1])
    least += int(ring.sum()) * width * committed.ring.dtype.itemsize
    rows = batch * nodes * padded
    tiles = sum(-(-x.shape[1] // TILE) for x in (committed.ring, own.rows))
    read = nbytes((q, sink, position, own, committed.length, committed.ring))
    written = 0
    if committed.entries is not None:
        found = _entries(committed, nodes, padded, mode)
        tiles += found.tiles + -(-own.entries.shape[1] // TILE)
        read, written, least = read + found.read, written + found.written, least + found.least
    sets = -(-nodes // nodes_together(padded))
    words = 4 * batch * (nodes + sets) * tiles * (TILE // WORD)
    lists = 4 * (rows // TILE) * tiles
    read += words + lists
    written += words + lists + 4 * math.prod(q.shape)
    return read, written, least


class _Entries(NamedTuple):
    """Bytes that committed entries cost, and the tiles of keys that a block of threads may read."""

    tiles: int
    read: int
    written: int
    least: int


def _entries(committed: Committed, nodes: int, heads: int, mode: str) -> _Entries:
    capacity = jax.tree.leaves(committed.entries)[0].shape[1]
    batch, width = committed.ring.shape[0], committed.ring.shape[2]
    counts = np.minimum(_known(committed.length, batch, 1 << 30) // committed.ratio, capacity)
    entry = row_nbytes(committed.entries)
    in_place = isinstance(committed.entries, Fp8Entries) and unpacks(committed.entries)
    plain = entry == 2 * width
    read, written, least = 0, 0, 0
    seen, touched = counts, -(-counts // TILE) * TILE
    if committed.selected is not None:
        read += nbytes(committed.selected)
        least += 4 * nodes * int((-(-counts // WORD)).sum())
        seen, touched = _touched(committed, nodes, counts)
    least += int(seen.sum()) * entry
    gathered = gathers(committed, nodes, heads, mode)
    touched = seen if gathered else np.minimum(touched, capacity)
    read += int(touched.sum()) * (entry if in_place else 2 * width)
    if not plain and not in_place:  # brought to bfloat16 first, all of them
        read, written = read + batch * capacity * entry, written + batch * capacity * 2 * width
    scales = committed.entries.scale.shape[-1] if in_place else 0
    if gathered:
        size = list_size(committed, nodes, heads)
        places = batch * -(-nodes // nodes_together(heads)) * size
        words = -(-capacity // WORD)
        # Words of a sequence get a mask, and blocks of them counts; a place of a list finds a block
        # of words. Scales are taken row by row; their bytes of the cache count with the rows.
        both = 4 * batch * words + 4 * (places // size) * -(-words // BLOCK)
        both += (LISTED + 4 + scales) * places
        read, written = read + both + 4 * BLOCK * places, written + both
        return _Entries(size // TILE, read, written, least)
    moved = batch * capacity * scales  # which are turned first
    if capacity % 8 and plain:  # padded to whole groups of 8
        moved += batch * capacity * entry
        written += batch * (-capacity % 8) * entry
    return _Entries(-(-capacity // TILE), read + moved, written + moved, least)


def _touched(committed: Committed, nodes: int, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries `[B]` that some node selects, and those of the tiles that hold them."""
    if isinstance(committed.selected, jax.ShapeDtypeStruct):
        most = nodes * committed.topk if committed.topk else counts
        return np.minimum(most, counts), np.minimum(-(-counts // TILE), most) * TILE
    octets = np.ascontiguousarray(np.asarray(committed.selected)).view(np.uint8)
    every = np.unpackbits(octets, axis=-1, bitorder="little").astype(bool).any(1)
    every &= np.arange(every.shape[1]) < counts[:, None]
    padded = np.pad(every, [(0, 0), (0, -every.shape[1] % TILE)])
    return every.sum(-1), padded.reshape(len(every), -1, TILE).any(-1).sum(-1) * TILE


def _known(lengths: Any, batch: int, otherwise: int) -> np.ndarray:
    if isinstance(lengths, jax.ShapeDtypeStruct):
        return np.full(batch, otherwise)
    return np.asarray(lengths)
