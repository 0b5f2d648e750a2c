"""Growing a tree from draft scores, level by level, and keeping its best nodes.

The drafter scores the children of a few frontier nodes, the best of these are the next frontier,
and after the last level the best D - 1 of all candidates become the tree:

    candidates = Candidates.empty(batch, levels=3, width=2, top_k=2)
    front = Frontier.root(root, width=2)
    for _ in range(3):                      # the shapes never change: a loop does as well
        scores = ...                        # [B, width, V], from the drafter
        candidates = expand(candidates, front, scores)
        front = frontier(candidates, budget=8)
    tree = select(candidates, root, budget=8)

A path's score is the sum of its edges' log-probabilities. It never rises along a path, so the best
nodes are closed under ancestors, and they are the tree with the largest expected number of accepted
nodes among all that are made of these candidates. For the same reason a node that D - 1 candidates
come before has no descendant in the tree: it is not live in a frontier, and where no node is, the
tree is whole before its last level. A chain is width 1 and top_k 1.

Source: level-wise beam, then global top-N, as in EAGLE-2 (arXiv 2406.16858); children by Gumbel
top-k at a temperature above 0, with the target's own noise (arXiv 2408.07978).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxspec.sample import MASKED
from jaxspec.tree import NO_PARENT, DraftTree

SHARPNESS = 1.5
"""Of `TreeShape.tree`: about what fits how often a draft's first token is the greedy choice."""


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """How a tree is grown: all static, so that one compilation serves every tree.

    Attributes:
        budget: D, the nodes of the tree, its root included.
        levels: the largest depth; a level after the first costs a pass of the drafter, if it is
            reached.
        width: nodes of a level that are expanded.
        top_k: children of an expanded node.
        sharpness: inverse temperature of the draft's probabilities where paths are compared; see
            `expand`. What matters is how often the target chooses a token, which at temperature 0
            is more than its probability says for the first of them.
    """

    budget: int
    levels: int
    width: int
    top_k: int
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.levels < self.budget:
            raise ValueError(f"{self} needs 1 <= levels < budget")
        if self.sharpness <= 0:
            raise ValueError(f"{self} needs a sharpness above 0")
        if self.width < 1 or self.top_k < 1:
            raise ValueError(f"{self} needs a width and a top_k of at least 1")

    @staticmethod
    def chain(budget: int) -> TreeShape:
        """Linear speculation: the drafter's best token, budget - 1 times."""
        return TreeShape(budget=budget, levels=budget - 1, width=1, top_k=1)

    @staticmethod
    def tree(budget: int) -> TreeShape:
        """A beam that may reach as deep as the chain of this budget; most drafts end before."""
        beam = 2 if budget <= 8 else 3
        return TreeShape(budget, budget - 1, beam, beam, sharpness=SHARPNESS)


class Candidates(struct.PyTreeNode):
    """Nodes that may enter the tree: M = levels * width * top_k of them, level after level.

    Within a level, the children of frontier slot w lie at `w * top_k`, ..., best first. A parent's
    index is below its child's.
    """

    token: Array  # [B, M] int32
    parent: Array  # [B, M] int32: a candidate, or NO_PARENT for a child of the root
    score: Array  # [B, M] float32: log-probability of the path, estimated
    live: Array  # [B, M] bool
    level: Array  # [] int32: levels expanded so far
    width: int = struct.field(pytree_node=False)
    top_k: int = struct.field(pytree_node=False)

    @staticmethod
    def empty(batch: int, *, levels: int, width: int, top_k: int) -> Candidates:
        """Room for `levels` levels of `top_k` children for each of `width` frontier nodes."""
        shape = (batch, levels * width * top_k)
        return Candidates(
            token=jnp.zeros(shape, jnp.int32),
            parent=jnp.full(shape, NO_PARENT, jnp.int32),
            score=jnp.full(shape, MASKED, jnp.float32),
            live=jnp.zeros(shape, bool),
            level=jnp.int32(0),
            width=width,
            top_k=top_k,
        )

    @property
    def depth(self) -> Array:
        """Depth of each candidate, `[M]` int32: 1 for the children of the root."""
        return jnp.arange(self.token.shape[1], dtype=jnp.int32) // (self.width * self.top_k) + 1


class Frontier(struct.PyTreeNode):
    """Nodes of one level whose children the drafter scores next (leaves `[B, width]`)."""

    index: Array  # int32: a candidate, or NO_PARENT for the root
    token: Array  # int32
    parent_slot: Array  # int32: slot of the node's parent in the frontier before; 0 for the root
    score: Array  # float32
    live: Array  # bool

    @staticmethod
    def root(token: Array, *, width: int) -> Frontier:
        """The first frontier: `token [B]`, the last emitted one, in slot 0."""
        shape = (token.shape[0], width)
        first = jnp.broadcast_to(jnp.arange(width) == 0, shape)
        return Frontier(
            index=jnp.full(shape, NO_PARENT, jnp.int32),
            token=jnp.where(first, token[:, None], 0).astype(jnp.int32),
            parent_slot=jnp.zeros(shape, jnp.int32),
            score=jnp.where(first, 0.0, MASKED),
            live=first,
        )


def expand(
    candidates: Candidates, front: Frontier, scores: Array, *, sharpness: float | Array = 1.0
) -> Candidates:
    """Adds the `top_k` best children of each frontier node as the next level.

    Args:
        candidates: with a level to spare; a level beyond the capacity is dropped.
        front: the frontier that `scores` belong to.
        scores: `[B, n, V]`, n <= width: of `sample.perturb` for the children of the first n slots,
            at the children's position. The root's frontier needs n = 1 only.
        sharpness: > 0, the inverse temperature at which scores become log-probabilities. It
            reorders paths, never siblings.
    """
    with jax.named_scope("expand"):
        width, top_k = candidates.width, candidates.top_k
        given = scores.shape[1]
        scores = scores.astype(jnp.float32)  # top_k is slow in bfloat16 on a CPU
        best, token = lax.top_k(scores, top_k)
        edge = sharpness * best - jax.nn.logsumexp(sharpness * scores, -1, keepdims=True)
        # Rounding must not let a score rise along a path.
        score = jnp.maximum(front.score[:, :given, None] + jnp.minimum(edge, 0), MASKED)
        live = front.live[:, :given, None] & (best > MASKED / 2)
        parent = jnp.broadcast_to(front.index[:, :given, None], token.shape)

        place = candidates.level * (width * top_k) + jnp.arange(given * top_k)

        def append(row: Array, level: Array) -> Array:
            flat = level.reshape(level.shape[0], -1)
            return row.at[:, place].set(flat, mode="drop", unique_indices=True)

        return dataclasses.replace(
            candidates,
            token=append(candidates.token, token),
            parent=append(candidates.parent, parent),
            score=append(candidates.score, jnp.where(live, score, MASKED)),
            live=append(candidates.live, live),
            level=candidates.level + 1,
        )


def frontier(candidates: Candidates, budget: int) -> Frontier:
    """The best `width` candidates of the newest level (ties: the lower index).

    Those that `budget - 1` candidates come before are not live: nothing below them enters a tree of
    `budget` nodes.
    """
    block = candidates.width * candidates.top_k
    start = (candidates.level - 1) * block

    def newest(rows: Array) -> Array:
        return lax.dynamic_slice_in_dim(rows, start, block, axis=1)

    order = _ranked(newest(candidates.score), newest(candidates.live))[:, : candidates.width]

    def best(rows: Array) -> Array:
        return jnp.take_along_axis(newest(rows), order, axis=1)

    index, score = (start + order).astype(jnp.int32), best(candidates.score)
    higher = candidates.score[:, None] > score[..., None]
    equal = candidates.score[:, None] == score[..., None]
    earlier = jnp.arange(candidates.score.shape[1]) < index[..., None]
    before = candidates.live[:, None] & (higher | (equal & earlier))
    return Frontier(
        index=index,
        token=best(candidates.token),
        parent_slot=(order // candidates.top_k).astype(jnp.int32),
        score=score,
        live=best(candidates.live) & (before.sum(-1) < budget - 1),
    )


def select(
    candidates: Candidates, root: Array, budget: int, *, live: Array | None = None
) -> DraftTree:
    """The tree of the root and the best `budget - 1` candidates by path score.

    Ties go to the shallower, then to the lower index. Nodes come in this order, so the first n of
    them are the best tree of n nodes.

    Args:
        candidates: after the last level.
        root: `[B]` int32, the last emitted token.
        budget: D, counts the root; where candidates are fewer, the rest of the nodes are not live.
        live: `[B]` bool, sequences that draft at all.
    """
    if live is None:
        live = jnp.ones(root.shape, bool)
    with jax.named_scope("select"):
        order = _ranked(candidates.score, candidates.live)
        node = 1 + jnp.argsort(order, axis=1)  # each candidate's place in the tree, if it has one
        chosen = order[:, : budget - 1]

        def nodes(first: Array | float, rows: Array, rest: float) -> Array:
            """A leaf of the tree: the root's value, the chosen ones', and that of the padding."""
            picked = jnp.take_along_axis(rows, chosen, axis=1)
            head = jnp.broadcast_to(jnp.asarray(first, rows.dtype), root.shape)[:, None]
            short = budget - 1 - chosen.shape[1]
            padding = jnp.full((root.shape[0], short), rest, rows.dtype)
            return jnp.concatenate([head, picked, padding], axis=1)

        above = jnp.take_along_axis(node, jnp.maximum(candidates.parent, 0), axis=1)
        parent = jnp.where(candidates.parent == NO_PARENT, 0, above).astype(jnp.int32)
        kept = candidates.live & live[:, None]
        return DraftTree(
            token=nodes(root, candidates.token, 0),
            # The parent of a node that is not live means nothing, but stays below the node.
            parent=nodes(NO_PARENT, jnp.where(kept, parent, 0), 0),
            score=nodes(0.0, candidates.score, MASKED),
            live=nodes(live, kept, False),
        )


def _ranked(score: Array, live: Array) -> Array:
    """Indices by falling score along axis 1, lower index first among equals, then the not live."""
    return jnp.argsort(jnp.where(live, -score, jnp.inf), axis=1, stable=True)
