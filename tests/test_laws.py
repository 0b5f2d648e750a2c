"""The laws of the cache and of tree verification, each in a test that a broken law fails.

All of them use one small model whose sequences stand at many start positions, and so one
compilation per kind of block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache import Cache, LayerCache, LayerRows, init_cache
from jaxspec.model.forward import last_valid
from jaxspec.model.moe import gated_mlp, mix_experts
from jaxspec.tree import DraftTree, TokenBlock
from tests.random_trees import leaf_paths, mixed_parents, pad_paths, trees_of
from tests.serial import TRACES, Model, advance, commit, compiled, decode, random_model, verify
from tests.starts import MAX_LEN, Started, start_at
from tests.states import committed_entries, committed_slots, poison, same_bits, state_error

# One worker for all tests of the shared model, so that it is compiled once.
pytestmark = pytest.mark.xdist_group("tiny")

NODES = 16
CLOSE = 1e-5
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=4)
"""A batch holds 46 start positions and trees, so that one example is many."""


class Case(NamedTuple):
    """A batch of random trees, with a random path of each."""

    tree: DraftTree
    path: np.ndarray
    """[B, N], 0 beyond the end"""
    depth: np.ndarray
    """[B] nodes of the path"""


def draw_case(rng: np.random.Generator, started: Started) -> Case:
    tree = trees_of(rng, mixed_parents(rng, len(started.length), NODES), NODES, 64)
    leaves = [leaf_paths(tree, row) for row in range(len(started.length))]
    paths = [paths[rng.integers(len(paths))] for paths in leaves]
    return Case(tree, *pad_paths(paths, NODES))


def rows_of(out, nodes: np.ndarray) -> list[np.ndarray]:
    """What `forward` gives for `nodes [B, M]` of a tree block: logits and rows to commit."""

    def take(x: jax.Array) -> np.ndarray:
        index = nodes.reshape(*nodes.shape, *([1] * (x.ndim - 2)))
        return np.take_along_axis(np.asarray(x), index, axis=1)

    return [take(x) for x in jax.tree.leaves((out.logits, out.rows))]


# Law: a node sees committed context and its ancestors, nothing of its siblings.


@few
@given(seeds)
def test_what_is_not_an_ancestor_changes_no_bit(tiny, started, seed):
    rng = np.random.default_rng(seed)
    case = draw_case(rng, started)
    other = disturb(rng, case)
    outs = [verify(tiny.params, tiny.cfg, started.cache, tree) for tree in (case.tree, other)]
    assert same_bits(*(rows_of(out, case.path) for out in outs))
    assert not same_bits(outs[0].logits, outs[1].logits)
    count = rng.integers(case.depth + 1)
    assert same_bits(*(commit(started.cache, out.rows, case.path, count) for out in outs))


def disturb(rng: np.random.Generator, case: Case) -> DraftTree:
    """The tree with another token, parent and liveness of every node off the case's path."""
    token, parent, live = (np.array(x) for x in (case.tree.token, case.tree.parent, case.tree.live))
    for row, (path, depth) in enumerate(zip(case.path, case.depth, strict=True)):
        for node in sorted({*range(NODES)} - {*path[:depth].tolist()}):
            token[row, node] = rng.integers(64)
            parent[row, node] = rng.choice(np.flatnonzero(live[row, :node]))
            live[row, node] = rng.random() < 0.7
    return case.tree.replace(token=token, parent=parent, live=live)


# Law: what is not committed, not valid or not live feeds nothing, whatever stands there.


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_buffers_hold_anything_where_nothing_is_committed(tiny, started, value):
    case = draw_case(np.random.default_rng(0), started)
    rows = len(started.length)
    full, one = np.full(rows, NODES, np.int32), np.ones(rows, np.int32)
    got, want = [], []
    for cache, results in ((started.cache, want), (poison(started.cache, value), got)):
        out = verify(tiny.params, tiny.cfg, cache, case.tree)
        results += [out, commit(cache, out.rows, case.path, case.depth)]
        results += advance(tiny.params, tiny.cfg, cache, case.tree.token, full)
        results += advance(tiny.params, tiny.cfg, cache, case.tree.token[:, :1], one)
    for a, b in zip(got, want, strict=True):
        if isinstance(a, Cache):
            assert (state_error(a, b) == 0).all()
        else:
            assert same_bits(a, b)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(a))


@few
@given(seeds)
def test_dead_nodes_feed_nothing(tiny, started, seed):
    rng = np.random.default_rng(seed)
    case = draw_case(rng, started)
    parent = rng.integers(np.maximum(np.arange(NODES), 1), size=case.tree.parent.shape)
    other = case.tree.replace(
        token=np.where(case.tree.live, case.tree.token, (case.tree.token + 1) % 64),
        parent=np.where(case.tree.live, case.tree.parent, parent).astype(np.int32),
    )
    outs = [verify(tiny.params, tiny.cfg, started.cache, tree) for tree in (case.tree, other)]
    for row, live in enumerate(case.tree.live):
        assert same_bits(*(out.logits[row, live] for out in outs))
    assert same_bits(*(commit(started.cache, out.rows, case.path, case.depth) for out in outs))


@few
@given(seeds)
def test_tokens_beyond_the_valid_ones_feed_nothing(tiny, started, seed):
    rng = np.random.default_rng(seed)
    rows = len(started.length)
    token = rng.integers(64, size=(rows, NODES)).astype(np.int32)
    valid = rng.integers(NODES + 1, size=rows).astype(np.int32)
    padding = np.arange(NODES) >= valid[:, None]
    other = np.where(padding, (token + 1) % 64, token)
    (a, left), (b, right) = (
        advance(tiny.params, tiny.cfg, started.cache, t, valid) for t in (token, other)
    )
    assert same_bits(left, right)
    for row, count in enumerate(valid):
        assert same_bits(a.logits[row, :count], b.logits[row, :count])
    still = valid == 0
    assert same_bits(*(jax.tree.map(lambda x: x[still], cache) for cache in (left, started.cache)))


def test_padding_reaches_no_expert(tiny):
    rng = np.random.default_rng(0)
    p = tiny.params.layers[1].moe
    x = jnp.asarray(rng.standard_normal((3, 5, tiny.cfg.hidden_size)), jnp.float32)
    token, valid = np.zeros((3, 5), np.int32), rng.random((3, 5)) < 0.5

    @compiled
    def experts(p, cfg, x, valid):
        shared = gated_mlp(p.shared, x, cfg.swiglu_limit)
        return mix_experts(p, cfg, x, token, valid)[0], shared

    out, shared = experts(p, tiny.cfg, x, valid)
    routed = np.abs(out - shared).max(-1)
    assert (routed[~valid] < 1e-6).all()
    assert (routed[valid] > 1e-2).all()


def test_the_last_row_of_a_block_is_its_last_valid_one():
    x = jnp.arange(24).reshape(4, 6)[..., None]
    live = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0], [0] * 6], bool)
    none = jnp.zeros((4, 6), jnp.int32)
    tree = DraftTree(token=none, parent=none - 1, score=none.astype(jnp.float32), live=live)
    block = TokenBlock.tree(tree, none[:, 0])
    assert last_valid(block, x)[:3, 0, 0].tolist() == [5, 7, 16]


# Law: the rows of a batch know nothing of each other.


@few
@given(seeds)
def test_other_rows_of_the_batch_change_no_bit(tiny, started, seed):
    rng = np.random.default_rng(seed)
    rows = len(started.length)
    case, other = draw_case(rng, started), draw_case(rng, started)
    kept = rng.random(rows) < 0.5
    shuffled = np.where(kept, np.arange(rows), rng.permutation(rows))
    pick = lambda a, b: np.where(kept.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
    cache = jax.tree.map(lambda x: x[shuffled], started.cache)
    tree = jax.tree.map(pick, case.tree, other.tree)
    a = verify(tiny.params, tiny.cfg, started.cache, case.tree)
    b = verify(tiny.params, tiny.cfg, cache, tree)
    assert same_bits(*(jax.tree.map(lambda x: x[kept], out) for out in (a, b)))


@few
@given(seeds)
def test_the_order_of_the_batch_does_not_matter(tiny, started, seed):
    rng = np.random.default_rng(seed)
    case, order = draw_case(rng, started), rng.permutation(len(started.length))
    cache, tree = jax.tree.map(lambda x: x[order], (started.cache, case.tree))
    a = verify(tiny.params, tiny.cfg, started.cache, case.tree)
    b = verify(tiny.params, tiny.cfg, cache, tree)
    np.testing.assert_allclose(b.logits, a.logits[order], rtol=0, atol=CLOSE)


# Law: visibility follows from positions and ancestry, not from where a node or a row is stored.


@few
@given(seeds)
def test_the_order_of_the_nodes_does_not_matter(tiny, started, seed):
    rng = np.random.default_rng(seed)
    case = draw_case(rng, started)
    tree, place = reorder(rng, case.tree)
    a = verify(tiny.params, tiny.cfg, started.cache, case.tree).logits
    b = verify(tiny.params, tiny.cfg, started.cache, tree).logits
    moved = np.take_along_axis(np.asarray(b), place[..., None], axis=1)
    live = case.tree.live
    np.testing.assert_allclose(moved[live], np.asarray(a)[live], rtol=0, atol=CLOSE)


def reorder(rng: np.random.Generator, tree: DraftTree) -> tuple[DraftTree, np.ndarray]:
    """The tree with its nodes in another order, parents still first; and the place of each."""
    place = np.zeros(tree.parent.shape, np.int32)
    for row, parent in enumerate(tree.parent):
        ready = [0]
        for new in range(NODES):
            node = ready.pop(rng.integers(len(ready)))
            place[row, node] = new
            ready += np.flatnonzero(parent == node).tolist()
    order = np.argsort(place, axis=1)
    token, live, parent = (
        np.take_along_axis(x, order, axis=1) for x in (tree.token, tree.live, tree.parent)
    )
    parent[:, 1:] = np.take_along_axis(place, parent[:, 1:], axis=1)
    return tree.replace(token=token, live=live, parent=parent), place


def test_the_capacity_does_not_matter(tiny, started):
    """Nor does what stands in the places that a larger cache has more."""
    case = draw_case(np.random.default_rng(0), started)
    larger = grow_capacity(tiny, started.cache, MAX_LEN + 104)
    a = verify(tiny.params, tiny.cfg, started.cache, case.tree)
    b = verify(tiny.params, tiny.cfg, larger, case.tree)
    np.testing.assert_allclose(a.logits, b.logits, rtol=0, atol=CLOSE)


def grow_capacity(model: Model, cache: Cache, max_len: int) -> Cache:
    """The cache with room for `max_len` tokens, filled with NaN."""
    room = init_cache(model.cfg, len(cache.length), max_len)

    def pad(old: jax.Array, new: jax.Array) -> jax.Array:
        more = [(0, b - a) for a, b in zip(old.shape, new.shape, strict=True)]
        return jnp.pad(old, more, constant_values=np.nan)

    layers = jax.tree.map(pad, cache.layers, room.layers)
    return cache.replace(layers=layers)


@pytest.mark.parametrize("length", [40, 43])
def test_a_cache_may_be_filled_to_its_last_place(tiny, length):
    """Whole windows or not: entries have room as raw rows have."""
    token = np.random.default_rng(length).integers(64, size=(3, length)).astype(np.int32)
    valid = np.array([length, length - 1, length - 9], np.int32)
    full, roomy = (
        advance(tiny.params, tiny.cfg, init_cache(tiny.cfg, 3, room), token, valid)[1]
        for room in (length, MAX_LEN)
    )
    assert state_error(grow_capacity(tiny, full, MAX_LEN), roomy).max() < CLOSE


# Law: `extend` is the only writer, and it writes what was accepted and nothing else.


def test_committing_nothing_is_the_identity(tiny, started):
    """Bit for bit, whatever the cache and the rows hold."""
    case = draw_case(np.random.default_rng(0), started)
    out = verify(tiny.params, tiny.cfg, started.cache, case.tree)
    none = np.zeros(len(started.length), np.int32)
    spoilt = jax.tree.map(
        lambda x: jnp.full_like(x, np.nan) if x.dtype == jnp.float32 else x, out.rows
    )
    cache = poison(started.cache)
    for rows in (out.rows, spoilt):
        assert same_bits(commit(cache, rows, case.path, none), cache)
    _, after = advance(tiny.params, tiny.cfg, cache, case.tree.token, none)
    assert same_bits(after, cache)


@few
@given(seeds)
def test_a_commit_writes_the_accepted_rows_and_nothing_else(tiny, started, seed):
    """What was poison before is poison after, but where the path has written."""
    rng = np.random.default_rng(seed)
    case = draw_case(rng, started)
    count = rng.integers(case.depth + 1).astype(np.int32)
    before = poison(started.cache)
    out = verify(tiny.params, tiny.cfg, before, case.tree)
    after = commit(before, out.rows, case.path, count)
    length = started.length + count
    assert np.array_equal(after.length, length)
    assert same_bits(after.layers, append(before, out.rows, case.path, count))
    for old, new in zip(before.layers, after.layers, strict=True):
        filled = committed_slots(new, length)
        assert np.array_equal(
            np.isfinite(new.ring), np.broadcast_to(filled[..., None], new.ring.shape)
        )
        step = (np.arange(new.ring.shape[1]) - started.length[:, None]) % new.ring.shape[1]
        untouched = step >= count[:, None]
        assert same_bits(new.ring[untouched], old.ring[untouched])
        for name in ("entries", "keys"):
            was, now = (np.asarray(getattr(layer, name)) for layer in (old, new))
            if now.ndim:
                there = committed_entries(new, length)
                assert np.isfinite(now[there]).all()
                assert np.isnan(now[~there]).all()
                past = committed_entries(old, started.length)
                assert same_bits(now[past], was[past])


def append(
    cache: Cache, rows: Sequence[LayerRows], path: np.ndarray, count: np.ndarray
) -> list[LayerCache]:
    """The layers after a commit, node by node: where a row goes follows from its position."""
    layers = []
    for layer, row in zip(cache.layers, jax.device_get(rows), strict=True):
        new = jax.tree.map(np.array, layer)
        for b, start in enumerate(np.asarray(cache.length)):
            for position, node in enumerate(path[b, : count[b]], start):
                new.ring[b, position % new.ring.shape[1]] = row.kv[b, node]
                if new.ratio:
                    new.open[b] = row.open[b, node]
                if new.ratio and (position + 1) % new.ratio == 0:
                    new.entries[b, position // new.ratio] = row.entry[b, node]
                if new.keys is not None:
                    new.key_open[b] = row.key_open[b, node]
                if new.keys is not None and (position + 1) % new.ratio == 0:
                    new.keys[b, position // new.ratio] = row.key[b, node]
        layers.append(new)
    return layers


def test_a_path_may_be_given_in_fewer_places(tiny, started):
    """`walk` gives as many places as the tree is deep."""
    case = draw_case(np.random.default_rng(0), started)
    out = verify(tiny.params, tiny.cfg, started.cache, case.tree)
    for places in (1, 5, 9):
        count = np.minimum(case.depth, places)
        short = commit(started.cache, out.rows, case.path[:, :places], count)
        assert same_bits(short, commit(started.cache, out.rows, case.path, count))


# Law: any split of a text into blocks is the same text.


@pytest.fixture(scope="module")
def continued(tiny, started):
    """Forty more tokens for every start, and their serial decoding."""
    size = (len(started.length), 40)
    tokens = np.random.default_rng(5).integers(64, size=size).astype(np.int32)
    return tokens, decode(tiny, started.cache, tokens)


@few
@given(st.lists(st.integers(1, NODES), min_size=1, max_size=9))
def test_every_split_into_chunks_is_serial_decoding(tiny, started, continued, sizes):
    check_split(tiny, started, continued, sizes)


@pytest.mark.slow
@settings(max_examples=80)
@given(st.lists(st.integers(1, NODES), min_size=1, max_size=40))
def test_many_splits_into_chunks_are_serial_decoding(tiny, started, continued, sizes):
    check_split(tiny, started, continued, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 5, 12, 16])
def test_splits_in_other_windows(tmp_path, window):
    """A chunk of 16 is cut into tiles by the window, even or odd, or is shorter than it."""
    overrides = {"compress_ratios": [0, 4, 6], "sliding_window": window, "index_topk": 3}
    model = random_model(tmp_path, overrides)
    started = start_at(model, range(20))
    tokens = np.random.default_rng(5).integers(64, size=(20, 40)).astype(np.int32)
    serial = decode(model, started.cache, tokens)
    rng = np.random.default_rng(6)
    for _ in range(8):
        check_split(model, started, (tokens, serial), rng.integers(1, NODES + 1, 9).tolist())


def check_split(model: Model, started: Started, continued, sizes: list[int]) -> None:
    """Row b takes the sizes in turn, from the b-th on; at the end it waits for the others."""
    tokens, serial = continued
    rows, total = tokens.shape
    cache, done, call = started.cache, np.zeros(rows, int), 0
    padded = np.pad(tokens, ((0, 0), (0, NODES)))
    while (done < total).any():
        size = np.take(sizes, np.arange(rows) + call, mode="wrap")
        valid = np.minimum(size, total - done).astype(np.int32)
        places = done[:, None] + np.arange(NODES)
        block = np.take_along_axis(padded, places, axis=1)
        out, cache = advance(model.params, model.cfg, cache, block, valid)
        want = np.take_along_axis(serial.logits, np.minimum(places, total - 1)[..., None], axis=1)
        inside = np.arange(NODES) < valid[:, None]
        assert np.abs(np.asarray(out.logits) - want)[inside].max(initial=0) < CLOSE
        done, call = done + valid, call + 1
    assert state_error(cache, serial.caches[-1]).max() < CLOSE


# Law: capacity is static, content is traced.


def test_one_compilation_serves_all_contents(tiny, started):
    rng = np.random.default_rng(0)
    rows = len(started.length)

    def run_all() -> None:
        case = draw_case(rng, started)
        valid = rng.integers(NODES + 1, size=rows).astype(np.int32)
        out = verify(tiny.params, tiny.cfg, started.cache, case.tree)
        cache = commit(started.cache, out.rows, case.path, case.depth)
        advance(tiny.params, tiny.cfg, cache, case.tree.token, valid)
        advance(tiny.params, tiny.cfg, cache, case.tree.token[:, :1], np.minimum(valid, 1))

    run_all()
    before = dict(TRACES)
    for _ in range(3):
        run_all()
    assert before == dict(TRACES)
