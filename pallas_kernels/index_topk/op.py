"""Signature and choice of the lightning indexer's selection."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from pallas_kernels.index_topk import ref


class IndexKeys(NamedTuple):
    """Entries to choose from, in the order of serial decoding: committed ones, then the block's."""

    keys: Array  # [B, C, ci]
    count: Array  # [B] int32: committed entries, visible to every node
    own: Array  # [B, J, ci]
    own_bits: Array  # [B, N, ceil(J / 32)] uint32: which of the block's entries a node sees


def index_topk(
    q: Array, weight: Array, entries: IndexKeys, *, topk: int, impl: str = "auto"
) -> tuple[Array, Array]:
    """Selects each node's `topk` best visible entries (V4 report, section 2.3).

    The score of an entry is sum_h weight_h relu(q_h . key); ties go to the lowest index, committed
    entries first. A node that sees no more than `topk` entries selects them all.

    Args:
        q: `[B, N, Hi, ci]` rotated queries.
        weight: `[B, N, Hi]` float32 head weights, scaled.
        impl: `auto`, `ref`.

    Returns:
        Packed selections: of the committed entries `[B, N, ceil(C / 32)]` uint32 and of the
        block's own `[B, N, ceil(J / 32)]`.
    """
    if impl not in ("auto", "ref"):
        raise ValueError(f"impl {impl!r} of index_topk is not built; use 'auto' or 'ref'")
    return ref.index_topk(q, weight, entries, topk=topk)
