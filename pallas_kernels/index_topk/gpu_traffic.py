"""Bytes that the GPU kernels move between device memory and the chip, by their own schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array

from pallas_kernels.index_topk.gpu_plan import UNIT, Sizes, chunk_of, how
from pallas_kernels.index_topk.gpu_scores import TILE
from pallas_kernels.index_topk.packed import PackedKeys, values
from pallas_kernels.memory import nbytes
from pallas_kernels.words import WORD

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys


def traffic(
    q: Array,
    weight: Array,
    entries: IndexKeys,
    *,
    topk: int,
    mode: str = "auto",
    splits: int = 0,
    groups: int = 0,
) -> tuple[int, int, int]:
    """Bytes that a call reads and writes by the kernels' schedule, and the fewest possible.

    Arguments are those of `gpu.index_topk`; abstract ones count every entry as committed. Where
    scores stay on the chip, nodes of a sequence run side by side, so a key is counted once for a
    sequence: the other nodes find it in L2 (50 MB and more). Where they do not, a key is counted
    for every chunk of nodes, and orders of scores once: they are read anew for each digit of the
    bisection, from the caches.
    """
    batch, nodes, heads, dim = q.shape
    capacity, own = (values(x).shape[1] for x in (entries.keys, entries.own))
    committed = np.full(batch, capacity)
    if not isinstance(entries.committed, jax.ShapeDtypeStruct):
        committed = np.asarray(entries.committed)
    small = nbytes((q, weight, entries.own, entries.own_bits, entries.committed))
    results = 4 * batch * nodes * (-(-capacity // WORD) - (-own // WORD))
    key = dim + 1 if isinstance(entries.keys, PackedKeys) else 2 * dim
    fewest = small + results + int(committed.sum()) * key
    if capacity + own <= topk:
        return small, results, fewest
    copied = _copied(entries, dim)
    if not isinstance(entries.own, PackedKeys):
        key = 2 * dim  # brought to it first, if packed
    sizes, plan = how(q, entries, mode, splits, groups)
    if plan is not None:
        read = small + int(committed.sum()) * key
        written, again = _written(sizes, entries.own_bits.shape[2])
        return read + again + copied[0], written + again + copied[1], fewest
    passes = -(-nodes // chunk_of(nodes, heads, dim))
    tiles = int((-(-committed // TILE)).sum()) + batch * -(-own // TILE)
    read = small + passes * int(committed.sum()) * key
    # Orders, and the bits of who sees what, before and after.
    written = 4 * nodes * tiles * TILE + 4 * nodes * tiles * 2
    read, written = read + written + results, written + 2 * results
    return read + copied[0], written + copied[1], fewest


def _written(sizes: Sizes, own_words: int) -> tuple[int, int]:
    """Bytes that one kernel writes, and of these what XLA cuts out if they are more than asked."""
    rows = sizes.batch * sizes.nodes
    found, ours = sizes.units * UNIT // WORD, max(1, sizes.own_tiles) * TILE // WORD
    words = -(-sizes.capacity // WORD)
    cut = (words if words < found else 0) + (own_words if own_words < ours else 0)
    return 4 * rows * (found + ours), 4 * rows * cut


def _copied(entries: IndexKeys, dim: int) -> tuple[int, int]:
    """Bytes that bringing the committed keys into the kernel's form reads and writes."""
    keys = entries.keys
    batch, capacity, _ = values(keys).shape
    if not isinstance(keys, PackedKeys):
        copied = nbytes(keys) if capacity % 8 else 0
        return copied, copied
    if not isinstance(entries.own, PackedKeys):
        return nbytes(keys), batch * capacity * 2 * dim
    copied = sum(nbytes(x) for x, line in ((keys.value, 8), (keys.scale, 16)) if capacity % line)
    return copied, copied
