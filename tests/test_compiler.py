"""What the compiler options do to sums on CPUs, where they have any effect."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.compiler import compiler_options, inference_options
from tests.serial import FULL_COMPILE

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the options are those of XLA's CPU backend"
)


def _mean_square(x: jax.Array) -> jax.Array:
    return (x * x).mean(-1)


def test_inference_reduces_rows_in_no_windows() -> None:
    """XLA ignores a pass whose name it does not know, so the option could cease to say anything."""
    x = jnp.ones((8, 1024))
    programs = [
        jax.jit(_mean_square, compiler_options=options).lower(x).compile().as_text()
        for options in (compiler_options(), inference_options())
    ]
    assert ["reduce-window" in program for program in programs] == [True, False]


@pytest.mark.parametrize("length", [33, 7168, 129_280, 1 << 18])
def test_inference_sums_rows_within_float32(length: int) -> None:
    x = np.random.default_rng(length).random((3, length), np.float32)
    options = inference_options() | FULL_COMPILE  # which add in many lanes
    mean = jax.jit(_mean_square, compiler_options=options)(x)
    np.testing.assert_allclose(mean, np.square(x, dtype=np.float64).mean(-1), rtol=1e-6)


def test_training_sums_matrices_within_float32() -> None:
    """The norm of a gradient: 1 % off at 64 million values where they are added one by one."""
    x = np.random.default_rng(0).random((4096, 2048), np.float32)
    want = np.square(x, dtype=np.float64).sum()
    total, control = (
        jax.jit(lambda x: (x * x).sum(), compiler_options=options | FULL_COMPILE)(x)
        for options in (compiler_options(), inference_options())
    )
    np.testing.assert_allclose(total, want, rtol=1e-6)
    assert abs(control / want - 1) > 1e-5  # so training must not take the options of inference
