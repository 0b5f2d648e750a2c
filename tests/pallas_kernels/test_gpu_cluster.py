"""Parts of one softmax joined by a cluster: who joins what, and that the sum is right.

The interpreter has no clusters. What it cannot show is held here: pieces are a partition, every
block reads every part once, and what blocks do between two barriers joins their parts.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import SMS
from pallas_kernels.tree_attention import gpu_cluster
from pallas_kernels.tree_attention.gpu_cluster import (
    PIECE,
    SIZES,
    check_splits,
    join,
    join_in_memory,
    part_types,
    peer_of,
    piece_at,
    pieces_of,
    turns_of,
)
from pallas_kernels.tree_attention.gpu_layout import (
    LOG2E,
    LOWEST,
    Part,
    scratch_types,
    warpgroups,
)
from pallas_kernels.tree_attention.gpu_tiles import LEAST_STEPS, default_splits
from tests.pallas_kernels.fake_cluster import Memory, mosaic_gpu, pallas

WIDTHS = [64, 128, 192, 256, 384, 512]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("splits", SIZES)
def test_pieces_are_a_partition_of_the_columns(splits: int, width: int) -> None:
    joined = np.zeros(width, int)
    blocks = np.zeros(splits, int)
    for split in range(splits):
        for group in range(warpgroups(width)):
            for turn in range(turns_of(splits, width)):
                piece = piece_at(turn, split, group, splits, width)
                if piece < pieces_of(width):
                    assert piece % splits == split  # as it is without clusters
                    joined[piece * PIECE : (piece + 1) * PIECE] += 1
                    blocks[split] += 1
    assert (joined == 1).all()
    assert blocks.max() - blocks.min() <= 1


@pytest.mark.parametrize("splits", SIZES)
def test_every_part_is_read_once_by_each_block_and_at_each_turn(splits: int) -> None:
    read = np.array([[peer_of(k, turn, splits) for turn in range(splits)] for k in range(splits)])
    assert (np.sort(read, axis=1) == np.arange(splits)).all()
    assert (np.sort(read, axis=0) == np.arange(splits)[:, None]).all()
    assert (read[:, 0] == np.arange(splits)).all()


@pytest.mark.parametrize(
    ("splits", "width", "heads"),
    [(1, 64, 4), (2, 192, 128), (4, 512, 64), (8, 128, 128), (16, 64, 4)],
)
def test_joined_parts_are_one_softmax(splits: int, width: int, heads: int) -> None:
    """Keys cut anywhere, one part without any, scores far apart, against one softmax in float64."""
    rng = np.random.default_rng([splits, width, heads])
    batch, rows, keys = 2, 2 * max(heads, 64), 40
    scores = 30 * rng.standard_normal((batch, rows, keys))
    values = rng.standard_normal((batch, keys, width))
    sink = 20 * rng.standard_normal(heads)
    cuts = np.sort(rng.integers(0, keys + 1, (batch, splits - 1)))
    cuts = np.concatenate([np.zeros((batch, 1), int), cuts, np.full((batch, 1), keys)], axis=1)
    if splits > 1:
        cuts[:, 1] = 0  # the first part is empty
    owner = (np.arange(keys) >= cuts[:, 1:, None]).sum(1)
    mine = (owner[:, None] == np.arange(splits)[:, None])[:, :, None]
    own = np.where(mine, LOG2E * scores[:, None], -np.inf)
    top = np.maximum(own.max(-1), LOWEST / 2)  # of a block that has no key
    weights = np.exp2(own - top[..., None])
    out = weights @ values[:, None]
    repeated = np.tile(sink, max(1, 64 // heads))
    parts = [jnp.asarray(x, jnp.float32) for x in (out, top, weights.sum(-1), repeated)]
    got = jax.jit(join_in_memory)(*parts)
    sinks = np.tile(sink, rows // heads)[:, None]
    highest = np.maximum(scores.max(-1, keepdims=True), sinks)
    whole = np.exp(scores - highest)
    want = whole @ values / (whole.sum(-1, keepdims=True) + np.exp(sinks - highest))
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(want).max())


@pytest.mark.parametrize(("splits", "width"), [(2, 512), (4, 192), (8, 128)])
def test_blocks_join_between_two_barriers(
    monkeypatch: pytest.MonkeyPatch, splits: int, width: int
) -> None:
    """Every warpgroup in turn, in plain Python; together they write each column once."""
    rng = np.random.default_rng([splits, width])
    out, sink = rng.standard_normal((splits, 64, width)), rng.standard_normal(64)
    tops, totals = rng.standard_normal((splits, 64)), rng.uniform(1, 9, (splits, 64))
    weights = np.exp2(tops)
    want = np.einsum("sr,src->rc", weights, out)
    want /= ((weights * totals).sum(0) + np.exp2(sink))[:, None]
    joined, steps, axes = np.full((64, width), np.nan), [], {}

    def write(columns: slice, values: np.ndarray) -> None:
        assert np.isnan(joined[:, columns]).all()
        joined[:, columns] = values
        steps.append("write")

    plgpu = mosaic_gpu("split")
    read = plgpu.cluster_ref
    plgpu.cluster_ref = lambda *place: steps.append("read") or read(*place)
    lax = SimpleNamespace(axis_index=axes.get)
    for name, fake in {
        "pl": pallas(),
        "plgpu": plgpu,
        "jnp": np,
        "jax": SimpleNamespace(lax=lax),
        "along": lambda rows, columns: np.repeat(rows[:, None], columns, axis=1),
        "meet_cluster": lambda: steps.append("meet"),
    }.items():
        monkeypatch.setattr(gpu_cluster, name, fake)
    statistics = np.stack([tops, totals], axis=1)
    for split, group in itertools.product(range(splits), range(warpgroups(width))):
        steps.clear()
        axes |= {"split": split, "group": group}
        join(Part(Memory(out, split), Memory(statistics, split)), splits, sink, write)
        assert [i for i, step in enumerate(steps) if step == "meet"] == [0, len(steps) - 1]
    np.testing.assert_allclose(joined, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("splits", [-1, 0, 3, 5, 32])
def test_what_is_no_cluster_is_refused(splits: int) -> None:
    with pytest.raises(ValueError, match=f"one of 1, 2, 4, 8, 16; got {splits}"):
        check_splits(splits)


@pytest.mark.parametrize("fp8", [False, True])
def test_parts_take_no_more_memory_than_keys_and_weights_do(fp8: bool) -> None:
    """At the largest head dim, where memory is short."""

    def size(types: list) -> int:
        return sum(int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in types)

    _, keys, weights, *_ = scratch_types(2, 512, jnp.bfloat16, fp8)
    assert size(part_types(512)) <= size([keys, weights])


@pytest.mark.parametrize("width", [64, 512])
def test_default_clusters_fit_and_have_enough_to_do(width: int) -> None:
    for blocks in (1, 2, 3, 8, 16, 17, 24, 64, 128, 133, 512):
        for tiles in (1, 3, 12, 34, 132, 4096):
            splits = default_splits(blocks, tiles, width)
            check_splits(splits)
            steps = -(-tiles // warpgroups(width))
            assert splits <= 8
            assert splits == 1 or blocks * splits <= SMS
            assert splits == 1 or splits * LEAST_STEPS <= steps
            twice = 2 * splits
            assert twice > 8 or blocks * twice > SMS - SMS % 16 or twice * LEAST_STEPS > steps


def test_default_clusters_of_a_million_tokens() -> None:
    """HCA, 64 heads, trees of 8: 8 blocks a sequence and 132 tiles; one node is one block."""
    assert [default_splits(blocks, 132, 512) for blocks in (1, 8, 64, 512)] == [8, 8, 2, 1]
