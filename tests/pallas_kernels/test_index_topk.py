"""The indexer's selection against a sort in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_topk import cpu, index_topk, ref
from pallas_kernels.index_topk.op import IndexKeys

CHOOSERS = {
    name: jax.jit(function, static_argnums=1)
    for name, function in [("ref", ref.largest), ("cpu", cpu.largest)]
}
select = jax.jit(index_topk, static_argnames=("topk", "impl"))


def sorted_choice(scores: np.ndarray, count: int) -> np.ndarray:
    chosen = np.zeros(scores.shape, bool)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


@pytest.mark.parametrize("name", CHOOSERS)
def test_the_largest_are_chosen_and_of_equal_ones_the_first(name: str) -> None:
    rng = np.random.default_rng(0)
    for shape in [(1, 1, 7), (2, 5, 33), (3, 4, 64)]:
        count = int(rng.integers(1, shape[-1]))
        for values in (
            rng.standard_normal(shape),
            rng.integers(-2, 3, shape),  # ties
            rng.choice([-0.0, 0.0, 1.0, float(ref.LOWEST)], shape),  # equal zeros, masked ones
            rng.standard_normal(shape) * 1e-30,
        ):
            scores = values.astype(np.float32)
            got = np.asarray(CHOOSERS[name](jnp.asarray(scores), count))
            np.testing.assert_array_equal(got, sorted_choice(scores, count))


def unpack(words: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[..., :size].astype(bool)


def pack(mask: np.ndarray) -> np.ndarray:
    padded = np.pad(mask, [(0, 0), (0, 0), (0, -mask.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("sizes", [(5, 9, 3, 4), (40, 33, 6, 8), (3, 2, 2, 9)], ids=str)
def test_each_node_selects_its_best_visible_entries(sizes: tuple[int, ...], impl: str) -> None:
    capacity, own, nodes, topk = sizes
    rng = np.random.default_rng(sum(sizes))
    for _ in range(3):
        q, keys = rng.standard_normal((2, nodes, 2, 8)), rng.standard_normal((2, capacity, 8))
        weight, mine = rng.standard_normal((2, nodes, 2)), rng.standard_normal((2, own, 8))
        committed = rng.integers(0, capacity + 1, 2).astype(np.int32)
        sees = rng.random((2, nodes, own)) < 0.6
        every = np.concatenate([keys, mine], axis=1)
        dots = np.maximum(np.einsum("bnhc,bmc->bnhm", q, every), 0)
        scores = (dots * weight[..., None]).sum(2)
        there = np.broadcast_to(
            (np.arange(capacity) < committed[:, None])[:, None], (*sees.shape[:2], capacity)
        )
        visible = np.concatenate([there, sees], axis=-1)
        scores = np.where(visible, scores, -1e30)
        want = sorted_choice(scores, min(topk, scores.shape[-1])) & visible
        keys[np.arange(capacity) >= committed[:, None]] = np.nan
        narrow = [jnp.asarray(x, jnp.float32) for x in (q, weight, keys, mine)]
        entries = IndexKeys(narrow[2], jnp.asarray(committed), narrow[3], jnp.asarray(pack(sees)))
        chosen, own_chosen = select(*narrow[:2], entries, topk=topk, impl=impl)
        np.testing.assert_array_equal(unpack(np.asarray(chosen), capacity), want[..., :capacity])
        np.testing.assert_array_equal(unpack(np.asarray(own_chosen), own), want[..., capacity:])
