"""Laws of the model that the oracle must keep, checked without recorded outputs."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from tests.oracle import Mtp, Oracle, mtp_logits, random_checkpoint, save_checkpoint
from tests.oracle.basic import rotate
from tests.oracle.compressor import pool

ALL_KINDS = {
    "compress_ratios": [0, 4, 8, 0],
    "num_nextn_predict_layers": 1,
    "index_topk": 2,
}


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(64, size=length)


def logits_of(oracle: Oracle, tokens) -> np.ndarray:
    return np.stack([out.logits for out in oracle.run(tokens)[1]])


# Which earlier tokens a query sees, in one layer of window 2 or 4. Token 4 is changed.
@pytest.mark.parametrize(
    ("ratio", "window", "seen_at"),
    [
        pytest.param(0, 4, [4, 5, 6, 7], id="sliding: while in the window"),
        pytest.param(8, 2, [4, 5, *range(7, 24)], id="hca: from its entry's last token on"),
        pytest.param(4, 2, [4, 5, *range(7, 24)], id="csa: from its entry's last token on"),
    ],
)
def test_a_token_is_seen_exactly_where_the_layer_kind_says(ratio, window, seen_at):
    overrides = {"compress_ratios": [ratio], "sliding_window": window, "index_topk": 8}
    oracle = Oracle(*random_checkpoint(overrides, seed=1))
    tokens = tokens_of(24)
    changed = tokens.copy()
    changed[4] = (tokens[4] + 1) % 64
    differs = np.abs(logits_of(oracle, tokens) - logits_of(oracle, changed)).max(axis=1) > 0
    assert list(np.flatnonzero(differs)) == seen_at


def test_a_csa_token_feeds_its_own_entry_and_the_next():
    oracle = Oracle(*random_checkpoint({"compress_ratios": [4]}, seed=1))
    tokens = tokens_of(24)
    changed = tokens.copy()
    changed[4] = (tokens[4] + 1) % 64
    entries = [oracle.run(t)[0].layers[0].compressed.entries for t in (tokens, changed)]
    differs = (entries[0] != entries[1]).any(axis=1)
    assert list(np.flatnonzero(differs)) == [1, 2]


@pytest.mark.parametrize(
    ("branch", "expected"),
    [([(10, 2, 5), (20, 4, 7)], 135 / 12), ([(-10, 2, 6), (0, 8, 9)], 15 / 16)],
)
def test_pooling_by_hand(branch, expected):
    """Two windows of four with one channel; rows of (own value, own weight, value for next)."""
    first = [(0, 1, 8)] * 4
    second = [(1, 1, 4), (2, 1, 4), *branch]
    rows = np.array(first + second, dtype=float)
    values = rows[:, [2, 0]]
    gates = np.log(np.stack([np.ones(8), rows[:, 1]], axis=1))
    np.testing.assert_allclose(pool(values, gates, ratio=4), [expected], rtol=1e-14)
    np.testing.assert_allclose(pool(values[:4], gates[:4], ratio=4), [0.0], atol=1e-14)


def test_rotation_keeps_relative_positions_and_the_leading_dims():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 12))
    angles = np.array([1.0, 0.1, 0.01])
    near = rotate(query, 7 * angles) @ rotate(key, 3 * angles)
    far = rotate(query, 1007 * angles) @ rotate(key, 1003 * angles)
    np.testing.assert_allclose(near, far, rtol=1e-12)
    assert not np.isclose(near, query @ key)
    assert (rotate(query, 7 * angles)[:6] == query[:6]).all()


def test_branches_share_a_state_that_no_step_changes():
    oracle = Oracle(*random_checkpoint(ALL_KINDS, seed=2))
    prefix, left, right = tokens_of(22), tokens_of(9, seed=1), tokens_of(9, seed=2)
    state, _ = oracle.run(prefix)
    before = [array.copy() for array in arrays_of(state)]
    branches = {"left": (state, left), "right": (state, right)}
    outs = {"left": [], "right": []}
    for depth in range(9):
        for name, (branch, tokens) in branches.items():
            branch, out = oracle.step(branch, tokens[depth])
            branches[name] = (branch, tokens)
            outs[name].append(out.logits)
    for name, tokens in (("left", left), ("right", right)):
        alone = logits_of(oracle, np.concatenate([prefix, tokens]))[22:]
        assert (np.stack(outs[name]) == alone).all()
    assert all((a == b).all() for a, b in zip(before, arrays_of(state), strict=True))


def arrays_of(node) -> list[np.ndarray]:
    """All arrays of a nest of tuples and dataclasses."""
    if isinstance(node, np.ndarray):
        return [node]
    if dataclasses.is_dataclass(node):
        node = [getattr(node, field.name) for field in dataclasses.fields(node)]
    return [a for part in node for a in arrays_of(part)] if isinstance(node, list | tuple) else []


def test_the_mtp_block_sees_no_later_token():
    oracle = Oracle(*random_checkpoint(ALL_KINDS, seed=3))
    mtp, tokens = Mtp(oracle), tokens_of(20)
    streams = np.stack([out.streams[-1] for out in oracle.run(tokens)[1]])
    outs = mtp.run(streams, tokens)
    assert len(outs) == 19
    later = tokens.copy()
    later[12:] = 0
    again = mtp.run(streams, later)
    same = [(a.logits == b.logits).all() for a, b in zip(outs, again, strict=True)]
    assert same == [True] * 11 + [False] * 8


def kind_of(name: str) -> str:
    """A tensor's name without the numbers of its layer and expert."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


@pytest.fixture(scope="module")
def baseline():
    """A checkpoint, tokens, and what the main model and the MTP block make of them."""
    config, tensors = random_checkpoint(ALL_KINDS, seed=4)
    oracle, tokens = Oracle(config, tensors), tokens_of(24)
    outs = oracle.run(tokens)[1]
    streams = np.stack([out.streams[-1] for out in outs])
    drafts = mtp_logits(oracle, streams, tokens)
    return config, tensors, tokens, streams, np.stack([out.logits for out in outs]), drafts


KINDS = sorted({kind_of(name) for name in random_checkpoint(ALL_KINDS)[1]})


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_shows_in_the_logits(baseline, kind):
    """So a wrong or forgotten tensor cannot hide in tests on random checkpoints."""
    config, tensors, tokens, streams, logits, drafts = baseline
    rng = np.random.default_rng(0)

    def change(tensor: np.ndarray) -> np.ndarray:
        if tensor.dtype == np.int64:
            return (tensor + 1) % config["n_routed_experts"]
        return tensor * np.exp(rng.standard_normal(tensor.shape))

    other = Oracle(
        config, {name: change(t) if kind_of(name) == kind else t for name, t in tensors.items()}
    )
    if kind.startswith("mtp."):
        difference = mtp_logits(other, streams, tokens) - drafts
    else:
        difference = logits_of(other, tokens) - logits
    assert np.abs(difference).max() > 1e-2


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="default"),
        pytest.param(ALL_KINDS, id="all kinds"),
        pytest.param(
            {"compress_ratios": [16, 4], "hc_mult": 2, "hidden_size": 48}, id="two streams"
        ),
        pytest.param(
            {"n_routed_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}, id="experts"
        ),
    ],
)
def test_random_checkpoints_keep_their_promises(overrides):
    config, tensors = random_checkpoint(overrides, seed=6)
    oracle = Oracle(config, tensors)
    tokens = tokens_of(48)
    outs = oracle.run(tokens)[1]
    assert 0.8 < np.std([out.logits for out in outs]) < 1.3
    assert min(out.margin for out in outs) > 1e-6
    for before, after in pairwise(np.stack([out.streams for out in outs], axis=1)):
        assert 0.2 < np.std(after - before) < 2.0
    unclamped = Oracle(config | {"swiglu_limit": 1e9}, tensors)
    difference = logits_of(unclamped, tokens) - [out.logits for out in outs]
    assert np.abs(difference).max() > 0.1
    again = random_checkpoint(overrides, seed=6)[1]
    assert all((tensors[name] == again[name]).all() for name in tensors)


def test_a_saved_checkpoint_loads_as_the_same_model(tmp_path):
    config, tensors = random_checkpoint(ALL_KINDS, seed=7)
    save_checkpoint(tmp_path / "model", config, tensors)
    loaded = Oracle.load(tmp_path / "model")
    assert (logits_of(loaded, [3, 1, 4]) == logits_of(Oracle(config, tensors), [3, 1, 4])).all()


def test_faults_are_named():
    config, tensors = random_checkpoint(seed=0)
    broken = dict(tensors, extra=np.zeros(1)) | {"norm.weight": np.zeros(3)}
    del broken["head.weight"]
    with pytest.raises(ValueError, match=r"missing head.weight; unexpected extra; norm.weight has"):
        Oracle(config, broken)
    with pytest.raises(ValueError, match="no such configuration key: hiden_size"):
        random_checkpoint({"hiden_size": 16})
    with pytest.raises(ValueError, match=r"compress_ratios has 4 entries, expected .*3"):
        random_checkpoint({"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="no MTP block"):
        Mtp(Oracle(config, tensors))
