"""Random draft trees, and plain loops over them that the tests compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import jax.numpy as jnp
import numpy as np

from jaxspec.tree import NO_PARENT, DraftTree


def random_parents(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """Parents of one tree, from bushy to chain-like."""
    reach = int(rng.integers(1, nodes + 1))
    low = [max(0, i - reach) for i in range(1, nodes)]
    return np.array([NO_PARENT, *(rng.integers(a, i + 1) for i, a in enumerate(low))], np.int32)


def all_parents(nodes: int) -> Iterator[list[int]]:
    """Every tree of this size in every order of its nodes: (nodes - 1)! of them."""
    for choice in product(*(range(i) for i in range(1, nodes))):
        yield [NO_PARENT, *choice]


def mixed_parents(rng: np.random.Generator, count: int, nodes: int) -> list[np.ndarray]:
    """A chain, a star and random trees of every size up to `nodes`, in random order."""
    chain, star = np.arange(-1, nodes - 1), np.minimum(np.arange(-1, nodes - 1), 0)
    sizes = rng.integers(1, nodes + 1, size=count - 2)
    trees = [chain, star, *(random_parents(rng, int(size)) for size in sizes)]
    return [trees[i] for i in rng.permutation(count)]


def random_trees(
    rng: np.random.Generator, batch: int, nodes: int, vocab: int, *, dead: float = 0.0
) -> DraftTree:
    """`batch` trees; a node is dead with the given probability, and then all below it."""
    parent = np.stack([random_parents(rng, nodes) for _ in range(batch)])
    live = rng.random((batch, nodes)) >= dead
    for i in range(1, nodes):
        live[:, i] &= np.take_along_axis(live, parent[:, i, None], 1)[:, 0]
    return DraftTree(
        token=jnp.asarray(rng.integers(0, vocab, (batch, nodes)), jnp.int32),
        parent=jnp.asarray(parent),
        score=jnp.zeros((batch, nodes), jnp.float32),
        live=jnp.asarray(live),
    )


def trees_of(
    rng: np.random.Generator, parents: Sequence[Sequence[int]], nodes: int, vocab: int
) -> DraftTree:
    """These trees with random tokens, filled up to `nodes` with dead nodes.

    The dead ones stand anywhere but in front, and have any parent.
    """
    shape = len(parents), nodes
    parent = np.stack([rng.integers(np.maximum(np.arange(nodes), 1)) for _ in parents])
    live = np.zeros(shape, bool)
    for row, tree in enumerate(parents):
        place = np.sort(rng.permutation(nodes - 1)[: len(tree) - 1]) + 1
        place = np.concatenate([[0], place])
        live[row, place] = True
        parent[row, place[1:]] = place[np.asarray(tree[1:], int)]
    parent[:, 0] = NO_PARENT
    return DraftTree(
        token=rng.integers(vocab, size=shape).astype(np.int32),
        parent=parent.astype(np.int32),
        score=np.zeros(shape, np.float32),
        live=live,
    )


def ancestry(parent: np.ndarray, node: int) -> list[int]:
    """The node and its ancestors, nearest first."""
    path = [node]
    while parent[path[-1]] != NO_PARENT:
        path.append(int(parent[path[-1]]))
    return path


def depths(parent: np.ndarray) -> np.ndarray:
    """Depth of each node; the root has 0."""
    return np.array([len(ancestry(parent, i)) - 1 for i in range(len(parent))])


def leaf_paths(tree: DraftTree, row: int) -> list[list[int]]:
    """The paths from the root to every live node of a batch's row that has no live child."""
    parent, live = np.asarray(tree.parent[row]), np.flatnonzero(tree.live[row])
    inner = set(parent[live].tolist())
    return [ancestry(parent, int(node))[::-1] for node in live if node not in inner]


def pad_paths(paths: Sequence[Sequence[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`path [B, size]` int32, 0 beyond the end, and the lengths `[B]`."""
    padded = np.zeros((len(paths), size), np.int32)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    return padded, np.array([len(path) for path in paths], np.int32)
