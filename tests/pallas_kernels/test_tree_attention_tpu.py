"""The TPU kernel of tree attention, interpreted, against its definition."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import tpu
from tests.pallas_kernels.cases_tree_attention import (
    CASES,
    TPU_CASES,
    Arguments,
    Case,
    avals,
    bound,
    compare,
    draw,
    expected,
)
from tests.pallas_kernels.interpreted import run_interpreted

EVERY = {str(case): case for case in [*CASES, *TPU_CASES]}
QUICK = [
    "sliding-scratch-bfloat16",
    "hca-one-entry-bytes",
    "hca-ragged-capacity-bfloat16",
    "csa-decode-bfloat16",
    "csa-empty-words",
    "csa-few-entries-fp8",
    "csa-stream-words",
    "csa-gather-bytes",
    "nano-csa-float32",
    "nano-csa-narrow-bytes",
    "chain-hca-bfloat16",
    "chain-csa-gather-words",
]


def run(arguments: Arguments, **choices: Any) -> jax.Array:
    call, arrays = bound(functools.partial(tpu.tree_attention, **choices), arguments)
    return run_interpreted(call, *arrays)


def hold(case: Case, seed: int = 0, **choices: Any) -> None:
    arguments = draw(case, seed)
    compare(case, run(arguments, **choices), expected(arguments))


@pytest.mark.parametrize("name", QUICK)
def test_agrees_with_its_definition(name: str) -> None:
    hold(EVERY[name], seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_agrees_with_its_definition_at_all_shapes(name: str) -> None:
    hold(EVERY[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["csa-16-nodes", "csa-stream", "csa-gather", "chain-csa"])
@pytest.mark.parametrize("mode", ["stream", "gather"])
def test_both_plans_agree_with_the_definition_in_any_tiles(name: str, mode: str) -> None:
    case = EVERY[f"{name}-float32"] if f"{name}-float32" in EVERY else EVERY[f"{name}-bfloat16"]
    few = case._replace(dtype="float32", topk=6)
    hold(few, mode=mode, node_tile=16, entry_tile=128)


@pytest.mark.parametrize(
    "form", ["words", *(pytest.param(form, marks=pytest.mark.slow) for form in ("plain", "bytes"))]
)
def test_a_union_of_several_steps_is_fetched_while_the_last_one_is_used(form: str) -> None:
    # Steps of 128 entries: both buffers are used again, and the second sequence has no entries.
    case = EVERY["csa-gather-bfloat16"]._replace(
        nodes=3, topk=70, lengths=(1500, 3, 3000), form=form, capacity=760
    )
    hold(case, mode="gather", entry_tile=128)


def test_siblings_change_no_bit_of_a_streamed_result() -> None:
    arguments = draw(EVERY["csa-16-nodes-bfloat16"], seed=3)
    bits = np.asarray(arguments.own.row_bits[..., 0])  # node n sees the rows of these bits
    node = 3
    blind = bits >> node & 1 == 0
    assert blind[:, node + 1 :].any()
    rows, entries = arguments.own.rows, arguments.own.entries
    changed = arguments._replace(
        own=arguments.own._replace(
            rows=rows.at[:, node].set(rows[:, 0] * 3),
            entries=entries.at[:, node].set(entries[:, node] * 3),
        )
    )
    before, after = (np.asarray(run(x, mode="stream")) for x in (arguments, changed))
    np.testing.assert_array_equal(before[blind], after[blind])
    assert (before[~blind] != after[~blind]).any()


@pytest.mark.parametrize("name", ["sliding-tree", "hca-decode", "csa-decode"])
def test_what_cannot_be_is_refused_in_words(name: str) -> None:
    case = EVERY[f"{name}-bfloat16"]
    call = functools.partial(jax.eval_shape, *_bound(case, mode="gather"))
    if name == "csa-decode":
        call()
        odd = case._replace(capacity=case.capacity + 1)
        call = functools.partial(jax.eval_shape, *_bound(odd, mode="gather"))
    with pytest.raises(ValueError, match="'gather' cannot be"):
        call()
    with pytest.raises(ValueError, match="unknown mode 'scatter'"):
        jax.eval_shape(*_bound(case, mode="scatter"))
    for wrong in ({"entry_tile": 100}, {"entry_tile": 384}, {"node_tile": 0}):
        with pytest.raises(ValueError, match="must be"):
            jax.eval_shape(*_bound(case, **wrong))


def _bound(case: Case, **choices: Any) -> tuple[Any, ...]:
    call, arrays = bound(functools.partial(tpu.tree_attention, **choices), avals(case))
    return call, *arrays


def test_the_plan_is_the_one_that_reads_less() -> None:
    for name, gathers in [("csa-stream", False), ("csa-gather", True), ("hca-decode", False)]:
        arguments = draw(EVERY[f"{name}-bfloat16"])
        call, arrays = bound(tpu.tree_attention, arguments)
        text = str(jax.make_jaxpr(call)(*arrays))
        assert ("tree_attention_gather" in text) == gathers
        assert ("tree_attention_stream" in text) != gathers


def test_attention_in_float32_is_that_of_a_loop_over_keys() -> None:
    case = EVERY["csa-gather-bfloat16"]._replace(dtype="float32", topk=10, lengths=(1000,))
    arguments = draw(case)
    compare(case, run(arguments), _exact(arguments))


def _exact(arguments: Arguments) -> np.ndarray:
    """The same attention key by key in float64 NumPy, for plain entries and a tree."""
    q, sink, committed, own, position = arguments
    wide = [np.asarray(x, np.float64) for x in (q, sink, committed.ring, own.rows)]
    q, sink, ring, rows = wide
    out = np.zeros(q.shape)
    for b, n in np.ndindex(q.shape[:2]):
        at, length = int(position[b, n]), int(committed.length[b])
        keys = [ring[b, p % len(ring[b])] for p in range(max(0, at - len(ring[b]) + 1), length)]
        for m in range(rows.shape[1]):
            near = int(own.row_position[b, m]) > at - len(ring[b])
            if near and int(own.row_bits[b, n, m // 32]) >> m % 32 & 1:
                keys.append(rows[b, m])
        for c in range(length // committed.ratio):
            if int(committed.selected[b, n, c // 32]) >> c % 32 & 1:
                keys.append(np.asarray(committed.entries[b, c], np.float64))
        for j in range(own.entries.shape[1]):
            if int(own.entry_bits[b, n, j // 32]) >> j % 32 & 1:
                keys.append(np.asarray(own.entries[b, j], np.float64))
        scores = q[b, n] @ np.array(keys).T * q.shape[-1] ** -0.5
        top = np.maximum(scores.max(-1), sink)[:, None]
        weight = np.exp(scores - top)
        out[b, n] = weight @ np.array(keys)
        out[b, n] /= weight.sum(-1, keepdims=True) + np.exp(sink[:, None] - top)
    return out


def test_traffic_counts_what_the_schedule_moves() -> None:
    case = EVERY["hca-ragged-capacity-bfloat16"]._replace(lengths=(2399,))
    read, written, least = _traffic(case)
    # 599 entries are committed of 601: two tiles of 512, of which the cache ends the second.
    more, _, least_of_all = _traffic(case._replace(lengths=(2403,)))
    assert more == read
    assert least_of_all - least == case.dim * 2
    assert written == 4 * case.nodes * case.heads * case.dim
    short, _, _ = _traffic(case._replace(lengths=(2047,)))
    assert read - short == (601 - 512) * case.dim * 2


def test_traffic_counts_each_transfer_of_a_union_once() -> None:
    case = EVERY["csa-gather-bfloat16"]._replace(lengths=(3000,), topk=3)
    arguments = draw(case)
    alone = jnp.zeros_like(arguments.committed.selected)
    # Nodes 0 and 1 select entry 40, node 2 its neighbour, node 3 another; 900 is not committed.
    chosen = {0: [40], 1: [40], 2: [41], 3: [7, 900]}
    for node, places in chosen.items():
        for place in places:
            alone = alone.at[0, node, place // 32].set(jnp.uint32(1) << place % 32)
    none = jnp.zeros_like(alone)
    read, least = [], []
    for selected in (alone, none):
        sized = arguments._replace(committed=arguments.committed._replace(selected=selected))
        got = tpu.traffic(*sized[:4], position=sized.position)
        read, least = [*read, got[0]], [*least, got[2]]
    row = case.dim * 2
    assert read[0] - read[1] == 2 * 2 * row  # two transfers of a pair
    assert least[0] - least[1] == 3 * row


@pytest.mark.parametrize(
    ("context", "form", "most"),
    [
        (1 << 13, "plain", 1.15),
        (1 << 13, "bytes", 1.15),
        (1 << 16, "words", 1.15),
        (1 << 20, "words", 1.15),
    ],
)
def test_a_tree_moves_little_more_than_the_fewest_bytes(
    context: int, form: str, most: float
) -> None:
    for batch in (1, 8, 64):
        for ratio, topk in [(4, 512), (128, 0)]:
            case = Case(
                "flash", "tree", 8, (0,) * batch, ratio=ratio, capacity=context // ratio,
                topk=topk, heads=64, dim=512, window=128, form=form,
            )  # fmt: skip
            read, written, least = _traffic(case, abstract=True)
            assert (read + written) / least < most, (batch, ratio)


def test_traffic_counts_the_copy_of_fp8_entries_into_rows_of_bytes() -> None:
    case = EVERY["hca-decode-fp8"]
    copied, rows = _traffic(case), _traffic(case._replace(form="bytes"))
    entries = len(case.lengths) * case.capacity
    assert copied[0] - rows[0] == entries * (64 + 1 + 2 * 64)
    assert copied[1] - rows[1] == entries * (128 + 128)
    assert copied[2] == rows[2]


def _traffic(case: Case, abstract: bool = False) -> tuple[int, int, int]:
    arguments = avals(case) if abstract else draw(case)
    return tpu.traffic(*arguments[:4], position=arguments.position)
