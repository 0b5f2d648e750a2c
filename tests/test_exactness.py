"""Speculation changes no law and no stream: by enumeration, and token for token by key.

The enumeration takes every tree shape of up to six nodes over four tokens and every outcome of the
coins, with its probability. One coin serves all nodes of a depth (as the noise of a position does),
and the drafter may look at the coin before it drafts, as the Gumbel-coupled one does.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.grow import Candidates, Frontier, expand, frontier, select
from jaxspec.sample import Noise, Sampling, choose, draw_noise, perturb
from jaxspec.tree import NO_PARENT, DraftTree, TokenBlock
from jaxspec.verify import walk
from tests.random_trees import ancestry, depths

VOCAB = 4


# ------------------------------------------------------------------------------------- enumeration


@functools.cache
def law(prefix):
    """The target's distribution after a prefix."""
    return np.random.default_rng([7, *prefix]).dirichlet(np.full(VOCAB, 0.7))


@functools.cache
def continuations(prefix, length):
    """Probability of each continuation of `prefix` by `length` tokens, `[V] * length`."""
    if length == 0:
        return np.ones(())
    return np.stack(
        [law(prefix)[t] * continuations((*prefix, t), length - 1) for t in range(VOCAB)]
    )


def shapes(nodes):
    """All trees of so many nodes, as parents."""
    for above in itertools.product(*(range(i) for i in range(1, nodes))):
        yield np.array([NO_PARENT, *above], np.int32)


def outcomes(parent, rng, *, looks, fresh=True):
    """Every outcome of the coins: (probability, token of each node, choice at each node).

    The coin of a depth is uniform, and a node's choice is the inverse of its distribution there.
    A drafter that looks drafts after the coin is known; one coin for all depths is the control.
    """
    depth = depths(parent)
    fixed = rng.integers(0, VOCAB, len(parent))

    def descend(level, low, high, weight, state):
        token, choice = state
        if level > depth.max():
            yield weight * (high - low), token, choice
            return
        if fresh:
            low, high, weight = 0.0, 1.0, weight * (high - low)
        nodes = np.flatnonzero(depth == level)
        edges = {v: np.cumsum(law(tuple(token[ancestry(parent, v)[-2::-1]]))) for v in nodes}
        inner = np.unique([e for edge in edges.values() for e in edge[:-1] if low < e < high])
        for a, b in itertools.pairwise([low, *inner, high]):
            chosen, drafted = choice.copy(), token.copy()
            for v, edge in edges.items():
                chosen[v] = min(np.searchsorted(edge, (a + b) / 2), VOCAB - 1)
            for c in np.flatnonzero(depth == level + 1):
                hits = looks and rng.random() < 0.5
                drafted[c] = chosen[parent[c]] if hits else fixed[c]
            yield from descend(level + 1, a, b, weight, (drafted, chosen))

    zeros = np.zeros(len(parent), np.int64)
    yield from descend(0, 0.0, 1.0, 1.0, (zeros, zeros))


def accepted(parent, token, choice):
    """Emitted tokens of each row, by the real walk."""
    rows, nodes = VOCAB ** token.shape[1], token.shape[1]  # one shape, so that it compiles once
    fill = [(0, rows - len(token)), (0, 0)]
    tree = DraftTree(
        token=np.pad(token, fill).astype(np.int32),
        parent=np.broadcast_to(parent, (rows, nodes)),
        score=np.zeros((rows, nodes), np.float32),
        live=np.ones((rows, nodes), bool),
    )
    result = jax.device_get(walked(tree, np.pad(choice, fill).astype(np.int32)))
    for row, path, count, bonus in zip(
        token, result.path, result.count, result.bonus, strict=False
    ):
        yield (*row[path[1:count]].tolist(), int(bonus))


walked = jax.jit(walk)


def bonus_of_the_parent(parent, token, choice):
    """A wrong rule: the bonus is the choice at the node before the last accepted one."""
    for row, chosen, emitted in zip(token, choice, accepted(parent, token, choice), strict=True):
        path = [0]
        for t in emitted[:-1]:
            path.append(
                next(c for c in range(len(parent)) if parent[c] == path[-1] and row[c] == t)
            )
        yield (*emitted[:-1], int(chosen[path[max(len(path) - 2, 0)]]))


def deepest_match(parent, token, choice):
    """A wrong rule: the deepest node that its parent chose, whatever lies between."""
    depth = depths(parent)
    for row, chosen in zip(token, choice, strict=True):
        match = [v for v in range(len(parent)) if v == 0 or row[v] == chosen[parent[v]]]
        last = max(match, key=lambda v: depth[v])
        yield (*row[ancestry(parent, last)[-2::-1]].tolist(), int(chosen[last]))


def variation(parent, rule, rng, **coins):
    """Total variation between the law of the emitted tokens, drawn on, and the target's."""
    weight, token, choice = map(np.array, zip(*outcomes(parent, rng, **coins), strict=True))
    np.testing.assert_allclose(weight.sum(), 1, rtol=1e-12)
    length = depths(parent).max() + 1
    found = np.zeros((VOCAB,) * length)
    for share, emitted in zip(weight, rule(parent, token, choice), strict=True):
        found[emitted] += share * continuations(emitted, length - len(emitted))
    return np.abs(found - continuations((), length)).sum() / 2


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6])
def test_law_of_the_emitted_tokens_is_the_targets(nodes, looks):
    rng = np.random.default_rng(nodes)
    worst = max(variation(parent, accepted, rng, looks=looks) for parent in shapes(nodes))
    assert worst < 1e-12


@pytest.mark.parametrize(
    ("rule", "coins"),
    [
        (bonus_of_the_parent, {"looks": False}),
        (deepest_match, {"looks": False}),
        (accepted, {"looks": True, "fresh": False}),  # one coin for two positions
    ],
)
def test_enumeration_finds_wrong_rules(rule, coins):
    rng = np.random.default_rng(9)
    found = [variation(parent, rule, rng, **coins) for parent in shapes(4)]
    assert max(found) > 0.1


# --------------------------------------------------------------------------------- streams by key

TOKENS = 12
PLAIN, CHAIN, BUSHY = (1, 1, 1, 1), (3, 1, 1, 4), (4, 4, 3, 16)  # levels, width, top_k, budget


def table(seed):
    """Logits of a toy model after two tokens, `[V, V, V]`."""
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=(TOKENS, TOKENS, TOKENS)) * 2, jnp.float32
    )


@functools.partial(jax.jit, static_argnames="size")
def speculate(models, sampling, seed, context, *, size, shift=0):
    """One step on a grown tree; `context` is (token before the root, root, length)."""
    target, draft = models
    before, root, length = context
    levels, width, top_k, budget = size
    noise = draw_noise(sampling, seed, length + 1, levels + 1, TOKENS)
    candidates = Candidates.empty(root.shape[0], levels=levels, width=width, top_k=top_k)
    front, above = Frontier.root(root, width=width), jnp.repeat(before[:, None], width, axis=1)

    def grow(carry, level):
        candidates, front, above = carry
        position = jnp.repeat(length[:, None] + 1 + level, width, axis=1)
        scores = perturb(draft[above, front.token], sampling, seed, position, noise=noise)
        candidates = expand(candidates, front, scores)
        below = frontier(candidates, budget)
        above = jnp.take_along_axis(front.token, below.parent_slot, axis=1)
        return (candidates, below, above), None

    candidates = jax.lax.scan(grow, (candidates, front, above), jnp.arange(levels))[0][0]
    tree = select(candidates, root, budget)
    parent_token = jnp.take_along_axis(tree.token, jnp.maximum(tree.parent, 0), axis=1)
    parent_token = jnp.where(tree.parent == NO_PARENT, before[:, None], parent_token)
    logits = target[parent_token, tree.token]
    position = TokenBlock.tree(tree, length).position + 1
    used = Noise(value=noise.value, first=noise.first + shift)
    choice = choose(logits, sampling, seed, position, noise=used)
    return tree, walk(tree, choice, depth=levels)


def stream(models, sampling, seed, count, **kwargs):
    """At least `count` tokens of each sequence, and the steps' counts."""
    batch = seed.shape[0]
    before = np.arange(batch, dtype=np.int32) % TOKENS
    root, length = before[::-1].copy(), np.arange(batch, dtype=np.int32) * 5
    tokens, counts = [[] for _ in range(batch)], []
    while min(map(len, tokens)) < count:
        tree, result = jax.device_get(
            speculate(models, sampling, seed, (before, root, length), **kwargs)
        )
        for b in range(batch):
            path = tree.token[b, result.path[b, : result.count[b]]]
            tokens[b] += [*path[1:].tolist(), int(result.bonus[b])]
            before[b], root[b] = path[-1], result.bonus[b]
            length[b] += result.count[b]
        counts.append(result.count)
    return [row[:count] for row in tokens], np.array(counts)


MIXED = {
    "temperature": [0.0, 1.0, 0.3, 1.5, 1.0, 0.0],
    "top_k": [0, 0, 3, 0, 5, 2],
    "top_p": [1.0, 1.0, 0.9, 0.6, 1.0, 0.5],
}


@pytest.mark.parametrize("likeness", [0.0, 0.7, 1.0])
def test_every_tree_gives_the_stream_of_its_seed(likeness):
    target = table(0)
    models = (target, likeness * target + (1 - likeness) * table(1))
    sampling = Sampling.create(6, **MIXED)
    seed = jnp.array([4, 5, 6, 7, 8, 2**32 - 1], jnp.uint32)
    plain, _ = stream(models, sampling, seed, 40, size=PLAIN)
    assert len({tuple(row) for row in plain}) == 6
    for size in (CHAIN, BUSHY):
        tokens, counts = stream(models, sampling, seed, 40, size=size)
        assert tokens == plain
        assert counts.max() > 1
        if likeness == 1 and size == CHAIN:  # the target drafts with its own noise: all is accepted
            assert (counts == size[0] + 1).all()
        if likeness < 1:
            assert counts.min() == 1  # something was refused
    other, _ = stream(models, sampling, seed + 1, 40, size=BUSHY)
    assert [a == b for a, b in zip(other, plain, strict=True)] == [True, *[False] * 4, True]


def test_noise_of_another_position_would_show():
    """The control: with a step's own shift the stream depends on where the steps end."""
    models = (table(0), 0.7 * table(0) + 0.3 * table(1))
    sampling = Sampling.create(6, **MIXED)
    seed = jnp.arange(6, dtype=jnp.uint32)
    plain, _ = stream(models, sampling, seed, 40, size=PLAIN)
    shifted, _ = stream(models, sampling, seed, 40, size=BUSHY, shift=1)
    same = [a == b for a, b in zip(shifted, plain, strict=True)]
    assert same == [True, *[False] * 4, True]  # the greedy ones have no noise
