"""Random draft trees, and plain loops over them that the tests compare with."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.tree import NO_PARENT, DraftTree


def random_parents(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """Parents of one tree, from bushy to chain-like."""
    reach = int(rng.integers(1, nodes + 1))
    low = [max(0, i - reach) for i in range(1, nodes)]
    return np.array([NO_PARENT, *(rng.integers(a, i + 1) for i, a in enumerate(low))], np.int32)


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


def ancestry(parent: np.ndarray, node: int) -> list[int]:
    """The node and its ancestors, nearest first."""
    path = [node]
    while parent[path[-1]] != NO_PARENT:
        path.append(int(parent[path[-1]]))
    return path


def depths(parent: np.ndarray) -> np.ndarray:
    """Depth of each node; the root has 0."""
    return np.array([len(ancestry(parent, i)) - 1 for i in range(len(parent))])
