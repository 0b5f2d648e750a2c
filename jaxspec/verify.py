"""Acceptance: follow the target's own choices down the tree.

Each node carries the token that the target chooses after it. A child that was drafted with that
token is accepted, and the walk goes on from it; the choice that meets no child is the bonus token.
The emitted tokens are thus choices of the target alone, whatever was drafted.

Source: greedy tree verification, with the choices of Daliri et al., arXiv 2408.07978, in the place
of the argmax.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.tree import DraftTree


class VerifyResult(struct.PyTreeNode):
    """What a step keeps of its block. P is the largest depth of the tree plus one.

    Of a chain, which is committed whole, the path is all of its rows, the count its valid length
    and the bonus the token that follows.
    """

    path: Array  # [B, P] int32: accepted nodes from the root (node 0) down; 0 beyond `count`
    count: Array  # [B] int32: accepted nodes with the root = rows to commit = tokens emitted
    bonus: Array  # [B] int32: the target's choice at the last accepted node, the next root


def walk(tree: DraftTree, choice: Array, *, depth: int | None = None) -> VerifyResult:
    """The longest path from the root whose tokens are the target's choices.

    A step emits the tokens of `path[1:count]` and then the bonus, `count` tokens in all, before
    any limit. A sequence whose root is not live has count 0, and its bonus means nothing. Of
    siblings with the same token the lowest index is followed.

    Args:
        tree: leaves `[B, N]`.
        choice: `[B, N]` int32, of `sample.choose`.
        depth: largest depth of the tree, N - 1 if unknown. Deeper nodes are not accepted.
    """
    if depth is None:
        depth = tree.token.shape[1] - 1
    with jax.named_scope("walk"):
        return jax.vmap(functools.partial(_walk, levels=depth + 1))(tree, choice)


def next_tokens(token: Array, result: VerifyResult) -> Array:
    """The token that follows each committed node: `token [B, N]` of the block to `[B, P]`.

    Those of a tree are the tokens that the step emits: the path below the root, then the bonus.
    Nothing is meant beyond `count`.
    """
    token = jnp.take_along_axis(token, result.path, axis=1)
    is_last = jnp.arange(token.shape[1]) == result.count[:, None] - 1
    return jnp.where(is_last, result.bonus[:, None], jnp.roll(token, -1, axis=1))


def cut(result: VerifyResult, token: Array, *, eos: int, room: Array) -> VerifyResult:
    """Ends a step's tokens `[B, P]` after the first end token, and after `room [B]` of them.

    The last token that is kept becomes the bonus: it is emitted and has no row yet, whether it was
    drafted or not.
    """
    place = jnp.arange(token.shape[1])
    is_end = (token == eos) & (place < result.count[:, None])
    until_end = jnp.where(is_end.any(1), jnp.argmax(is_end, axis=1) + 1, token.shape[1])
    count = jnp.minimum(jnp.minimum(result.count, until_end), room).astype(jnp.int32)
    last = jnp.maximum(count - 1, 0)[:, None]
    return result.replace(count=count, bonus=jnp.take_along_axis(token, last, axis=1)[:, 0])


def ranks(tree: DraftTree, result: VerifyResult) -> tuple[Array, Array]:
    """Rank of each token that a step emits, and how many were drafted in its place, `[B, P]`."""
    index = jnp.arange(tree.token.shape[1])
    node, other = tree.parent[:, :, None], tree.parent[:, None]
    siblings = (node == other) & tree.live[:, None] & (index[:, None] >= index)
    rank = siblings.sum(-1, dtype=jnp.int8)
    children = ((index[:, None] == other) & tree.live[:, None]).sum(-1, dtype=jnp.int8)
    place = jnp.arange(result.path.shape[1])
    below = jnp.take_along_axis(rank, jnp.roll(result.path, -1, axis=1), axis=1)
    is_drafted = place < result.count[:, None] - 1
    offered = jnp.take_along_axis(children, result.path, axis=1)
    return jnp.where(is_drafted, below, 0), offered


def _walk(tree: DraftTree, choice: Array, *, levels: int) -> VerifyResult:
    """`walk` of one sequence."""
    up = jnp.maximum(tree.parent, 0)
    index = jnp.arange(up.shape[0])
    match = tree.live & (tree.parent >= 0) & (tree.token == choice[up])
    twin = (tree.parent[:, None] == tree.parent) & (index[:, None] > index)
    match = match & ~(twin & match).any(1)
    match = match.at[0].set(tree.live[0])
    # Pointer doubling: after s rounds a node is left iff it and its 2**s - 1 next ancestors match.
    for _ in range((index.size - 1).bit_length()):
        match, up = match & match[up], up[up]
    # The path's nodes are in order of depth, because a parent's index is below its child's.
    path = jnp.nonzero(match, size=levels, fill_value=0)[0].astype(jnp.int32)
    count = jnp.minimum(match.sum(dtype=jnp.int32), levels)
    return VerifyResult(path=path, count=count, bonus=choice[path[count - 1]])
