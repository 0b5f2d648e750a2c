"""The kernels at V4-Flash's sizes, compiled for hardware that is not here."""

import pytest

from jaxspec.plan import table
from jaxspec.plan.compile import compile_all
from jaxspec.plan.kernels import OPS, jobs
from jaxspec.plan.program import Job
from jaxspec.plan.targets import TARGETS, missing

SAMPLE = "8k B=1 N=8 bf16", "M=8 bf16"


def hold_to_limits(target_name: str, wanted: list[Job]) -> None:
    """Compiles the jobs; none may break a limit of the target."""
    target = TARGETS[target_name]
    if (lack := missing(target)) is not None:
        pytest.skip(lack)
    for outcome in compile_all(target, wanted):
        assert table.broken(outcome, target) == [], table.describe(outcome, target)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "7x", "h200"])
def test_a_sample_compiles_within_its_limits(target: str) -> None:
    every = [job for op in OPS for job in jobs(op, TARGETS[target].kind)]
    hold_to_limits(target, [job for job in every if job.name.endswith(SAMPLE)])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_size_compiles_within_its_limits(target: str, op: str) -> None:
    hold_to_limits(target, jobs(op, TARGETS[target].kind))
