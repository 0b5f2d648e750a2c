"""Compressors: a per-channel softmax that folds R tokens into an entry, as an associative pool.

V4 report, section 2.3. A pool is (running maximum, denominator, numerator) a channel, so an
unfinished window is a few vectors instead of its raw rows, and every node of a tree can carry its
own. One pooling function serves chains and trees; only the index layout differs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import empty_pool, pools
from jaxspec.config import ModelConfig
from jaxspec.model.basic import project_float32, rms_norm, rotate, rotation
from jaxspec.model.layout import Layout, Windows, chain_windows, tree_windows
from jaxspec.model.params import CompressorParams


class Compressed(NamedTuple):
    """What a block folds: entries it may complete and the open state it leaves."""

    entry: Array  # [B, J, d]
    owner: Array  # [B, J] int32
    complete: Array  # [B, J] bool
    open: Array  # [B, O, P, 3, d] float32


Split = tuple[Array, Array, Array, Array, Array]
"""Pools of the entries `[B, J, 3, d]`, their indices, owners, completeness, and the open pools."""


def pool(gate: Array, value: Array, windows: Windows, state: Array) -> Array:
    """Folds the block's tokens and the committed pools into every target, for one sequence.

    Args:
        gate: `[N, P, d]` float32, of a token's halves.
        value: the same for what is folded.
        windows: the index layout, leaves without the batch axis.
        state: `[P, 3, d]` committed pools.

    Returns:
        Pools `[M, 3, d]`.
    """
    lowest = jnp.finfo(jnp.float32).min
    feeds = windows.feeds[..., None]
    g = jnp.where(feeds, gate[windows.take, windows.half], lowest)  # [M, A, d]
    v = jnp.where(feeds, value[windows.take, windows.half], 0.0)
    start = jnp.where(
        windows.seeded[:, None, None], state[windows.slot], empty_pool((), state.shape[-1])
    )
    top = jnp.maximum(g.max(1), start[:, 0])
    weight = jnp.where(feeds, jnp.exp(g - top[:, None]), 0.0)
    keep = jnp.exp(start[:, 0] - top)
    denominator = keep * start[:, 1] + weight.sum(1)
    numerator = keep * start[:, 2] + (weight * v).sum(1)
    return jnp.stack([top, denominator, numerator], axis=1)


@jax.named_scope("compress")
def compress(
    p: CompressorParams, cfg: ModelConfig, x: Array, state: Array, layout: Layout
) -> Compressed:
    """Folds a block `x [B, N, E]` and the committed pools `state [B, P, 3, d]`.

    Everything up to the pooled value is float32; the entry is cast to x's dtype before its norm
    and rotated to the first token of its own window.
    """
    ratio, dim = p.ape.shape[0], p.norm.shape[0]
    count, block = pools(ratio), layout.block
    shape = (*x.shape[:2], count, dim)
    ape = p.ape[block.position % ratio]
    gate = (project_float32(x, p.wgate) + ape).reshape(shape)
    value = project_float32(x, p.wkv).reshape(shape)
    split = _split_tree if block.kind == "tree" else _split_chain
    windows = (tree_windows if block.kind == "tree" else chain_windows)(block, ratio, count)
    pooled = jax.vmap(pool)(gate, value, windows, state)
    done, entry, owner, complete, opened = split(pooled, windows, layout, ratio, count)
    denominator = jnp.where(done[:, :, 1] > 0, done[:, :, 1], 1.0)
    folded = rms_norm((done[:, :, 2] / denominator).astype(x.dtype), p.norm, cfg.rms_norm_eps)
    folded = rotate(folded, rotation(cfg, entry * ratio, compressed=True))
    return Compressed(folded, owner, complete, opened)


def _split_tree(pooled: Array, windows: Windows, layout: Layout, ratio: int, count: int) -> Split:
    """Slot 0 of a node that ends its window is the entry; then the slots shift down."""
    block = layout.block
    batch, nodes = block.token.shape
    slots = pooled.reshape(batch, nodes, count, 3, -1)
    ends = (block.position + 1) % ratio == 0
    shifted = jnp.concatenate(
        [slots[:, :, 1:], empty_pool((batch, nodes, 1), slots.shape[-1])], axis=2
    )
    opened = jnp.where(ends[..., None, None, None], shifted, slots)
    owner = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    return slots[:, :, 0], block.position // ratio, owner, ends & block.valid, opened


def _split_chain(pooled: Array, windows: Windows, layout: Layout, ratio: int, count: int) -> Split:
    """The leading targets are entries; the P targets after the last finished one stay open."""
    block = layout.block
    last = pooled.shape[1] - count
    entry = windows.entry[:, :last]
    length, valid = block.length, block.valid.sum(-1, dtype=jnp.int32)
    done = (length + valid) // ratio - length // ratio
    index = done[:, None] + jnp.arange(count)
    opened = jnp.take_along_axis(pooled, index[:, :, None, None], axis=1)[:, None]
    owner = (entry + 1) * ratio - 1 - length[:, None]
    return pooled[:, :last], entry, owner, jnp.arange(last) < done[:, None], opened
