"""The conformance shapes of the indexer and the experts, compiled for TPUs that are not here.

Those of tree attention, and of the kernels for GPUs, are in files of their own; the released sizes
of all in `test_plan_kernels.py`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import pytest

from jaxspec.plan import table
from jaxspec.plan.compile import compile_all
from jaxspec.plan.program import Job, Program
from jaxspec.plan.targets import TARGETS, missing
from tests.pallas_kernels import cases_grouped_matmul, cases_index_topk

TPUS = sorted(name for name, target in TARGETS.items() if target.kind == "tpu")


def program(op: str, case: str, kind: str) -> Program:
    """A kernel's call at the shapes of a case; `kind` is that of keys or weights."""
    kernel = importlib.import_module(f"pallas_kernels.{op}.tpu")
    if op == "index_topk":
        cases, static = cases_index_topk, {"topk": find(cases_index_topk, case).topk}
    else:
        cases, static = cases_grouped_matmul, {"limit": cases_grouped_matmul.LIMIT}
    operands = cases.make(find(cases, case), kind)
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    return Program(functools.partial(getattr(kernel, op), **static), tuple(avals))


def find(cases: Any, name: str) -> Any:
    return {case.name: case for case in cases.CASES}[name]


def hold(target_name: str, jobs: list[Job], *, without_kernel: frozenset[str] = frozenset()):
    """Each job compiles within its target's limits, and a kernel is in it where there is one."""
    target = TARGETS[target_name]
    if (lack := missing(target)) is not None:
        pytest.skip(lack)
    for outcome in compile_all(target, jobs):
        broken = table.broken(outcome, target)
        if outcome.job.arguments["case"] in without_kernel:
            assert not outcome.kernels
            broken.remove("there is no Pallas kernel in it")
        assert broken == [], table.describe(outcome, target)


def jobs_of(op: str, names: list[str], kinds: tuple[str, ...]) -> list[Job]:
    cases = cases_index_topk if op == "index_topk" else cases_grouped_matmul
    return [
        Job(
            f"{op} {name} {kind}",
            f"{__name__}:program",
            {"op": op, "case": name, "kind": kind},
        )
        for name in names
        for kind in kinds
        if op == "index_topk" or find(cases, name).takes(kind)
    ]


FEW = frozenset(
    case.name for case in cases_index_topk.CASES if case.capacity + case.own <= case.topk
)
"""Selections of all that is visible, for which there is nothing to run."""


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TPUS)
def test_every_selection_compiles(target: str) -> None:
    names = [case.name for case in cases_index_topk.CASES]
    hold(target, jobs_of("index_topk", names, cases_index_topk.DTYPES), without_kernel=FEW)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TPUS)
def test_every_product_of_experts_compiles(target: str) -> None:
    names = [case.name for case in cases_grouped_matmul.CASES]
    hold(target, jobs_of("grouped_matmul", names, cases_grouped_matmul.KINDS))
