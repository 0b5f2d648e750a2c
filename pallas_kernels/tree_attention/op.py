"""Signature and choice of the attention of one block."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from pallas_kernels.dispatch import Backends, resolve
from pallas_kernels.tree_attention import ref

BACKENDS: Backends = {
    "ref": ref.tree_attention,
    "cpu": ref.tree_attention,
    "tpu": "the TPU kernel is not written yet; use 'ref'",
    "gpu": "the GPU kernel is not written yet; use 'ref'",
}


class Committed(NamedTuple):
    """Committed keys (K = V): the raw ring and, on compressed layers, the entries."""

    ring: Array  # [B, W, K]: position p in slot p mod W
    length: Array  # [B] int32
    entries: Any = None  # [B, C, K], or None
    selected: Any = None  # [B, N, ceil(C / 32)] uint32; None: every committed entry
    ratio: int = 0


class Own(NamedTuple):
    """The block's own keys (K = V), each visible to whoever has its bit.

    `row_bits` is None for a chain: every row sees the rows up to itself.
    """

    rows: Array  # [B, M, K]
    row_position: Array  # [B, M] int32
    row_bits: Any  # [B, N, ceil(M / 32)] uint32: ancestors and the node itself
    entries: Any = None  # [B, J, K], or None
    entry_bits: Any = None  # [B, N, ceil(J / 32)] uint32


def tree_attention(
    q: Array, sink: Array, committed: Committed, own: Own, *, position: Array, impl: str = "auto"
) -> Array:
    """One online softmax with sink over four sources (V4 report, section 2.3).

    Raw rows are seen within the window of the query's position (W tokens, itself included);
    compressed entries wherever their bit is set.

    Args:
        q: `[B, N, H, K]` rotated queries.
        sink: `[H]` float32 logits that take weight and give no value.
        committed: what the cache holds.
        own: what the block itself brings.
        position: `[B, N]` int32 absolute positions of the queries.
        impl: `auto`, `ref`, `cpu`, `tpu` or `gpu`, static.

    Returns:
        `[B, N, H, K]` float32, still rotated.

    Raises:
        ValueError: a named `impl` that cannot run.
    """
    run = resolve(impl, "tree_attention", BACKENDS)
    return run(q, sink, committed, own, position=position)
