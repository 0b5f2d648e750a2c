"""Parts of one softmax joined by a cluster: who joins what, and that the sum is right.

The interpreter has no clusters. What it cannot show is held here: pieces are a partition, and every
block reads every part once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import SMS
from pallas_kernels.tree_attention.gpu_cluster import (
    PIECE,
    SIZES,
    check_splits,
    join_in_memory,
    part_types,
    peer_of,
    piece_at,
    pieces_of,
    turns_of,
)
from pallas_kernels.tree_attention.gpu_layout import LOG2E, LOWEST, scratch_types, warpgroups
from pallas_kernels.tree_attention.gpu_tiles import LEAST_STEPS, default_splits

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
