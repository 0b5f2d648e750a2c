"""Bytes that the GPU kernel moves between device memory and the chip, by its own schedule."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import Array

from pallas_kernels.memory import nbytes, row_nbytes
from pallas_kernels.tree_attention.gpu_layout import TILE
from pallas_kernels.tree_attention.gpu_tiles import (
    default_splits,
    padded_heads,
    rows_of,
    unpacks,
)
from pallas_kernels.tree_attention.gpu_union import gathers
from pallas_kernels.tree_attention.sources import Committed, Fp8Entries, Own
from pallas_kernels.words import WORD


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
    side, so a tile is counted once for a sequence: the others find it in L2 (50 MB and more), as
    partial results of splits may too, but these are counted.
    """
    batch, nodes, heads, width = q.shape
    least = nbytes((q, sink, position, own, committed.length)) + 4 * math.prod(q.shape)
    ring = np.minimum(_known(committed.length, batch, 1 << 30), committed.ring.shape[1])
    least += int(ring.sum()) * width * committed.ring.dtype.itemsize
    rows = batch * nodes * padded_heads(heads)
    tiles = sum(-(-x.shape[1] // TILE) for x in (committed.ring, own.rows))
    read = nbytes((q, sink, position, own, committed.length, committed.ring))
    written = 0
    if committed.entries is not None:
        capacity = jax.tree.leaves(committed.entries)[0].shape[1]
        tiles += -(-capacity // TILE) + -(-own.entries.shape[1] // TILE)
        counts = np.minimum(_known(committed.length, batch, 1 << 30) // committed.ratio, capacity)
        entry = row_nbytes(committed.entries)
        seen, touched = counts, -(-counts // TILE) * TILE
        if committed.selected is not None:
            read += nbytes(committed.selected)
            least += 4 * nodes * int((-(-counts // WORD)).sum())
            seen, touched = _touched(committed, nodes, counts)
        least += int(seen.sum()) * entry
        in_place = isinstance(committed.entries, Fp8Entries) and unpacks(committed.entries)
        touched = np.minimum(touched, capacity)
        if gathers(committed, nodes, mode):  # read and written by XLA, then read by the kernel
            touched, capacity = seen, min(capacity, nodes * committed.topk)
            read += batch * capacity * entry
            written += batch * capacity * entry
            tiles += -(-capacity // TILE) - -(-rows_of(committed.entries) // TILE)
        read += int(touched.sum()) * (entry if in_place else 2 * width)
        moved = _converted(committed.entries, batch * capacity, width)
        read, written = read + moved[0], written + moved[1]
        if capacity % 8 and not in_place and entry == 2 * width:  # padded to whole groups of 8
            read += batch * capacity * entry
            written += batch * (capacity + -capacity % 8) * entry
    words = 4 * batch * (nodes + 1) * tiles * (TILE // WORD)
    lists = 4 * (rows // TILE) * tiles
    splits = splits or default_splits(rows // TILE, tiles, width)
    partial = 4 * rows * (width + 2) * splits if splits > 1 else 0
    read += words + lists + partial
    written += words + lists + partial + 4 * math.prod(q.shape)
    return read, written, least


def _converted(entries: Any, rows: int, width: int) -> tuple[int, int]:
    """Bytes read and written to bring so many rows into the form that the kernel reads."""
    if isinstance(entries, Fp8Entries) and unpacks(entries):  # scales are turned first
        scales = rows * entries.scale.shape[-1]
        return scales, scales
    entry = row_nbytes(entries)
    if entry != 2 * width:  # brought to bfloat16 first, all of them
        return rows * entry, rows * 2 * width
    return 0, 0


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
