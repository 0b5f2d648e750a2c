"""A drafter that knows what will be emitted, and a script that says how it drafts.

Its trees, and what is right or wrong in them, are content: one compilation serves all of them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxspec.draft import Drafter
from jaxspec.tree import DraftTree
from tests.random_trees import depths, mixed_parents, trees_of

RIGHT = -1
"""In the place of a wild token: what will be emitted at the node's position."""


class Script(struct.PyTreeNode):
    """What to draft (leaves `[B, ...]`); the step at length n takes the tree n mod R of R."""

    stream: Array  # [B, L] int32: the token at each position
    parent: Array  # [B, R, N] int32
    depth: Array  # [B, R, N] int32
    live: Array  # [B, R, N] bool
    wild: Array  # [B, R, N] int32: a token, or RIGHT


def scripted_drafter(nodes: int, routes: int) -> Drafter:
    """Drafts what the script in its state says, which `init` leaves empty."""

    def init(batch: int, max_len: int, dtype: Any) -> Script:
        tree = jnp.zeros((batch, routes, nodes), jnp.int32)
        stream = jnp.zeros((batch, max_len + nodes), jnp.int32)
        return Script(stream, tree, tree, tree > 0, tree)

    def propose(params, state: Script, root, length, *, live, score) -> DraftTree:
        row, route = jnp.arange(length.shape[0]), length % routes
        parent, depth, wild = (x[row, route] for x in (state.parent, state.depth, state.wild))
        ahead = jnp.take_along_axis(state.stream, length[:, None] + depth, axis=1)
        token = jnp.where(wild == RIGHT, ahead, wild).at[:, 0].set(root)
        none = jnp.zeros(token.shape, jnp.float32)
        return DraftTree(token, parent, none, state.live[row, route] & live[:, None])

    def observe(params, state, block, features, result):
        return state

    return Drafter(init, propose, observe, depth=nodes - 1, features="none")


def write_script(
    rng: np.random.Generator, stream: np.ndarray, *, nodes: int, routes: int, skill: float
) -> Script:
    """Chains, stars and random trees for `stream [B, L]`; a token is right with `skill`.

    A right token below a wrong one is drafted too: it must not be accepted.
    """
    batch, vocab = len(stream), int(stream.max()) + 1
    trees = [trees_of(rng, mixed_parents(rng, batch, nodes), nodes, vocab) for _ in range(routes)]
    parent, live, token = (
        np.stack([getattr(tree, name) for tree in trees], axis=1)
        for name in ("parent", "live", "token")
    )
    depth = np.stack([[depths(tree) for tree in row] for row in parent]).astype(np.int32)
    wild = np.where(rng.random(token.shape) < skill, RIGHT, token).astype(np.int32)
    return Script(stream.astype(np.int32), parent, depth, live, wild)
