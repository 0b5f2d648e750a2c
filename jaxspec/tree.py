"""Draft trees and token blocks: who a node's ancestors are and where it stands.

A tree is three arrays (token, parent, liveness) and a block is what the model eats: a chain
(prefill) or a tree (verification, and decoding with one node). Everything here is written for one
sequence and `vmap`ped; the batched constructors are the public face.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

NO_PARENT = -1
"""Parent of the root: the only in-band sentinel of the project."""

WORD = 32
"""Bits in one word of a packed mask."""


class DraftTree(struct.PyTreeNode):
    """A tree of proposed continuations, one node a row (leaves `[B, N]`).

    Node 0 is the root: the last emitted token, not in the cache yet. `parent[i] < i`, and the root
    has `NO_PARENT`. A node that is not `live` is padding; a live node's parent is live.
    """

    token: Array  # [B, N] int32
    parent: Array  # [B, N] int32
    score: Array  # [B, N] float32: log of the estimated probability that the path is accepted
    live: Array  # [B, N] bool


class TokenBlock(struct.PyTreeNode):
    """Tokens for one forward: consecutive ones (chain) or the nodes of a tree (leaves `[B, N]`)."""

    token: Array  # [B, N] int32
    position: Array  # [B, N] int32: committed length + depth
    valid: Array  # [B, N] bool: padding feeds no pool, row, entry or expert
    length: Array  # [B] int32: committed length before the block
    parent: Any  # [B, N] int32; None for a chain
    ancestors: Any  # [B, N, ceil(N / 32)] uint32: node's ancestors and itself; or None
    kind: Literal["chain", "tree"] = struct.field(pytree_node=False)

    @staticmethod
    def chain(token: Array, length: Array, valid: Array | None = None) -> TokenBlock:
        """Consecutive tokens after `length [B]` committed ones.

        `valid [B]` counts the leading tokens that are real (all, by default).
        """
        step = jnp.arange(token.shape[1], dtype=jnp.int32)
        length = jnp.asarray(length, jnp.int32)
        if valid is None:
            valid = jnp.full(token.shape[:1], token.shape[1], jnp.int32)
        return TokenBlock(
            token=jnp.asarray(token, jnp.int32),
            position=length[:, None] + step,
            valid=step < jnp.asarray(valid, jnp.int32)[:, None],
            length=length,
            parent=None,
            ancestors=None,
            kind="chain",
        )

    @staticmethod
    def tree(tree: DraftTree, length: Array) -> TokenBlock:
        """The nodes of `tree`, its root standing at position `length [B]`."""
        mask = jax.vmap(ancestor_mask)(tree.parent)
        length = jnp.asarray(length, jnp.int32)
        return TokenBlock(
            token=jnp.asarray(tree.token, jnp.int32),
            position=length[:, None] + mask.sum(-1, dtype=jnp.int32) - 1,
            valid=tree.live,
            length=length,
            parent=tree.parent,
            ancestors=pack_bits(mask),
            kind="tree",
        )


def ancestor_mask(parent: Array) -> Array:
    """`mask[i, j]` is true iff j is i or an ancestor of i: `parent [N]` -> bool `[N, N]`.

    Pointer doubling: after s rounds every ancestor within 2**s - 1 steps is known.
    """
    index = jnp.arange(parent.shape[0])
    mask = index[:, None] == index
    up = jnp.where(parent == NO_PARENT, index, parent)
    for _ in range((index.size - 1).bit_length()):
        mask, up = mask | mask[up], up[up]
    return mask


def lineage(mask: Array, reach: int) -> tuple[Array, Array]:
    """Each node's nearest ancestors, itself first.

    Args:
        mask: `[N, N]` of `ancestor_mask`.
        reach: how many ancestors A to list at most.

    Returns:
        `(index [N, A] int32, known [N, A] bool)`: the ancestor `a` steps up, index 0 where there is
        none.
    """
    depth = mask.sum(-1, dtype=jnp.int32) - 1
    wanted = depth[:, None] - jnp.arange(reach)
    hit = mask[:, None, :] & (depth[None, None, :] == wanted[:, :, None])
    index = (hit * jnp.arange(mask.shape[0], dtype=jnp.int32)).sum(-1, dtype=jnp.int32)
    return index, wanted >= 0


def pack_bits(mask: Array) -> Array:
    """Booleans `[..., M]` to words `[..., ceil(M / 32)]` uint32, bit i of word w is 32 w + i."""
    size = mask.shape[-1]
    words = -(-size // WORD)
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, words * WORD - size)])
    bits = padded.reshape(*mask.shape[:-1], words, WORD).astype(jnp.uint32)
    return (bits << jnp.arange(WORD, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def unpack_bits(words: Array, size: int) -> Array:
    """Inverse of `pack_bits`: `[..., ceil(size / 32)]` uint32 to bool `[..., size]`."""
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], words.shape[-1] * WORD)[..., :size].astype(bool)
