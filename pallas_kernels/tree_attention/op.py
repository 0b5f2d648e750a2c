"""Signature and choice of the attention of one block."""

from __future__ import annotations

import functools

from jax import Array

from pallas_kernels.dispatch import Backends, resolve
from pallas_kernels.tree_attention import cpu, gpu, ref, tpu
from pallas_kernels.tree_attention.sources import (
    Bf16Words,
    Committed,
    Fp8Bytes,
    Fp8Entries,
    Own,
    capacity_of,
)

__all__ = ["Bf16Words", "Committed", "Fp8Bytes", "Fp8Entries", "Own", "tree_attention"]

BACKENDS: Backends = {
    "ref": ref.tree_attention,
    "cpu": cpu.tree_attention,
    "tpu": tpu.tree_attention,
    "gpu": gpu.tree_attention,
}


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
        impl: `auto`, `ref`, `cpu`, `tpu` or `gpu`, static. `auto` takes `ref` where the GPU kernel
            cannot take the dtypes, the head dims or the form of the entries.

    Returns:
        `[B, N, H, K]` float32, still rotated.

    Raises:
        ValueError: a named `impl` that cannot run.
    """
    sizes = {"batch": q.shape[0], "nodes": q.shape[1], "entries": capacity_of(committed)}
    refusals = {"gpu": functools.partial(gpu.refusal, q, committed, own)}
    run = resolve(impl, "tree_attention", BACKENDS, sizes=sizes, refusals=refusals)
    return run(q, sink, committed, own, position=position)
