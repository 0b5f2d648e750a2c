"""The indexer's Hopper kernels against the definition, in the interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_topk import gpu
from pallas_kernels.index_topk.gpu_choice import BLOCK, choose
from pallas_kernels.index_topk.packed import unpack_keys
from tests.pallas_kernels.cases_index_topk import CASES, Case, check, make, unpack

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this jax's interpreter of GPU kernels transposes no operand of wgmma; 0.12's does",
)
BY_NAME = {case.name: case for case in CASES}


def hold(case: Case, dtype: str, **keywords: Any) -> None:
    # The interpreter runs a warpgroup as a thread, and needs a core for each of them.
    keywords = {"groups": 1, "interpret": plgpu.InterpretGPUParams(detect_races=True)} | keywords

    def run(*operands: Any) -> tuple[jax.Array, jax.Array]:
        return gpu.index_topk(*operands, topk=case.topk, **keywords)

    operands = make(case, dtype)
    check(case, operands, jax.jit(run)(*operands))


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nano-ties", "bfloat16"),
        ("nano-few-entries", "bfloat16"),
        ("nano-one-node", "bfloat16"),
        ("nano-one-node", "fp8"),
        ("nano-one-entry", "fp8"),
    ],
)
def test_a_few_cases_agree_with_the_definition(name: str, dtype: str) -> None:
    hold(BY_NAME[name], dtype)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_agrees_with_the_definition(case: Case, dtype: str) -> None:
    hold(case, dtype)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("keywords", [{"groups": 2}, {"splits": 1}, {"splits": 3}], ids=str)
def test_who_does_the_work_changes_nothing(keywords: dict[str, int]) -> None:
    hold(BY_NAME["nano-tree"]._replace(nodes=2, own=2), "bfloat16", **keywords)


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
