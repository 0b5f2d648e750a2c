"""Tree attention on Hopper GPUs: entries streamed once for 64 query rows, under packed bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.hopper import check_interpreter
from pallas_kernels.tree_attention import gpu_kernel
from pallas_kernels.tree_attention.forms import dequantise
from pallas_kernels.tree_attention.gpu_cluster import check_splits
from pallas_kernels.tree_attention.gpu_layout import TILE, Operands, Shape, warpgroups
from pallas_kernels.tree_attention.gpu_tiles import (
    default_splits,
    lists_of,
    padded_heads,
    tiles_of,
    unpacks,
)
from pallas_kernels.tree_attention.gpu_traffic import traffic
from pallas_kernels.tree_attention.sources import Committed, Fp8Entries, Own

__all__ = ["refusal", "traffic", "tree_attention"]


def tree_attention(
    q: Array,
    sink: Array,
    committed: Committed,
    own: Own,
    *,
    position: Array,
    splits: int = 0,
    mode: str = "auto",
    interpret: Any = None,
) -> Array:
    """See `op.tree_attention`, whose arguments these are.

    Only tiles of 64 keys are read of which some node of the 64 rows sees a key. Where a selection
    is few of many entries, single rows are read: those that the nodes of the 64 rows select.

    Args:
        q: queries, bfloat16.
        sink: sinks.
        committed: committed keys. `Fp8Entries` are brought to bfloat16 in shared memory, or first
            if their parts are no multiples of 64 dims; a capacity that is no multiple of 8 (16 for
            their scales) is copied to one.
        own: the block's own keys.
        position: positions of the queries.
        splits: blocks of threads that share the keys of 64 rows, a cluster, static: 1, 2, 4, 8 or
            16, which not every device has room for; 0: up to 8, as many as occupy the device.
        mode: plan for selected entries, static: `stream`, `gather`, or `auto` by capacity.
        interpret: what `plgpu.kernel` takes, static.

    Raises:
        ValueError: a dtype or size that the kernel does not take, or splits that are no cluster.
    """
    check_interpreter(interpret)
    if (reason := refusal(q, committed, own)) is not None:
        raise ValueError(reason)
    committed = _readable(committed)
    batch, nodes, heads, width = q.shape
    padded = padded_heads(heads)
    tiles = tiles_of(committed, own, position, padded, mode)
    rows = [(0, 0), (0, -nodes % max(1, TILE // padded))]
    words = jnp.pad(tiles.words, [*rows, (0, 0)])
    q = jnp.pad(q, [*rows, (0, padded - heads), (0, 0)])
    q = q.reshape(batch, -1, width)
    sinks = jnp.tile(jnp.pad(sink, (0, padded - heads)), max(1, TILE // padded))
    splits = splits or default_splits(batch * q.shape[1] // TILE, tiles.starts[-1], width)
    check_splits(splits)
    shape = Shape(padded, splits, tiles.starts, interpret)
    lists = lists_of(words, padded)
    operands = Operands(q, tiles.sources, words, tiles.valid, *lists, sinks.astype(jnp.float32))
    out = gpu_kernel.attend(operands, shape)
    return out.reshape(batch, -1, padded, width)[:, :nodes, :heads]


def _readable(committed: Committed) -> Committed:
    """FP8 entries whose parts are no whole groups of 64 are brought to bfloat16 first."""
    entries = committed.entries
    if isinstance(entries, Fp8Entries) and not unpacks(entries):
        return committed._replace(entries=dequantise(entries))
    return committed


def refusal(q: Array, committed: Committed, own: Own) -> str | None:
    """Why the kernel cannot take a call, in words, or None; arguments are those of the kernel."""
    sources = [committed.ring, own.rows]
    if committed.entries is not None:
        sources.append(own.entries)
        if hasattr(committed.entries, "shape"):
            sources.append(committed.entries)
        elif not isinstance(committed.entries, Fp8Entries):
            kind = type(committed.entries).__name__
            return f"the GPU kernel reads plain entries and Fp8Entries, not {kind}; use 'ref'"
    for array in (q, *sources):
        if array.dtype != jnp.bfloat16:
            return (
                f"the GPU kernel multiplies bfloat16 (wgmma has no float32, and its tf32 no"
                f" transposed values); got {array.dtype}; use 'ref'"
            )
    width = q.shape[-1]
    # The result of one wgmma has up to 256 columns.
    if width % TILE or width // warpgroups(width) > 256:
        return f"the GPU kernel takes head dims 64, 128, 192, 256, 384, 512; got {width}; use 'ref'"
    return None
