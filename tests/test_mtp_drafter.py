"""Drafting with the MTP block against running the block row by row on one path at a time.

The streams are random: what the block does with them does not depend on the model that made them.
A sequence starts at every position up to twice the window, its ring filled row by row.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import extend_layer, init_layer
from jaxspec.draft import Drafter, mtp
from jaxspec.draft.grow import TreeShape
from jaxspec.draft.mtp import MtpState, make_drafter
from jaxspec.draft.plain import PLAIN
from jaxspec.engine import select_drafter
from jaxspec.errors import UsageError
from jaxspec.model.mtp import mtp_logits, run_mtp
from jaxspec.sample import Sampling, perturb
from jaxspec.settings import RunConfig
from jaxspec.tree import NO_PARENT, DraftTree, TokenBlock
from jaxspec.verify import VerifyResult
from tests.conftest import TINY
from tests.random_trees import ancestry, depths, leaf_paths, pad_paths, random_parents
from tests.serial import Model, compiled, random_model
from tests.states import same_bits

CLOSE = 1e-5
WINDOW = 8
STARTS = np.arange(1, 2 * WINDOW + 4, dtype=np.int32)
BATCH = len(STARTS)
TREE = TreeShape(budget=8, levels=4, width=2, top_k=3, sharpness=1.5)
CHAIN = TreeShape.chain(5)
ALL = dataclasses.replace(TREE, budget=22)
"""Of the same candidates all: 3 children of the root, then 2 x 3 at each of three levels."""


class Started(NamedTuple):
    """Sequences of `length [B]` committed rows."""

    state: MtpState
    length: np.ndarray
    root: np.ndarray
    seed: np.ndarray


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    sizes = {"compress_ratios": [0, 0], "num_nextn_predict_layers": 1, "sliding_window": WINDOW}
    return random_model(tmp_path_factory.mktemp("mtp"), TINY | sizes)


@compiled
def add_row(params, cfg, layer, length, streams, token):
    """One more row a sequence: its output streams and the ring that has it."""
    block = TokenBlock.chain(token[:, None], length)
    out = run_mtp(params, cfg, streams[:, None], layer, block)
    one = jnp.ones_like(length)
    return out.streams[:, 0], extend_layer(layer, out.attended.rows, None, length, one)


@compiled
def read(params, cfg, streams, sampling, seed, position):
    """Draft log-probabilities `[B, V]` of the token at `position` after one row's streams."""
    logits = mtp_logits(params, cfg, streams[:, None])
    return jax.nn.log_softmax(perturb(logits, sampling, seed, position[:, None])[:, 0])


def pick(take: np.ndarray, new, old):
    """Row by row of B, `new` where `take` and `old` elsewhere."""
    return jax.tree.map(
        lambda a, b: np.where(take.reshape(-1, *([1] * (a.ndim - 1))), a, b),
        *jax.device_get((new, old)),
    )


def streams_of(rng: np.random.Generator, cfg, *shape: int) -> np.ndarray:
    return rng.normal(size=(*shape, cfg.hc_mult, cfg.hidden_size)).astype(np.float32)


@pytest.fixture(scope="module")
def started(model) -> Started:
    cfg, rng = model.cfg, np.random.default_rng(0)
    layer = init_layer(cfg, 0, BATCH, 64)
    # Where nothing is committed nothing may be read.
    layer = jax.device_get(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), layer))
    streams = np.zeros((BATCH, cfg.hc_mult, cfg.hidden_size), np.float32)
    for t in range(STARTS.max()):
        token = rng.integers(cfg.vocab_size, size=BATCH).astype(np.int32)
        length = np.minimum(t, STARTS)
        new = add_row(model.params, cfg, layer, length, streams_of(rng, cfg, BATCH), token)
        streams, layer = pick(t < STARTS, new, (streams, layer))
    root = rng.integers(cfg.vocab_size, size=BATCH).astype(np.int32)
    seed = rng.integers(2**32, size=BATCH).astype(np.uint32)
    return Started(MtpState(layer, streams), STARTS, root, seed)


def draft(model: Model, started: Started, sampling: Sampling, shape: TreeShape, live) -> DraftTree:
    """What the drafter proposes, on the host."""
    proposed = _propose(
        model.params,
        started.state,
        started.root,
        started.length,
        (sampling, started.seed),
        live,
        drafter=make_drafter(model.cfg, shape),
    )
    return jax.device_get(proposed)


def _run_propose(params, state, root, length, choice, live, *, drafter: Drafter) -> DraftTree:
    def score(logits, position):
        return perturb(logits, *choice, position)

    return drafter.propose(params, state, root, length, live=live, score=score)


_propose = jax.jit(_run_propose, static_argnames="drafter")


def serial_scores(model, started: Started, sampling, tree: DraftTree) -> np.ndarray:
    """Draft log-probabilities of each node's children, `[B, N, V]`, every path run on its own.

    The rows of a path go into the ring one after the other, as if it were all that there is.
    """
    params, cfg = model.params, model.cfg
    nodes = tree.token.shape[1]
    scores = np.full((BATCH, nodes, cfg.vocab_size), np.nan, np.float32)
    depth = np.stack([depths(parent) for parent in tree.parent])

    def scores_after(streams, ahead: int) -> np.ndarray:
        position = started.length + ahead
        return np.asarray(read(params, cfg, streams, sampling, started.seed, position))

    scores[:, 0] = scores_after(started.state.streams, 1)
    for node in range(1, nodes):
        streams, layer = started.state.streams, started.state.layer
        paths = [ancestry(parent, node)[::-1] for parent in tree.parent]
        for d in range(1, depth[:, node].max() + 1):
            on = depth[:, node] >= d
            at = np.array([path[min(d, len(path) - 1)] for path in paths])
            token = tree.token[np.arange(BATCH), at]
            length = started.length + d - 1
            new = add_row(params, cfg, layer, length, streams, token)
            streams, layer = pick(on, new, (streams, layer))
            after = scores_after(streams, d + 1)
            last = depth[:, node] == d
            scores[last, node] = after[last]
    return scores


MIXED = [(0.0, 0.7, 1.3)[row % 3] for row in range(BATCH)]


@pytest.mark.parametrize("shape", [TREE, ALL, CHAIN], ids=["tree", "whole tree", "chain"])
def test_scores_of_a_draft_are_those_of_its_paths_run_one_by_one(model, started, shape):
    sampling = Sampling.create(BATCH, temperature=MIXED)
    live = np.ones(BATCH, bool)
    tree = draft(model, started, sampling, shape, live)
    check_tree(model, started, sampling, tree, shape)
    deepest = [depths(parent).max() for parent in tree.parent]
    assert max(deepest) == shape.levels
    if shape is CHAIN:
        chain = np.arange(NO_PARENT, shape.budget - 1)
        assert np.array_equal(tree.parent, np.broadcast_to(chain, tree.parent.shape))
    else:  # branches below the root's children too
        inner = [np.bincount(parent[1:], minlength=8)[1:].max() for parent in tree.parent]
        assert max(inner) > 1


def check_tree(model, started, sampling, tree: DraftTree, shape: TreeShape) -> None:
    """Tokens are the best children of their parents, scores the sums of their sharpened edges."""
    assert np.array_equal(tree.token[:, 0], started.root)
    assert tree.live.all()
    sharp = shape.sharpness * serial_scores(model, started, sampling, tree)
    edges = sharp - np.logaddexp.reduce(sharp, axis=-1, keepdims=True)
    for row in range(BATCH):
        parent, token, score = tree.parent[row], tree.token[row], tree.score[row]
        want = np.zeros(len(parent), np.float32)
        for node in range(1, len(parent)):
            want[node] = want[parent[node]] + edges[row, parent[node], token[node]]
            children = token[1:][parent[1:] == node].tolist()
            best = np.argsort(-edges[row, node], kind="stable")[: shape.top_k].tolist()
            assert children == best[: len(children)]
        np.testing.assert_allclose(score, want, rtol=0, atol=CLOSE * 4)


def test_a_sequence_that_is_not_live_drafts_nothing_and_disturbs_none(model, started):
    sampling = Sampling.create(BATCH, temperature=MIXED)
    live = np.random.default_rng(1).random(BATCH) < 0.5
    spoilt = dataclasses.replace(
        started.state, streams=pick(live, started.state.streams, started.state.streams * np.nan)
    )
    every = draft(model, started, sampling, TREE, np.ones(BATCH, bool))
    some = draft(model, started._replace(state=spoilt), sampling, TREE, live)
    assert not some.live[~live].any()
    for got, want in zip(jax.tree.leaves(some), jax.tree.leaves(every), strict=True):
        assert same_bits(got[live], want[live])


def passes(
    model, started, shape: TreeShape, live, monkeypatch
) -> tuple[list[np.ndarray], DraftTree]:
    """Which rows each pass of the block computes, `[B, width]` of every pass, and the draft."""
    seen = []

    def watched(params, cfg, streams, layer, block, **choices):
        jax.debug.callback(lambda valid: seen.append(np.array(valid)), block.valid)
        return run_mtp(params, cfg, streams, layer, block, **choices)

    monkeypatch.setattr(mtp, "run_mtp", watched)
    choice = Sampling.create(BATCH), started.seed
    arguments = model.params, started.state, started.root, started.length, choice, live
    run = partial(_run_propose, drafter=make_drafter(model.cfg, shape))  # traced by no other test
    tree = jax.device_get(jax.jit(run)(*arguments))
    jax.effects_barrier()
    return seen, tree


def test_a_sequence_that_is_not_live_reaches_no_expert(model, started, monkeypatch):
    """Its rows are not valid at any level of the draft, and of every other one some are."""
    live = np.random.default_rng(2).random(BATCH) < 0.5
    seen, _ = passes(model, started, ALL, live, monkeypatch)
    assert len(seen) == ALL.levels - 1
    for valid in seen:
        np.testing.assert_array_equal(valid.any(1), live)


def test_a_draft_ends_where_no_sequence_needs_another_level(model, started, monkeypatch):
    """A random block is unsure of every token: a tree of 5 has the root's children and one more."""
    few = dataclasses.replace(ALL, budget=5)
    live = np.arange(BATCH) % 2 == 0
    whole = draft(model, started, Sampling.create(BATCH), ALL, live)
    seen, tree = passes(model, started, few, live, monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, tree, jax.tree.map(lambda x: x[:, :5], whole))
    deepest = max(depths(parent).max() for parent in tree.parent[live])
    assert len(seen) == deepest < few.levels - 1
    for valid in seen:
        assert not valid[~live].any()
    assert not passes(model, started, few, live & False, monkeypatch)[0]


# ------------------------------------------------------------------------------------- observation


@compiled
def observe(params, cfg, state, block, features, result) -> MtpState:
    return make_drafter(cfg, TREE).observe(params, state, block, features, result)


def observe_serially(model, started: Started, token, streams, count) -> MtpState:
    """The state after `count [B]` rows `token [B, P]`, `streams [B, P, S, E]`, added singly."""
    last, layer = started.state.streams, started.state.layer
    for place in range(int(count.max())):
        new = add_row(
            model.params,
            model.cfg,
            layer,
            started.length + place,
            streams[:, place],
            token[:, place],
        )
        last, layer = pick(place < count, new, (last, layer))
    return MtpState(layer, last)


def check_state(got: MtpState, want: MtpState, length: np.ndarray, count: np.ndarray) -> None:
    """Equal, and what the accepted rows did not write is as it was, NaN included."""
    got, want = jax.device_get((got, want))
    np.testing.assert_allclose(got.streams, want.streams, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(got.layer.ring, want.layer.ring, rtol=0, atol=CLOSE)
    step = (np.arange(WINDOW) - length[:, None]) % WINDOW
    untouched = step >= count[:, None]
    assert same_bits(got.layer.ring[untouched], want.layer.ring[untouched])
    none = count == 0
    assert same_bits(got.streams[none], want.streams[none])


@pytest.mark.parametrize("shift", range(6))
def test_observing_a_path_is_running_its_rows_singly(model, started, shift):
    """Every count up to the depth and one, at every start; the drafted rest leaves no trace."""
    cfg, rng = model.cfg, np.random.default_rng(shift)
    nodes, places = 9, 6
    parent = np.stack([spine(rng, nodes, places) for _ in range(BATCH)])
    token = rng.integers(cfg.vocab_size, size=(BATCH, nodes)).astype(np.int32)
    live = np.ones(parent.shape, bool)
    tree = DraftTree(token, parent, np.zeros(parent.shape, np.float32), live)
    longest = [max(leaf_paths(tree, row), key=len) for row in range(BATCH)]
    count = np.array([(row + shift) % (places + 1) for row in range(BATCH)], np.int32)
    path, _ = pad_paths([nodes_of[:n] for nodes_of, n in zip(longest, count, strict=True)], places)
    bonus = rng.integers(cfg.vocab_size, size=BATCH).astype(np.int32)
    features = streams_of(rng, cfg, BATCH, nodes)
    block = TokenBlock.tree(tree, started.length)
    result = VerifyResult(path, count, bonus)
    got = observe(model.params, cfg, started.state, block, features, result)
    row = np.arange(BATCH)[:, None]
    following = np.concatenate([token[row, path][:, 1:], bonus[:, None]], axis=1)
    following[np.arange(BATCH), np.maximum(count - 1, 0)] = bonus
    want = observe_serially(model, started, following, features[row, path], count)
    check_state(got, want, started.length, count)


def spine(rng: np.random.Generator, nodes: int, places: int) -> np.ndarray:
    """Parents of a tree that is exactly `places - 1` deep."""
    while True:
        parent = random_parents(rng, nodes)
        if depths(parent).max() == places - 1:
            return parent


@pytest.mark.parametrize("chunk", [3, 8, 13])
def test_observing_a_chunk_of_a_prompt(model, started, chunk):
    """A chain block, longer and shorter than the window, of all valid lengths with 0."""
    cfg, rng = model.cfg, np.random.default_rng(chunk)
    token = rng.integers(cfg.vocab_size, size=(BATCH, chunk)).astype(np.int32)
    count = (np.arange(BATCH) * 5 % (chunk + 1)).astype(np.int32)
    bonus = rng.integers(cfg.vocab_size, size=BATCH).astype(np.int32)
    features = streams_of(rng, cfg, BATCH, chunk)
    path = np.broadcast_to(np.arange(chunk, dtype=np.int32), token.shape)
    block = TokenBlock.chain(token, started.length, count)
    result = VerifyResult(path, count, bonus)
    got = observe(model.params, cfg, started.state, block, features, result)
    following = np.concatenate([token[:, 1:], bonus[:, None]], axis=1)
    following[np.arange(BATCH), np.maximum(count - 1, 0)] = bonus
    want = observe_serially(model, started, following, features, count)
    assert np.isnan(want.layer.ring[started.length + count < WINDOW]).any()
    check_state(got, want, started.length, count)


def test_drafters_of_equal_arguments_are_equal_and_share_a_state(model):
    assert make_drafter(model.cfg, TREE) == make_drafter(model.cfg, TREE)
    assert hash(make_drafter(model.cfg, TREE)) == hash(make_drafter(model.cfg, TREE))
    assert make_drafter(model.cfg, TREE) != make_drafter(model.cfg, CHAIN)
    assert make_drafter(model.cfg, TREE).init == make_drafter(model.cfg, CHAIN).init


@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_method_and_budget_choose_the_drafter(model, budget):
    for method, grow in (("linear", TreeShape.chain), ("tree", TreeShape.tree)):
        run = RunConfig(method=method, budget=budget, impl="ref")
        want = PLAIN if budget == 1 else make_drafter(model.cfg, grow(budget), impl="ref")
        assert select_drafter(model.cfg, run) == want
    assert select_drafter(model.cfg, RunConfig(method="none", budget=budget)) == PLAIN


@pytest.mark.parametrize(
    ("ratios", "words"), [((), "no MTP block"), ((4,), "ratio 4"), ((8,), "ratio 8")]
)
def test_models_that_cannot_draft_are_refused(model, ratios, words):
    with pytest.raises(UsageError, match=words):
        make_drafter(dataclasses.replace(model.cfg, mtp_ratios=ratios), TREE)
