"""The indexer's Hopper kernels against the definition, in the interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_topk import gpu, gpu_plan
from pallas_kernels.index_topk.gpu_choice import BLOCK, choose
from pallas_kernels.index_topk.gpu_exchange import Exchange
from pallas_kernels.index_topk.gpu_fused import Part
from pallas_kernels.index_topk.gpu_plan import MOST_NODES, UNIT, Plan, Sizes, how
from pallas_kernels.index_topk.packed import unpack_keys
from tests.pallas_kernels.cases_index_topk import (
    CASES,
    TRUE_CASES,
    Case,
    avals,
    check,
    make,
    unpack,
)

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this jax's interpreter of GPU kernels transposes no operand of wgmma, and knows no "
    "barriers of clusters; 0.12's does both",
)
BY_NAME = {case.name: case for case in CASES}
UNITS = Case("units", 2, 4, 32, 9000, (9000, 4097, 1), 2, 40, whole=True)
"""Entries of three units, which blocks of a cluster share, and sequences that fill one or two."""


def hold(case: Case, dtype: str, **keywords: Any) -> None:
    # The interpreter runs a warpgroup as a thread, and needs a core for each of them.
    keywords = {"groups": 1, "interpret": plgpu.InterpretGPUParams(detect_races=True)} | keywords

    def run(*operands: Any) -> tuple[jax.Array, jax.Array]:
        return gpu.index_topk(*operands, topk=case.topk, **keywords)

    operands = make(case, dtype)
    check(case, operands, jax.jit(run)(*operands))


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        ("nano-ties", "bfloat16", "fused"),
        ("nano-few-entries", "bfloat16", "auto"),
        ("nano-one-node", "fp8", "split"),
    ],
)
def test_a_few_cases_agree_with_the_definition(name: str, dtype: str, mode: str) -> None:
    hold(BY_NAME[name], dtype, mode=mode)


@interpreted
def test_a_cluster_agrees_with_the_definition() -> None:
    hold(UNITS._replace(nodes=1, own=1, committed=(4500,)), "bfloat16", mode="fused", splits=2)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_agrees_with_the_definition(case: Case, dtype: str, mode: str) -> None:
    if mode == "fused" and case.nodes > MOST_NODES:
        pytest.skip("one kernel is for trees")
    # Clusters of two at most: blocks are threads too.
    splits = min(2, -(-case.capacity // UNIT)) if mode == "fused" else 0
    hold(case, dtype, mode=mode, splits=splits)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("keywords", [{"groups": 2}, {"splits": 1}, {"splits": 3}], ids=str)
def test_who_does_the_work_of_two_kernels_changes_nothing(keywords: dict[str, int]) -> None:
    case = BY_NAME["nano-tree"]._replace(nodes=2, own=2)
    hold(case, "bfloat16", mode="split", **keywords)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_blocks_of_a_cluster_share_a_node(dtype: str) -> None:
    hold(UNITS, dtype, mode="fused", splits=2)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("together", [1, 2])
def test_warpgroups_share_a_node_or_have_one_each(
    monkeypatch: pytest.MonkeyPatch, splits: int, together: int
) -> None:
    """On a device of one multiprocessor two nodes share a pass over the keys."""
    if together == 2:
        monkeypatch.setattr(gpu_plan, "SMS", 1)
    case = BY_NAME["nano-ties"]._replace(nodes=2, own=2, committed=(200,))
    operands = make(case, "bfloat16")
    _, plan = how(operands.q, operands.entries, "fused", splits, 2)
    assert plan == Plan(together, splits, 2)
    hold(case, "bfloat16", mode="fused", splits=splits, groups=2)


@interpreted
@pytest.mark.slow
def test_counts_that_are_read_before_all_have_met_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Exchange, "meet", lambda self: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        hold(UNITS._replace(committed=(4500,)), "bfloat16", mode="fused", splits=2)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_entry_has_one_place(parts: int) -> None:
    """And places are within the memory of a block."""
    sizes = Sizes(1, 1, 8, 32, 9 * UNIT - 63, 70, False)
    plan = Plan(1, parts, 1)
    for count in (
        0,
        1,
        UNIT,
        UNIT + 1,
        3 * UNIT,
        5 * UNIT - 1,
        8 * UNIT,
        8 * UNIT + 1,
        9 * UNIT - 63,
    ):
        committed, own = np.zeros(sizes.capacity, int), np.zeros(sizes.own, int)
        for number in range(parts):
            part = Part(sizes, plan, jnp.int32(number), jnp.int32(count))
            row = jnp.arange(int(part.rows))
            assert len(row) <= plan.rows(sizes)
            for is_own, start, left in zip(*map(np.asarray, part.source(row)), strict=True):
                (own if is_own else committed)[start : start + min(64, max(0, left))] += 1
        assert (committed == (np.arange(sizes.capacity) < count)).all()
        assert (own == 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_trees_keep_their_scores_on_the_chip(dtype: str) -> None:
    for case in TRUE_CASES:
        operands = avals(case, dtype)
        _, plan = how(operands.q, operands.entries, "auto", 0, 0)
        assert (plan is not None) == (case.nodes <= MOST_NODES)
        read, written, fewest = gpu.traffic(*operands, topk=case.topk)
        if case.nodes <= 8:
            assert fewest <= read + written <= 1.15 * fewest
        split = gpu.traffic(*operands, topk=case.topk, mode="split")
        orders = 4 * case.nodes * case.batch * case.capacity
        assert split[1] - written >= orders * (plan is not None)


def test_scores_that_do_not_fit_go_through_device_memory() -> None:
    operands = avals(TRUE_CASES[0]._replace(capacity=1 << 20), "bfloat16")
    assert how(operands.q, operands.entries, "auto", 0, 0)[1] is None
    with pytest.raises(ValueError, match="use 'split'"):
        how(operands.q, operands.entries, "fused", 0, 0)
    with pytest.raises(ValueError, match="unknown mode"):
        how(operands.q, operands.entries, "both", 0, 0)


@pytest.mark.parametrize(
    ("mode", "splits", "groups", "words"),
    [
        ("auto", 16, 0, "up to 8 blocks, not 16; use 'split'"),
        ("fused", 9, 2, "up to 8 blocks, not 9"),
        ("split", -1, 0, "splits -1 and groups 0 must not be negative"),
        ("auto", 0, -2, "groups -2"),
    ],
)
def test_what_is_no_number_of_blocks_is_refused(mode: str, splits: int, groups: int, words: str):
    operands = avals(TRUE_CASES[0], "bfloat16")
    with pytest.raises(ValueError, match=words):
        how(operands.q, operands.entries, mode, splits, groups)


@interpreted
@pytest.mark.parametrize("is_own", [False, True])
def test_one_packed_source_beside_a_plain_one(is_own: bool) -> None:
    case = BY_NAME["nano-one-node"]
    packed = make(case, "fp8")
    entries = packed.entries
    plain = {
        "keys" if is_own else "own": unpack_keys(entries.keys if is_own else entries.own).astype(
            jnp.bfloat16
        )
    }
    mixed = packed._replace(entries=entries._replace(**plain))
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    chosen = gpu.index_topk(*mixed, topk=case.topk, groups=1, interpret=interpret)
    check(case, mixed, chosen)
    whole, _, _ = gpu.traffic(*packed, topk=case.topk)
    read, _, _ = gpu.traffic(*mixed, topk=case.topk)
    assert read > whole


@pytest.mark.parametrize("capacity", [1024, 1032, 1030])
def test_packed_keys_are_read_once_and_copied_only_for_alignment(capacity: int) -> None:
    case = BY_NAME["nano-tree"]._replace(capacity=capacity, committed=(1000, 1, 70))
    packed, plain = (gpu.traffic(*make(case, dtype), topk=32) for dtype in ("fp8", "bfloat16"))
    copied = 3 * capacity * {1024: 0, 1032: 1, 1030: 33}[capacity]
    saved = (1071 + 3 * case.own) * (2 * case.dim - case.dim - 1)
    written = packed[1] - copied
    assert packed[0] - copied == plain[0] - saved - (2 * 3 * capacity * 32 if capacity % 8 else 0)
    assert written == plain[1] - (2 * 3 * capacity * 32 if capacity % 8 else 0)
    assert packed[2] == plain[2] - saved


@interpreted
@pytest.mark.parametrize("topk", [1, 37, 1200])
def test_equals_are_chosen_by_index(topk: int) -> None:
    """Few distinct orders, more than one block of them, and places that hold anything."""
    rng = np.random.default_rng(topk)
    written, orders = BLOCK + 128, rng.integers(0, 3, (1, 1, 2 * BLOCK)).astype(np.uint32) << 30
    count = jnp.array([[0, written // 64]], jnp.int32)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    run = jax.jit(lambda x: choose(x, count, topk=topk, tile=64, groups=1, interpret=interpret))
    chosen = unpack(run(jnp.asarray(orders)), written)[0, 0]
    best = np.argsort(-orders[0, 0, :written].astype(np.int64), kind="stable")[:topk]
    wanted = np.isin(np.arange(written), best) & (orders[0, 0, :written] > 0)
    np.testing.assert_array_equal(chosen, wanted)


def test_what_the_kernels_cannot_take_is_said() -> None:
    case = BY_NAME["nano-tree"]
    with pytest.raises(ValueError, match="float32"):
        gpu.index_topk(*make(case, "float32"), topk=case.topk)
    with pytest.raises(ValueError, match="keys of 32, 64"):
        gpu.index_topk(*make(case._replace(dim=48), "bfloat16"), topk=case.topk)
