"""Draft trees to test with: all of a size, random ones, and their paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from jaxspec.tree import NO_PARENT, DraftTree

Parents = list[int]


def all_parents(nodes: int) -> Iterator[Parents]:
    """Every tree of this size in every order of its nodes: (nodes - 1)! of them."""
    for choice in product(*(range(i) for i in range(1, nodes))):
        yield [NO_PARENT, *choice]


def random_parents(rng: np.random.Generator, nodes: int) -> Parents:
    """A tree between a star (each parent low) and a chain (each parent the node before)."""
    lean = rng.choice([0.3, 1.0, 3.0, 9.0])
    return [NO_PARENT, *(int(i * rng.random() ** (1 / lean)) for i in range(1, nodes))]


def chain_parents(nodes: int) -> Parents:
    return [i - 1 for i in range(nodes)]


def star_parents(nodes: int) -> Parents:
    return [NO_PARENT] + [0] * (nodes - 1)


def grow_tree(
    rng: np.random.Generator, parents: Sequence[Parents], size: int, vocabulary: int
) -> DraftTree:
    """A batch of trees with random tokens, filled up to `size` nodes.

    The filling stands anywhere but in front: nodes that are not live, with any parent and token.
    """
    token = rng.integers(vocabulary, size=(len(parents), size)).astype(np.int32)
    parent = np.stack([rng.integers(np.maximum(np.arange(size), 1)) for _ in parents])
    live = np.zeros(token.shape, bool)
    for row, tree in enumerate(parents):
        place = 1 + np.sort(rng.permutation(size - 1)[: len(tree) - 1])
        place = [0, *place.tolist()]
        live[row, place] = True
        parent[row, place] = [NO_PARENT if up == NO_PARENT else place[up] for up in tree]
    parent[:, 0] = NO_PARENT
    score = np.zeros(token.shape, np.float32)
    return DraftTree(token=token, parent=parent.astype(np.int32), score=score, live=live)


def path_to(parent: np.ndarray, node: int) -> list[int]:
    """The nodes from the root down to `node`, by following parents one at a time."""
    path = [int(node)]
    while parent[path[-1]] != NO_PARENT:
        path.append(int(parent[path[-1]]))
    return path[::-1]


def leaf_paths(tree: DraftTree, row: int) -> list[list[int]]:
    """The paths to every live node of a batch's row that has no live child."""
    live = np.flatnonzero(tree.live[row])
    inner = set(tree.parent[row][live].tolist())
    return [path_to(tree.parent[row], node) for node in live if node not in inner]


def pad_paths(paths: Sequence[Sequence[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`path [B, size]` int32, 0 beyond the end, and the lengths `[B]`."""
    padded = np.zeros((len(paths), size), np.int32)
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    return padded, np.array([len(path) for path in paths], np.int32)
