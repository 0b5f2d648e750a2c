"""Where the tokens of a block stand: visibility and rotations, computed once for all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.config import ModelConfig
from jaxspec.model.basic import Rotation, rotation
from jaxspec.tree import TokenBlock, lineage, unpack_bits


class Layout(struct.PyTreeNode):
    """A token block with what follows from it."""

    block: TokenBlock
    plain: Rotation  # [B, N, r/2]: sliding layers and MTP
    folded: Rotation  # [B, N, r/2]: compressed layers

    def turn(self, ratio: int) -> Rotation:
        """The rotation at the tokens' positions for a layer of this ratio."""
        return self.folded if ratio else self.plain


def make_layout(cfg: ModelConfig, block: TokenBlock) -> Layout:
    """Derives the layout of `block`."""
    return Layout(
        block=block,
        plain=rotation(cfg, block.position, compressed=False),
        folded=rotation(cfg, block.position, compressed=True),
    )


class Windows(struct.PyTreeNode):
    """Which tokens of the block feed which pool of one compressed layer (leaves `[B, M, ...]`).

    A target is an entry that the block may complete or leave open. `take` lists the block's tokens
    that may feed it, `feeds` whether they do, `half` with which of their P halves; `slot` is the
    committed pool that the target starts from, where `seeded`.
    """

    entry: Array  # [B, M] int32: absolute index
    take: Array  # [B, M, A] int32
    half: Array  # [B, M, A] int32
    feeds: Array  # [B, M, A] bool
    slot: Array  # [B, M] int32
    seeded: Array  # [B, M] bool


def _windows(
    block: TokenBlock, entry: Array, near: tuple[Array, Array], *, ratio: int, pools: int
) -> Windows:
    """Windows of the targets `entry [B, M]` from the tokens near them, an index and its mask."""
    take, known = near
    position = jnp.take_along_axis(block.position[:, None, :], take, axis=-1)
    ahead = entry[..., None] - position // ratio  # 0: the token's own window; 1: the next one
    slot = entry - block.length[:, None] // ratio
    return Windows(
        entry=entry,
        take=take,
        half=jnp.clip(pools - 1 - ahead, 0, pools - 1),
        feeds=known & (ahead >= 0) & (ahead < pools),
        slot=jnp.clip(slot, 0, pools - 1),
        seeded=(slot >= 0) & (slot < pools),
    )


def tree_windows(block: TokenBlock, ratio: int, pools: int) -> Windows:
    """Targets of a tree: for node n the P entries from its own window on, `M = N * P`.

    A node's pools are fed by its nearest ancestors alone, at most P R of them.
    """
    nodes = block.token.shape[1]
    mask = unpack_bits(block.ancestors, nodes)
    index, known = jax.vmap(lineage, (0, None))(mask, min(nodes, pools * ratio))
    entry = block.position[..., None] // ratio + jnp.arange(pools)
    near = jnp.repeat(index, pools, axis=1), jnp.repeat(known, pools, axis=1)
    return _windows(block, entry.reshape(entry.shape[0], -1), near, ratio=ratio, pools=pools)


def chain_windows(block: TokenBlock, ratio: int, pools: int) -> Windows:
    """Targets of a chain: the entries from the first open one on, `M = ceil(N / R) + P`."""
    tokens = block.token.shape[1]
    length = block.length[:, None]
    entry = length // ratio + jnp.arange(-(-tokens // ratio) + pools)
    start = jnp.maximum((entry - pools + 1) * ratio - length, 0)
    take = start[..., None] + jnp.arange(min(tokens, pools * ratio))
    valid = block.valid.sum(-1, dtype=jnp.int32)[:, None, None]
    known = take < valid
    near = jnp.minimum(take, tokens - 1), known
    return _windows(block, entry, near, ratio=ratio, pools=pools)
