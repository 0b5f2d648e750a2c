"""The Hopper kernel of tree attention compiled for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.plan import table
from jaxspec.plan.compile import compile_all
from jaxspec.plan.program import Job, Program
from jaxspec.plan.targets import TARGETS, missing
from pallas_kernels.tree_attention import gpu
from tests.pallas_kernels.cases_tree_attention import CASES, RELEASED, avals, bound

SAMPLE = ["flash-hca-1M-b1-bfloat16", "flash-hca-1M-b1-fp8"]
BY_NAME = {str(case): case for case in [*CASES, *RELEASED] if case.dtype == "bfloat16"}


def program(name: str, changes: dict[str, Any], choices: dict[str, Any]) -> Program:
    """The call of a case with some of its sizes changed and the kernel's static choices."""

    def kernel(*given: Any, position: Any) -> Any:
        return gpu.tree_attention(*given, position=position, **choices)

    call, arrays = bound(kernel, avals(BY_NAME[name]._replace(**changes)))
    return Program(call, tuple(arrays))


def job(name: str, changes: dict[str, Any] | None = None, **choices: Any) -> Job:
    arguments = {"name": name, "changes": changes or {}, "choices": choices}
    return Job(f"{name} {changes or ''} {choices}", f"{__name__}:program", arguments)


def hold(jobs: list[Job]) -> None:
    """Each job compiles for an H200, without spills and within its shared memory."""
    target = TARGETS["h200"]
    if (lack := missing(target)) is not None:
        pytest.skip(lack)
    for outcome in compile_all(target, jobs):
        assert table.broken(outcome, target) == [], table.describe(outcome, target)
        assert outcome.kernels, outcome.job.name


@pytest.mark.aot
@pytest.mark.parametrize("name", SAMPLE)
def test_clusters_of_every_size_compile(name: str) -> None:
    hold([job(name, splits=splits) for splits in (2, 4, 8, 16)])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "gather"])
def test_clusters_of_selected_entries_compile(mode: str) -> None:
    names = ["flash-csa-64k-b1-bfloat16", "flash-csa-64k-b1-fp8"]
    hold([job(name, splits=splits, mode=mode) for name in names for splits in (2, 8)])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("splits", [2, 8])
def test_clusters_of_every_head_dim_compile(splits: int) -> None:
    case = "csa-stream-bfloat16"
    dims = (64, 128, 192, 256, 384, 512)
    hold([job(case, {"dim": dim, "heads": 8}, splits=splits) for dim in dims])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("released", [False, True], ids=["conformance", "released"])
def test_every_shape_compiles(released: bool) -> None:
    names = {str(case) for case in (RELEASED if released else CASES)}
    hold([job(name) for name in BY_NAME if name in names])
