"""Signature and choice of the lightning indexer's selection."""

from __future__ import annotations

import functools
from typing import NamedTuple

from jax import Array

from pallas_kernels.dispatch import Backends, resolve
from pallas_kernels.index_topk import cpu, gpu, ref, tpu
from pallas_kernels.index_topk.packed import PackedKeys, pack_keys, values

__all__ = ["IndexKeys", "PackedKeys", "index_topk", "pack_keys"]

BACKENDS: Backends = {
    "ref": ref.index_topk,
    "cpu": cpu.index_topk,
    "tpu": tpu.index_topk,
    "gpu": gpu.index_topk,
}


class IndexKeys(NamedTuple):
    """Entries to choose from, in the order of serial decoding: committed ones, then the block's."""

    keys: Array | PackedKeys  # [B, C, ci]
    committed: Array  # [B] int32: committed entries, visible to every node
    own: Array | PackedKeys  # [B, J, ci]
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
        entries: what there is to choose from.
        topk: entries to choose at most.
        impl: `auto`, `ref`, `cpu`, `tpu` or `gpu`, static. `auto` takes `ref` where the GPU kernels
            cannot take the dtypes or the dims.

    Returns:
        Packed selections: of the committed entries `[B, N, ceil(C / 32)]` uint32 and of the
        block's own `[B, N, ceil(J / 32)]`.

    Raises:
        ValueError: a named `impl` that cannot run.
    """
    sizes = {"batch": q.shape[0], "nodes": q.shape[1], "entries": values(entries.keys).shape[1]}
    refusals = {"gpu": functools.partial(gpu.refusal, q, entries)}
    run = resolve(impl, "index_topk", BACKENDS, sizes=sizes, refusals=refusals)
    return run(q, weight, entries, topk=topk)
