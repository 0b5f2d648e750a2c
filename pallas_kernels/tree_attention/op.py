"""Signature and choice of the attention of one block."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from pallas_kernels.tree_attention import ref


class Committed(NamedTuple):
    """Committed keys (K = V): the raw ring and, on compressed layers, the entries."""

    ring: Array  # [B, W, K]: position p in slot p mod W
    length: Array  # [B] int32
    entries: Array | None = None  # [B, C, K]
    selected: Array | None = None  # [B, N, ceil(C / 32)] uint32; None: every committed entry
    ratio: int = 0


class Own(NamedTuple):
    """The block's own keys (K = V), each visible to whoever has its bit.

    `row_bits` is None for a chain: every row sees the rows up to itself.
    """

    rows: Array  # [B, M, K]
    row_position: Array  # [B, M] int32
    row_bits: Array | None  # [B, N, ceil(M / 32)] uint32: ancestors and the node itself
    entries: Array | None = None  # [B, J, K]
    entry_bits: Array | None = None  # [B, N, ceil(J / 32)] uint32


def tree_attention(
    q: Array, sink: Array, committed: Committed, own: Own, *, position: Array, impl: str = "auto"
) -> Array:
    """One online softmax with sink over four sources (V4 report, section 2.3).

    Raw rows are seen within the window of the query's position (W tokens, itself included);
    compressed entries wherever their bit is set.

    Args:
        q: `[B, N, H, K]` rotated queries.
        sink: `[H]` float32 logits that take weight and give no value.
        position: `[B, N]` int32 absolute positions of the queries.
        impl: `auto`, `ref`.

    Returns:
        `[B, N, H, K]` float32, still rotated.
    """
    if impl not in ("auto", "ref"):
        raise ValueError(f"impl {impl!r} of tree_attention is not built; use 'auto' or 'ref'")
    if own.row_bits is None and q.shape[1] > committed.ring.shape[1]:
        return ref.chain_attention(q, sink, committed, own)
    return ref.block_attention(q, sink, committed, own, position=position)
