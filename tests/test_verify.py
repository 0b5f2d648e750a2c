import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.tree import NO_PARENT, DraftTree
from jaxspec.verify import walk
from tests.random_trees import random_trees

walked = jax.jit(walk, static_argnames="depth")


def follow(token, parent, live, choice):
    """The accepted nodes, by a plain walk."""
    if not live[0]:
        return []
    path = [0]
    while True:
        children = [
            c
            for c in range(len(token))
            if live[c] and parent[c] == path[-1] and token[c] == choice[path[-1]]
        ]
        if not children:
            return path
        path.append(children[0])


def check(tree, choice, result, levels):
    token, parent, live, choice = map(np.asarray, (tree.token, tree.parent, tree.live, choice))
    path, count, bonus = map(np.asarray, (result.path, result.count, result.bonus))
    assert path.shape == (len(token), levels)
    assert path.dtype == count.dtype == bonus.dtype == np.int32
    lengths = set()
    for b in range(len(token)):
        want = follow(token[b], parent[b], live[b], choice[b])[:levels]
        lengths.add(len(want))
        assert count[b] == len(want)
        assert path[b].tolist() == want + [0] * (levels - len(want))
        if want:
            assert bonus[b] == choice[b][want[-1]]
    return lengths


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 16, 33, 64])
@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_walk_follows_matching_live_children(nodes, vocab):
    """A small vocabulary makes siblings with the same token, and deep matches."""
    rng = np.random.default_rng(nodes * 10 + vocab)
    for dead in (0.0, 0.3):
        tree = random_trees(rng, 200, nodes, vocab, dead=dead)
        choice = jnp.asarray(rng.integers(0, vocab, (200, nodes)), jnp.int32)
        lengths = check(tree, choice, walked(tree, choice), nodes)
        assert len(lengths) > (nodes > 2)


@pytest.mark.parametrize("vocab", [1, 3])
def test_trees_that_are_not_consistent_break_nothing(vocab):
    """A live node under a dead one, and dead nodes with any parent, are not accepted."""
    rng = np.random.default_rng(vocab)
    tree = random_trees(rng, 300, 12, vocab)
    live = jnp.asarray(rng.random((300, 12)) < 0.7)
    orphan = ~live & jnp.asarray(rng.random((300, 12)) < 0.5)
    tree = dataclasses.replace(tree, live=live, parent=jnp.where(orphan, NO_PARENT, tree.parent))
    choice = jnp.asarray(rng.integers(0, vocab, (300, 12)), jnp.int32)
    assert len(check(tree, choice, walked(tree, choice), 12)) > 3


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 6, 11])
def test_declared_depth_bounds_the_path(depth):
    rng = np.random.default_rng(depth)
    tree = random_trees(rng, 200, 12, vocab=2)
    choice = jnp.asarray(rng.integers(0, 2, (200, 12)), jnp.int32)
    check(tree, choice, walked(tree, choice, depth=depth), depth + 1)


def test_lowest_of_equal_siblings_is_followed():
    """The second twin has a child that would match; the walk must not reach it."""
    tree = DraftTree(
        token=jnp.array([[9, 4, 4, 7, 7]]),
        parent=jnp.array([[NO_PARENT, 0, 0, 2, 3]]),
        score=jnp.zeros((1, 5)),
        live=jnp.ones((1, 5), bool),
    )
    result = walked(tree, jnp.array([[4, 7, 7, 7, 7]]))
    assert result.path[0].tolist() == [0, 1, 0, 0, 0]
    assert (int(result.count[0]), int(result.bonus[0])) == (2, 7)


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_chain_accepts_its_common_prefix(nodes):
    rng = np.random.default_rng(nodes)
    token = rng.integers(0, 2, (64, nodes)).astype(np.int32)
    choice = rng.integers(0, 2, (64, nodes)).astype(np.int32)
    parent = np.broadcast_to(np.arange(-1, nodes - 1, dtype=np.int32), (64, nodes))
    tree = DraftTree(token, parent, np.zeros((64, nodes), np.float32), np.ones((64, nodes), bool))
    agree = np.cumprod(token[:, 1:] == choice[:, :-1], axis=1).sum(1)
    np.testing.assert_array_equal(walked(tree, choice).count, 1 + agree)


def test_contents_do_not_recompile():
    traces = []

    @jax.jit
    def step(tree, choice):
        traces.append(1)
        return walk(tree, choice, depth=4)

    rng = np.random.default_rng(0)
    for dead in (0.0, 0.5, 1.0):
        step(random_trees(rng, 4, 9, 3, dead=dead), jnp.zeros((4, 9), jnp.int32))
    assert len(traces) == 1
