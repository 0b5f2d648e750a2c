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
@pytest.mark.parametrize("name", ["nano-ties", "nano-few-entries", "nano-one-node"])
def test_a_few_cases_agree_with_the_definition(name: str) -> None:
    hold(BY_NAME[name], "bfloat16")


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
