"""The TPU kernel of the routed experts, interpreted, against its definition; packed weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, ref, tpu
from pallas_kernels.grouped_matmul.op import Fp4Weights, pack_fp4, pack_fp8
from tests.pallas_kernels.cases_grouped_matmul import (
    CASES,
    KINDS,
    LIMIT,
    QUICK,
    TRUE_CASES,
    Case,
    Operands,
    avals,
    check,
    make,
)
from tests.pallas_kernels.interpreted import run_interpreted

BY_NAME = {case.name: case for case in CASES}
FITTING = [(case, kind) for case in CASES for kind in KINDS if case.takes(kind)]


def multiply(operands: Operands, **choices: int) -> jax.Array:
    kernel = functools.partial(tpu.grouped_matmul, limit=LIMIT, **choices)
    return run_interpreted(kernel, *operands)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(QUICK[0], "float32"), (QUICK[1], "bfloat16"), (QUICK[1], "fp8"), (QUICK[1], "fp4")],
    ids=lambda x: getattr(x, "name", x),
)
def test_multiplies_as_its_definition(case: Case, kind: str) -> None:
    operands = make(case, kind, seed=1)
    check(kind, operands, multiply(operands))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), FITTING, ids=lambda x: getattr(x, "name", x))
def test_multiplies_as_its_definition_at_all_shapes(case: Case, kind: str) -> None:
    operands = make(case, kind)
    check(kind, operands, multiply(operands))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_the_hidden_width_add_up(kind: str) -> None:
    operands = make(BY_NAME["flash-wide-tree"], kind)
    check(kind, operands, multiply(operands, block_bytes=1))


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("fp4", marks=pytest.mark.slow)])
def test_a_row_depends_on_no_other_row_in_any_bit(kind: str) -> None:
    """Content, routing and liveness of the others change."""
    case = BY_NAME["flash-sixteen"]._replace(live=1.0)
    operands = make(case, kind)
    want = np.asarray(multiply(operands))
    keep = np.arange(case.rows) % 3 == 0
    other = make(case._replace(live=0.5, taste=9.0), kind, seed=2)
    mixed = [
        jnp.where(keep.reshape(-1, *[1] * (mine.ndim - 1)), mine, theirs)
        for mine, theirs in zip(
            (operands.x, *operands.routing), (other.x, *other.routing), strict=True
        )
    ]
    x = mixed[0].at[1].set(jnp.inf)
    got = multiply(Operands(x, operands.weights, tuple(mixed[1:])))
    np.testing.assert_array_equal(np.asarray(got)[keep], want[keep])


def test_differentiation_is_refused_in_words() -> None:
    x, weights, (expert, weight, live) = make(QUICK[0], "float32")
    run = functools.partial(tpu.grouped_matmul, limit=LIMIT)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda x: run(x, weights, (expert, weight, live)).sum())(x)


def test_weights_of_several_kinds_are_refused() -> None:
    x, (w1, w3, w2), routing = make(QUICK[1], "float32")
    with pytest.raises(ValueError, match="one kind"):
        tpu.grouped_matmul(x, (w1, w3, pack_fp8(w2)), routing, limit=LIMIT)


def test_fp8_is_within_half_a_step_of_its_block() -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((2, 144, 200)) * np.exp2(rng.integers(-9, 9, (2, 144, 1)))).astype("f")
    packed = pack_fp8(jnp.asarray(w))
    assert packed.scale.shape == (2, 2, 2)
    got = np.asarray(ref.dequantise(packed))
    for rows in (slice(0, 128), slice(128, 144)):
        for columns in (slice(0, 128), slice(128, 200)):
            block, near = w[:, rows, columns], got[:, rows, columns]
            largest = np.abs(block).max((1, 2), keepdims=True)
            # Three bits of mantissa; below 2^-6 of the scale steps stay the same.
            step = np.maximum(np.abs(block) * 2.0**-4, largest * 2.0**-16)
            assert (np.abs(near - block) <= step).all()


def test_fp4_takes_the_nearest_code_and_the_even_one_of_two() -> None:
    value = np.array([0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.1, 6, -0.5, -2.4, -6], "f")
    want = np.array([0, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -0.5, -2, -6], "f")
    w = np.resize(value, (1, 3, 32)) * np.array([1, 2.0**-7, 2.0**20], "f")[:, None]
    packed = pack_fp4(jnp.asarray(w))
    wanted = np.resize(want, (1, 3, 32)) * np.array([1, 2.0**-7, 2.0**20], "f")[:, None]
    np.testing.assert_array_equal(np.asarray(ref.dequantise(packed)), wanted)


def test_the_low_four_bits_are_the_even_input() -> None:
    scale = jnp.full((1, 1, 1), 4.0, jnp.float8_e8m0fnu)
    value = jnp.zeros((1, 1, 16), jnp.uint8).at[0, 0, 1].set(0xA7)
    got = np.asarray(ref.dequantise(Fp4Weights(value, scale)))
    np.testing.assert_array_equal(got[0, 0, :5], [0, 0, 24, -4, 0])


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_packed_weights_have_a_definition(kind: str, impl: str) -> None:
    operands = make(QUICK[1], kind)
    expert, weight, live = operands.routing
    run = functools.partial(grouped_matmul, limit=LIMIT, live=live, impl=impl)
    check(kind, operands, run(operands.x, *operands.weights, expert, weight))


def test_wrong_scales_are_named() -> None:
    x, (w1, w3, w2), (expert, weight, _) = make(QUICK[1], "fp4")
    short = w3._replace(scale=w3.scale[:, :, 1:])
    with pytest.raises(ValueError, match="scales of w3"):
        grouped_matmul(x, w1, short, w2, expert, weight, limit=LIMIT)


@pytest.mark.parametrize("kind", KINDS)
def test_each_active_expert_is_read_once(kind: str) -> None:
    """At true sizes and even use; what else moves is rows, far fewer bytes than weights."""
    for case in TRUE_CASES:
        read, written, fewest = tpu.traffic(*avals(case, kind), limit=LIMIT)
        assert fewest <= read + written
        if case.rows <= 64:
            assert read + written <= 1.15 * fewest
