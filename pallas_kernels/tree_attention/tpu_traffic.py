"""Bytes that the TPU kernel moves between HBM and VMEM, counted from its own schedule."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import Array

from pallas_kernels.memory import nbytes, row_nbytes
from pallas_kernels.tree_attention.forms import to_bytes
from pallas_kernels.tree_attention.sources import FP8_GROUP, Committed, Fp8Bytes, Fp8Entries, Own
from pallas_kernels.tree_attention.tpu_plan import LANES, Plan, Rows, Walk, choose, rows_of
from pallas_kernels.words import WORD


def traffic(
    q: Array,
    sink: Array,
    committed: Committed,
    own: Own,
    *,
    position: Array,
    mode: str = "auto",
    node_tile: int = 8,
    entry_tile: int = 512,
) -> tuple[int, int, int]:
    """Bytes that a call reads and writes, and the fewest that any kernel could move.

    Arguments are those of the kernel. Abstract ones stand for full caches and for selections that
    have nothing in common, not even a transfer; concrete ones are counted as they are. The fewest
    are all operands' visible parts, read once, and the result.
    """
    entries = committed.entries
    if isinstance(entries, Fp8Entries):
        entries = Fp8Bytes(
            rows=jax.eval_shape(lambda parts: to_bytes(parts).rows, entries),
            rotary=entries.rotary.shape[-1],
        )
    rows = rows_of(entries)
    plan = choose(q, committed, own, rows, mode=mode, node_tile=node_tile, entry_tile=entry_tile)
    batch = q.shape[0]
    once = nbytes((q, sink, position, own)) - nbytes(own.row_position)
    written = 4 * math.prod(q.shape)
    lengths = np.full(batch, np.iinfo(np.int32).max)
    if not isinstance(committed.length, jax.ShapeDtypeStruct):
        lengths = np.asarray(committed.length)
    counts = np.minimum(lengths // plan.walk.ratio, plan.walk.capacity)
    ring = plan.dim * committed.ring.dtype.itemsize
    read, least = once + batch * plan.window * ring, once
    least += int(np.minimum(lengths, plan.window).sum()) * ring
    # The bits of what anyone sees are made of all bits first.
    read += nbytes((own.entry_bits, own.row_bits))
    if rows is not None:
        read += _entries_read(plan, committed, counts, rows)
        least += _entries_least(plan, committed, counts)
        if isinstance(committed.entries, Fp8Entries):  # copied into rows of bytes
            read += nbytes(committed.entries)
            written += nbytes(rows.array)
    return read, written, least + 4 * math.prod(q.shape)


def _entries_read(plan: Plan, committed: Committed, counts: np.ndarray, rows: Rows) -> int:
    """Committed entries and their selection."""
    walk, words = plan.walk, 4 * plan.nodes
    row = -(-rows.array.shape[-1] // LANES) * LANES * rows.array.dtype.itemsize
    if walk.gather:
        block = -(-walk.capacity // (WORD * LANES)) * LANES
        # Selections once for the unions, once for the kernel; unions are written and read.
        every = 2 * words * block + 2 * 4 * plan.tiles * block
        places = _places(committed, plan.node_tile, counts, walk)
        return plan.batch * every + int(places.sum()) * walk.pack * row
    steps = np.clip(-(-counts // walk.size), 1, None)
    passes = np.where(steps > 1, plan.tiles, 1)  # a single tile stays for all nodes
    total = int((np.minimum(steps * walk.size, walk.capacity) * passes).sum()) * row
    if committed.selected is not None:
        blocks = -(-steps * (walk.size // WORD) // LANES)
        total += int(blocks.sum()) * LANES * words
    return total


def _places(committed: Committed, tile: int, counts: np.ndarray, walk: Walk) -> np.ndarray:
    """Transfers `[B]` that fetch what the nodes of each tile select."""
    nodes = committed.selected.shape[1]
    starts = range(0, nodes, tile)
    if isinstance(committed.selected, jax.ShapeDtypeStruct):
        most = sum(min(tile, nodes - start) for start in starts) * committed.topk
        return np.minimum(most, -(-counts // walk.pack) * len(starts))
    chosen = _chosen(committed.selected, counts, walk)
    total = np.zeros(len(counts), np.int64)
    for start in starts:
        union = chosen[:, start : start + tile].any(1)
        union = np.pad(union, [(0, 0), (0, -union.shape[1] % walk.pack)])
        total += union.reshape(len(union), -1, walk.pack).any(-1).sum(-1)
    return total


def _chosen(selected: Any, counts: np.ndarray, walk: Walk) -> np.ndarray:
    """Bits `[B, N, C]` of committed entries."""
    packed = np.ascontiguousarray(np.asarray(selected)).view(np.uint8)
    every = np.unpackbits(packed, axis=-1, bitorder="little")[..., : walk.capacity]
    return every.astype(bool) & (np.arange(walk.capacity) < counts[:, None])[:, None]


def _entries_least(plan: Plan, committed: Committed, counts: np.ndarray) -> int:
    """Entries that anyone sees and the words that say who, without any padding."""
    walk, entries = plan.walk, committed.entries
    if isinstance(entries, Fp8Bytes):
        whole = plan.dim - entries.rotary
        row = whole + -(-whole // FP8_GROUP) + 2 * entries.rotary
    else:
        row = row_nbytes(entries)
    if committed.selected is None:
        return int(counts.sum()) * row
    single = walk._replace(pack=1)
    seen = counts
    if committed.topk or not isinstance(committed.selected, jax.ShapeDtypeStruct):
        seen = np.minimum(counts, _places(committed, plan.nodes, counts, single))
    words = 4 * plan.nodes * int((-(-counts // WORD)).sum())
    return int(seen.sum()) * row + words
