"""Tree verification is serial decoding of every path at once.

Every node's logits equal those of decoding its path one token at a time, and committing any path,
whole or in part, leaves the state that this decoding would have left: the cache is equal, and so
are the next tokens. Checked at every start position around the edges of windows, rings and pools.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import pytest

from jaxspec.cache import Cache
from jaxspec.settings import MAX_BUDGET
from jaxspec.tree import DraftTree
from tests.random_trees import (
    all_parents,
    ancestry,
    leaf_paths,
    mixed_parents,
    pad_paths,
    trees_of,
)
from tests.serial import Decoded, Model, advance, choose_rows, commit, decode, random_model, verify
from tests.starts import POSITIONS, Started, start_at
from tests.states import state_error

pytestmark = pytest.mark.xdist_group("tiny")

NODES = 16
CLOSE = 1e-5
FOLLOW_UP = 12
TIE = 1e-5
"""Below this gap a top-k may go either way, as its scores are rounded differently."""


def check_trees(
    model: Model, started: Started, tree: DraftTree, follow: Container[int]
) -> np.ndarray:
    """Compares every node of a batch of trees with the serial decoding of its path.

    Args:
        follow: the nodes after whose commit decoding goes on, to be compared as well.

    Returns:
        The largest differences of logits, of the state after a commit, and of the logits after it.
    """
    out = verify(model.params, model.cfg, started.cache, tree)
    worst = np.zeros(3)
    for node in range(tree.token.shape[1]):
        path, depth = pad_paths(paths_to(tree, node), tree.token.shape[1])
        tokens = np.take_along_axis(tree.token, path, axis=1)[:, : depth.max()]
        serial = decode(model, started.cache, tokens)
        errors = [logits_error(np.asarray(out.logits), serial.logits, path, depth)]
        got = commit(started.cache, out.rows, with_any_tail(path, depth), depth)
        want = cache_after(serial, depth)
        errors.append(state_error(got, want))
        errors.append(error_after(model, got, want) if node in follow else np.zeros(len(path)))
        excused = decided_by_a_tie(model, started, tokens, depth, np.max(errors, axis=0) > CLOSE)
        assert excused.sum() <= 1
        worst = np.maximum(worst, np.where(excused, 0.0, errors).max(1))
        assert (worst < CLOSE).all(), worst
    return worst


def cache_after(serial: Decoded, count: np.ndarray) -> Cache:
    """Of each row the cache after its `count [B]` of tokens."""
    chosen = serial.caches[0]
    for step, cache in enumerate(serial.caches):
        chosen = choose_rows(step <= count, cache, chosen)
    return chosen


def paths_to(tree: DraftTree, node: int) -> list[list[int]]:
    """Per row the path to `node`, or to the root where it is dead."""
    rows = zip(tree.parent, tree.live, strict=True)
    return [ancestry(parent, node if live[node] else 0)[::-1] for parent, live in rows]


def with_any_tail(path: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Beyond its end a path may name any nodes."""
    tail = np.random.default_rng(2).integers(path.shape[1], size=path.shape)
    return np.where(np.arange(path.shape[1]) < depth[:, None], path, tail).astype(np.int32)


def logits_error(
    logits: np.ndarray, serial: np.ndarray, path: np.ndarray, depth: np.ndarray
) -> np.ndarray:
    """[B]: of the nodes on the path, against the tokens of its serial decoding."""
    steps = serial.shape[1]
    on_path = np.take_along_axis(logits, path[:, :steps, None], axis=1)
    error = np.nan_to_num(np.abs(on_path - serial), nan=np.inf).max(-1)
    return np.where(np.arange(steps) < depth[:, None], error, 0.0).max(1)


def error_after(model: Model, got: Cache, want: Cache) -> np.ndarray:
    """[B]: of the next logits, and of the state after them."""
    tokens = next_tokens(model, len(got.length))
    a, b = (decode(model, cache, tokens) for cache in (got, want))
    logits = np.nan_to_num(np.abs(a.logits - b.logits), nan=np.inf).max((1, 2))
    return np.maximum(logits, state_error(a.caches[-1], b.caches[-1]))


def next_tokens(model: Model, rows: int) -> np.ndarray:
    size = (rows, FOLLOW_UP)
    return np.random.default_rng(1).integers(model.cfg.vocab_size, size=size).astype(np.int32)


def decided_by_a_tie(
    model: Model, started: Started, tokens: np.ndarray, depth: np.ndarray, differs: np.ndarray
) -> np.ndarray:
    """[B]: of the rows that differ, those where the oracle finds a top-k on the edge."""
    excused = np.zeros(len(tokens), bool)
    after = next_tokens(model, len(tokens))
    for row in np.flatnonzero(differs):
        past = started.tokens[row, : started.length[row]]
        _, outs = model.oracle.run([*past, *tokens[row, : depth[row]], *after[row]])
        excused[row] = min(out.margin for out in outs) < TIE
        print(f"a tie within {TIE} excuses the path {tokens[row, : depth[row]]} after {len(past)}")
    return excused


def test_every_node_of_random_trees_equals_its_serial_decoding(tiny, started):
    """The chain of 16 nodes is twice as long as the window."""
    rng = np.random.default_rng(0)
    tree = trees_of(rng, mixed_parents(rng, len(started.length), NODES), NODES, 64)
    print("largest differences", check_trees(tiny, started, tree, follow={0, 5, 15}))


def test_every_node_equals_the_oracle(tiny, started):
    """The float64 oracle knows no trees, no blocks and no pools."""
    rng = np.random.default_rng(1)
    rows = rng.permutation(len(started.length))[:12]
    tree = trees_of(rng, mixed_parents(rng, len(started.length), NODES), NODES, 64)
    logits = np.asarray(verify(tiny.params, tiny.cfg, started.cache, tree).logits)
    for row in rows:
        past = started.tokens[row, : started.length[row]]
        state, _ = tiny.oracle.run(past)
        path = max(leaf_paths(tree, row), key=len)
        _, outs = tiny.oracle.run(tree.token[row, path], state)
        want = np.stack([out.logits for out in outs])
        np.testing.assert_allclose(logits[row, path], want, rtol=0, atol=CLOSE)


def test_the_widest_pass_equals_the_oracle(tiny, started):
    """As many nodes as a budget may have; one tree is a chain of eight windows."""
    rng = np.random.default_rng(5)
    rows = len(started.length)
    parents = mixed_parents(rng, rows, MAX_BUDGET)
    parents[3] = np.arange(-1, MAX_BUDGET - 1)
    tree = trees_of(rng, parents, MAX_BUDGET, 64)
    logits = np.asarray(verify(tiny.params, tiny.cfg, started.cache, tree).logits)
    assert np.isfinite(logits[tree.live]).all()
    for row in (3, *rng.permutation(rows)[:5]):
        state, _ = tiny.oracle.run(started.tokens[row, : started.length[row]])
        last = int(np.flatnonzero(tree.live[row])[-1])
        for path in (max(leaf_paths(tree, row), key=len), ancestry(tree.parent[row], last)[::-1]):
            _, outs = tiny.oracle.run(tree.token[row, path], state)
            want = np.stack([out.logits for out in outs])
            np.testing.assert_allclose(logits[row, path], want, rtol=0, atol=CLOSE)


def test_a_chain_equals_the_tree_that_is_one(tiny, started):
    rng = np.random.default_rng(2)
    rows = len(started.length)
    tree = trees_of(rng, [range(-1, NODES - 1)] * rows, NODES, 64)
    full = np.full(rows, NODES, np.int32)
    out = verify(tiny.params, tiny.cfg, started.cache, tree)
    chain, committed = advance(tiny.params, tiny.cfg, started.cache, tree.token, full)
    np.testing.assert_allclose(out.logits, chain.logits, rtol=0, atol=CLOSE)
    path, _ = pad_paths([range(NODES)] * rows, NODES)
    assert state_error(commit(started.cache, out.rows, path, full), committed).max() < CLOSE


SMALL = 6
TREES_AT_ONCE = 10


@pytest.mark.slow
def test_all_trees_up_to_six_nodes_at_every_start(tiny):
    trees = [tree for nodes in range(1, SMALL + 1) for tree in all_parents(nodes)]
    started = start_at(tiny, POSITIONS * TREES_AT_ONCE)
    rng, worst = np.random.default_rng(3), np.zeros(3)
    trees += trees[: -len(trees) % TREES_AT_ONCE]
    for first in range(0, len(trees), TREES_AT_ONCE):
        some = trees[first : first + TREES_AT_ONCE]
        parents = [tree for tree in some for _ in POSITIONS]
        tree = trees_of(rng, parents, SMALL, 64)
        worst = np.maximum(worst, check_trees(tiny, started, tree, follow=range(SMALL)))
    print("largest differences", worst)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"compress_ratios": [0, 4, 8, 4], "sliding_window": 8}, id="window 8"),
        pytest.param({"compress_ratios": [16, 4, 0], "sliding_window": 5}, id="window 5"),
        pytest.param({"compress_ratios": [128, 4], "sliding_window": 128}, id="released ratios"),
        pytest.param({"compress_ratios": [2, 3, 1], "sliding_window": 1}, id="smallest"),
    ],
)
def test_random_trees_of_other_models_at_every_start(tmp_path, overrides):
    model = random_model(tmp_path, {"index_topk": 2} | overrides)
    started = start_at(model, POSITIONS)
    rng, worst = np.random.default_rng(4), np.zeros(3)
    for _ in range(3):
        tree = trees_of(rng, mixed_parents(rng, len(POSITIONS), NODES), NODES, 64)
        worst = np.maximum(worst, check_trees(model, started, tree, follow=range(0, NODES, 3)))
    print("largest differences", worst)
