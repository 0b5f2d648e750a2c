"""The indexer's Hopper kernels compiled for GPUs that are not here, at the conformance shapes."""

from __future__ import annotations

import functools

import jax
import pytest

from jaxspec.plan.compile import compile_all
from jaxspec.plan.program import Job, Program
from jaxspec.plan.targets import TARGETS, missing
from pallas_kernels.index_topk import gpu
from pallas_kernels.index_topk.gpu_plan import MOST_NODES
from tests.pallas_kernels.cases_index_topk import CASES, TRUE_CASES, avals, make

EVERY = {case.name: case for case in [*CASES, *TRUE_CASES]}


def program(name: str, dtype: str, choices: dict[str, object]) -> Program:
    """The call of one case; true sizes are never made."""
    case = EVERY[name]
    operands = avals(case, dtype) if case in TRUE_CASES else make(case, dtype)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(operands))
    return Program(functools.partial(gpu.index_topk, topk=case.topk, **choices), shapes)


def compile_cases(cases: list[tuple[str, str, dict[str, object]]]) -> None:
    target = TARGETS["h200"]
    if (lack := missing(target)) is not None:
        pytest.skip(lack)
    jobs = [
        Job(
            f"{name} {dtype} {choices}",
            "tests.pallas_kernels.test_index_topk_aot:program",
            {"name": name, "dtype": dtype, "choices": choices},
        )
        for name, dtype, choices in cases
    ]
    for outcome in compile_all(target, jobs):
        assert outcome.compiles, outcome
        assert all(kernel.spilled == 0 for kernel in outcome.kernels), outcome


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["fused", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_every_conformance_shape_compiles(dtype: str, mode: str) -> None:
    trees = [case for case in EVERY.values() if mode == "split" or case.nodes <= MOST_NODES]
    compile_cases([(case.name, dtype, {"mode": mode}) for case in trees])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_clusters_of_every_size_compile() -> None:
    """16 blocks too, which not every device runs: Mosaic GPU asks the driver to allow them."""
    sizes = [{"splits": parts, "groups": 2} for parts in (1, 2, 4, 8, 16)]
    compile_cases([("flash-64k-b1", "bfloat16", choices) for choices in sizes])
