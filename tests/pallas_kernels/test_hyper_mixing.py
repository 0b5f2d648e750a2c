"""The mixing weights of hyper-connections: interpreted kernels, compiled ones, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.plan.compile import compile_all
from jaxspec.plan.program import Job, Program
from jaxspec.plan.targets import TARGETS, missing
from pallas_kernels.hyper_mixing import gpu, hyper_mixing, tpu
from tests.pallas_kernels.cases_hyper_mixing import (
    CASES,
    QUICK,
    Case,
    avals,
    check,
    make,
    run,
    static,
)
from tests.pallas_kernels.interpreted import run_interpreted

BY_NAME = {case.name: case for case in CASES}
has_gpu_interpreter = hasattr(plgpu, "InterpretGPUParams")
needs_gpu_interpreter = pytest.mark.skipif(
    not has_gpu_interpreter, reason="this jax's interpreter of GPU kernels is not public; 0.12's is"
)
by_name = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


def on_tpu(case: Case, operands: Any) -> Any:
    return run_interpreted(run(tpu.hyper_mixing, case), *operands)


def on_gpu(case: Case, operands: Any) -> Any:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    kernel = functools.partial(gpu.hyper_mixing, interpret=interpret)
    return jax.jit(run(kernel, case))(*operands)


def hold(case: Case, kernel: Callable[[Case, Any], Any]) -> None:
    operands = make(case)
    check(case, operands, kernel(case, operands))


@by_name(argvalues=QUICK)
def test_tpu(case: Case) -> None:
    hold(case, on_tpu)


@needs_gpu_interpreter
@by_name(argvalues=QUICK)
def test_gpu(case: Case) -> None:
    hold(case, on_gpu)


@pytest.mark.slow
@by_name(argvalues=CASES)
def test_tpu_at_all_shapes(case: Case) -> None:
    hold(case, on_tpu)


@needs_gpu_interpreter
@pytest.mark.slow
@by_name(argvalues=CASES)
def test_gpu_at_all_shapes(case: Case) -> None:
    hold(case, on_gpu)


@pytest.mark.parametrize(
    "kernel", [on_tpu, pytest.param(on_gpu, marks=needs_gpu_interpreter)], ids=["tpu", "gpu"]
)
def test_a_row_depends_on_no_other_row_in_any_bit(kernel: Callable[[Case, Any], Any]) -> None:
    case = BY_NAME["tree"]
    operands, other = make(case), make(case, seed=1)
    keep = (np.arange(16) % 3 == 0).reshape(2, 8)
    mixed = jnp.where(keep[..., None], operands.features, other.features).at[0, 1].set(jnp.nan)
    wanted, got = (kernel(case, operands._replace(features=x)) for x in (operands[0], mixed))
    for want, x in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[keep], np.asarray(want)[keep])


def test_the_choice_on_a_cpu_is_the_definition() -> None:
    case = BY_NAME["tree"]
    operands = make(case)
    want = hyper_mixing(*operands, **static(case), impl="ref")
    for impl in ("auto", "cpu"):
        got = hyper_mixing(*operands, **static(case), impl=impl)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    check(case, operands, got)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"streams": 3}, r"must be \[..., 15\], \[3\] and \[15\] for 3 streams"),
        ({"features": jnp.zeros((2, 24), jnp.bfloat16)}, "features must be float32, not bfloat16"),
        ({"scale": jnp.zeros(2)}, r"\(2,\)"),
        ({"streams": 0}, "at least 1 stream, not 0"),
        ({"streams": -2}, "at least 1 stream, not -2"),
        ({"iterations": 0}, "at least 1 iteration, not 0"),
        ({"impl": "tpu"}, "it needs a TPU"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    case = BY_NAME["one-row"]
    with pytest.raises(ValueError, match=words):
        hyper_mixing(**make(case)._asdict() | static(case) | change)


def test_no_rows_have_no_weights_and_start_no_kernel() -> None:
    case = Case("none", (2, 0))
    function = run(functools.partial(hyper_mixing, impl="tpu"), case)
    got = run_interpreted(function, *make(case))
    assert [x.shape for x in got] == [(2, 0, 4), (2, 0, 4), (2, 0, 4, 4)]


@pytest.mark.parametrize("kernel", [tpu.hyper_mixing, gpu.hyper_mixing], ids=["tpu", "gpu"])
def test_differentiation_is_refused_in_words(kernel: Callable[..., Any]) -> None:
    case = BY_NAME["one-row"]
    features, *rest = make(case)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda x: kernel(x, *rest, **static(case))[0].sum())(features)


@pytest.mark.parametrize("kernel", [tpu, gpu], ids=["tpu", "gpu"])
def test_what_moves_is_padded_to_blocks_of_rows(kernel: Any) -> None:
    for case in CASES:
        rows = int(np.prod(case.outer))
        scalars = 4 * (3 + case.width)
        read, written, fewest = kernel.traffic(*avals(case), **static(case))
        assert written == read - scalars == 4 * case.width * 128 * -(-rows // 128)
        assert fewest == 2 * 4 * case.width * rows + scalars


def program(*, name: str, impl: str) -> Program:
    """The call of a case, for a compiler."""
    case = BY_NAME[name]
    return Program(run(functools.partial(hyper_mixing, impl=impl), case), tuple(avals(case)))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5p", "h100"])
def test_it_compiles_at_a_ragged_shape(target: str) -> None:
    hold_to_compile(target, ["above-a-step"])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_it_compiles_at_all_shapes(target: str) -> None:
    hold_to_compile(target, list(BY_NAME))


def hold_to_compile(target_name: str, names: list[str]) -> None:
    target = TARGETS[target_name]
    if (lack := missing(target)) is not None:
        pytest.skip(lack)
    builder = f"{__name__}:program"
    jobs = [Job(name, builder, {"name": name, "impl": target.kind}) for name in names]
    for outcome in compile_all(target, jobs):
        assert outcome.compiles, outcome.words
        (kernel,) = outcome.kernels
        assert kernel.name.startswith("hyper_mixing")
        assert not kernel.spilled
