"""Routed experts against a float64 loop over (row, choice) pairs, and the laws of isolation."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cpu import cut_tiles, tile_size

LIMIT = 2.0
# M, E, I, X, k: one row; few rows; then awkward sizes with a batched product and tiles after it.
SIZES = [(1, 16, 24, 4, 2), (8, 24, 16, 16, 2), (13, 21, 10, 5, 3), (60, 16, 8, 8, 2)]
SIZES += [(100, 20, 12, 4, 2), (300, 20, 12, 4, 2)]
BATCHED = SIZES[2:]


@dataclasses.dataclass
class Case:
    """Operands of one product, as NumPy arrays."""

    x: np.ndarray
    w1: np.ndarray
    w3: np.ndarray
    w2: np.ndarray
    expert: np.ndarray
    weight: np.ndarray
    live: np.ndarray

    def run(self, impl: str) -> np.ndarray:
        operands = [jnp.asarray(a) for a in dataclasses.astuple(self)]
        return np.asarray(_run(*operands, impl=impl))


@functools.partial(jax.jit, static_argnames="impl")
def _run(*operands: jax.Array, impl: str) -> jax.Array:
    *operands, live = operands
    return grouped_matmul(*operands, limit=LIMIT, live=live, impl=impl)


def random_ids(rng: np.random.Generator, rows: int, experts: int, choices: int) -> np.ndarray:
    """Distinct experts of each row; how evenly they are used is random too."""
    taste = rng.standard_normal(experts) * rng.choice([0.0, 1.0, 5.0])
    noise = rng.gumbel(size=(rows, experts))
    return np.argsort(taste + noise, axis=-1)[:, :choices].astype(np.int32)


def random_case(rng: np.random.Generator, size: tuple[int, ...]) -> Case:
    rows, width, inner, experts, choices = size
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    return Case(
        x=draw((rows, width)) * rng.choice([0.1, 1.0, 4.0], size=(rows, 1)).astype(np.float32),
        w1=draw((experts, inner, width)) / np.float32(width**0.5),
        w3=draw((experts, inner, width)) / np.float32(width**0.5),
        w2=draw((experts, width, inner)) / np.float32(inner**0.5),
        expert=random_ids(rng, rows, experts, choices),
        weight=rng.random((rows, choices), dtype=np.float32) * 2,
        live=rng.random(rows) < rng.choice([0.5, 0.9, 1.0]),
    )


def loop_over_pairs(case: Case) -> np.ndarray:
    y = np.zeros(case.x.shape)
    w1, w3, w2 = (w.astype(np.float64) for w in (case.w1, case.w3, case.w2))
    for m, row in enumerate(case.x.astype(np.float64)):
        for e, weight in zip(case.expert[m], case.weight[m], strict=True):
            gate = np.minimum(w1[e] @ row, LIMIT)
            up = np.clip(w3[e] @ row, -LIMIT, LIMIT)
            if case.live[m]:
                y[m] += w2[e] @ (weight * gate / (1 + np.exp(-gate)) * up)
    return y


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * np.abs(want).max())


def test_the_sizes_cover_every_form_of_product() -> None:
    sizes = [tile_size(rows * choices, experts) for rows, _, _, experts, choices in SIZES]
    assert [size in BATCHED for size in SIZES] == [size > 1 for size in sizes]
    assert len(set(sizes)) > 3


@pytest.mark.parametrize("size", BATCHED[1:], ids=str)
def test_pairs_beyond_the_batched_product_are_in_tiles(size: tuple[int, ...]) -> None:
    """With every row's first choice the same, one expert has more pairs than its batch holds."""
    rows, _, _, experts, choices = size
    case = random_case(np.random.default_rng(sum(size)), size)
    case.live[:] = True
    case.expert[:] = (case.expert - case.expert[:, :1] + experts - 1) % experts
    most = np.bincount(case.expert.reshape(-1)).max()
    assert most > tile_size(rows * choices, experts)
    assert_close(case.run("cpu"), loop_over_pairs(case))


@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_a_loop_over_pairs(size: tuple[int, ...], impl: str) -> None:
    rng = np.random.default_rng(sum(size))
    for _ in range(4):
        case = random_case(rng, size)
        y = case.run(impl)
        assert y.dtype == np.float32
        assert_close(y, loop_over_pairs(case))
        assert not y[~case.live].any()


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_no_pair_is_dropped_when_all_rows_choose_the_same_experts(impl: str) -> None:
    rng = np.random.default_rng(1)
    for size in SIZES[2:]:
        case = random_case(rng, size)
        case.expert[:] = np.arange(size[4]) + size[3] - size[4]
        assert_close(case.run(impl), loop_over_pairs(case))


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_bfloat16_operands_are_multiplied_in_float32(impl: str) -> None:
    case = random_case(np.random.default_rng(2), SIZES[2])
    narrow = {f: getattr(case, f).astype(jnp.bfloat16) for f in ("x", "w1", "w3", "w2")}
    case = dataclasses.replace(case, **narrow)
    y = case.run(impl)
    assert y.dtype == np.float32
    assert_close(y, loop_over_pairs(case))


def loss(floats: dict[str, jax.Array], case: Case, probe: np.ndarray, impl: str) -> jax.Array:
    names = ("x", "w1", "w3", "w2")
    y = grouped_matmul(
        *(floats[name] for name in names),
        jnp.asarray(case.expert),
        floats["weight"],
        limit=LIMIT,
        live=jnp.asarray(case.live),
        impl=impl,
    )
    return (y * probe).sum()


def gradient(floats: dict[str, jax.Array], case: Case, probe: np.ndarray, impl: str) -> Any:
    return jax.jit(jax.grad(lambda floats: loss(floats, case, probe, impl)))(floats)


@pytest.mark.parametrize("size", [SIZES[0], SIZES[2], SIZES[4]], ids=str)
def test_gradients_equal_those_of_the_definition(size: tuple[int, ...]) -> None:
    rng = np.random.default_rng(sum(size))
    case = random_case(rng, size)
    probe = rng.standard_normal(case.x.shape, dtype=np.float32)
    floats = {f: jnp.asarray(getattr(case, f)) for f in ("x", "w1", "w3", "w2", "weight")}
    want = gradient(floats, case, probe, "ref")
    got = gradient(floats, case, probe, "cpu")
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert_close(np.asarray(got[name]), np.asarray(value))


def test_dead_rows_are_in_no_tile() -> None:
    """Nor do they keep an expert in use that no live row has chosen."""
    case = random_case(np.random.default_rng(6), (60, 16, 8, 8, 2))
    case.live[:] = np.arange(60) % 4 == 0
    case.expert[:] = np.where(case.live[:, None], case.expert % 3, case.expert)
    pairs = np.bincount(case.expert[case.live].reshape(-1), minlength=8)
    tiles = cut_tiles(jnp.asarray(case.expert), jnp.asarray(case.live), (8, 4, 0))
    assert np.asarray(tiles.tile_stop).tolist() == np.cumsum(-(-pairs // 4)).tolist()


@pytest.mark.parametrize("size", [SIZES[0], SIZES[2]], ids=str)
def test_a_closed_gate_has_a_finite_gradient(size: tuple[int, ...]) -> None:
    """So far below zero exp(-gate) is infinite, and next to nothing goes through."""
    case = random_case(np.random.default_rng(7), size)
    case.live[:] = True
    case.x, case.w1 = np.abs(case.x), -1000 * (1 + np.abs(case.w1))
    assert np.einsum("xie,me->xim", case.w1, case.x).max() < -100
    floats = {f: jnp.asarray(getattr(case, f)) for f in ("x", "w1", "w3", "w2", "weight")}
    grads = gradient(floats, case, np.ones(case.x.shape, np.float32), "cpu")
    for name, grad in grads.items():
        assert np.abs(np.asarray(grad)).max() < 1e-20, name


@pytest.mark.parametrize("size", [(9, 40, 24, 16, 2), (64, 32, 48, 8, 2), (200, 64, 48, 8, 2)])
def test_a_row_depends_on_no_other_row_in_any_bit(size: tuple[int, ...]) -> None:
    """Content, routing, weights and liveness of the others change; NaN and infinity included."""
    rng = np.random.default_rng(sum(size))
    case = random_case(rng, size)
    case.live[:] = True
    want = case.run("cpu")
    for _ in range(12):
        keep = rng.random(size[0]) < rng.random()
        other = random_case(rng, size)
        other.x[rng.random(size[0]) < 0.2] = rng.choice([np.nan, np.inf, 1e30])
        for field in ("x", "expert", "weight"):
            getattr(other, field)[keep] = getattr(case, field)[keep]
        other = dataclasses.replace(other, w1=case.w1, w3=case.w3, w2=case.w2)
        other.live[keep] = True
        np.testing.assert_array_equal(other.run("cpu")[keep], want[keep])


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_dead_rows_are_zero_whatever_they_hold(impl: str) -> None:
    rng = np.random.default_rng(3)
    case = random_case(rng, SIZES[3])
    case.live[:] = np.arange(len(case.live)) % 3 > 0
    clean = case.run(impl)
    case.x[~case.live], case.weight[~case.live] = np.nan, np.inf
    np.testing.assert_array_equal(case.run(impl), clean)
    case.live[:] = False
    assert not case.run(impl).any()


def test_dead_rows_send_no_gradient() -> None:
    rng = np.random.default_rng(4)
    case = random_case(rng, SIZES[2])
    case.live[:] = np.arange(len(case.live)) % 2 == 0
    case.x[~case.live] = np.nan
    probe = np.where(case.live[:, None], np.float32(1), np.float32(np.nan))
    floats = {f: jnp.asarray(getattr(case, f)) for f in ("x", "w1", "w3", "w2", "weight")}

    @jax.jit
    def pull(floats, probe):
        y, back = jax.vjp(lambda f: _forward_only(f, case), floats)
        return back(jnp.broadcast_to(probe, y.shape))

    (grads,) = pull(floats, probe)
    assert all(np.isfinite(g).all() for g in grads.values())
    assert not np.asarray(grads["x"])[~case.live].any()
    assert not np.asarray(grads["weight"])[~case.live].any()


def _forward_only(floats: dict[str, jax.Array], case: Case) -> jax.Array:
    weights = [floats[f] for f in ("x", "w1", "w3", "w2")]
    expert, live = jnp.asarray(case.expert), jnp.asarray(case.live)
    return grouped_matmul(*weights, expert, floats["weight"], limit=LIMIT, live=live, impl="cpu")


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


@pytest.mark.parametrize("size", [(1, 256, 256, 7, 2), (90, 256, 256, 7, 2)], ids=str)
def test_no_weights_are_copied_but_an_expert_at_a_time(size: tuple[int, ...]) -> None:
    """Few pairs: only slices of one expert leave the stacked weights. Many: products take them."""
    rows, _, _, experts, choices = size
    case = random_case(np.random.default_rng(5), size)
    operands = [jnp.asarray(a) for a in dataclasses.astuple(case)]
    traced = _run.trace(*operands, impl="cpu")
    stacked = {case.w1.shape, case.w2.shape}
    passing = {"while", "scan", "jit", "pjit", "custom_vjp_call", "custom_vjp_call_jaxpr"}
    users = {
        eqn.primitive.name
        for eqn in _equations(traced.jaxpr.jaxpr)
        if any(getattr(v.aval, "shape", None) in stacked for v in eqn.invars)
    }
    products = {"dot_general"} if tile_size(rows * choices, experts) > 1 else set()
    assert users - passing == {"dynamic_slice"} | products
    compiled = traced.lower().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < case.w1.nbytes  # of one of the three


def test_wrong_shapes_are_named() -> None:
    case = random_case(np.random.default_rng(6), SIZES[1])
    x, w1, w3, w2, expert, weight, _ = (jnp.asarray(a) for a in dataclasses.astuple(case))
    run = functools.partial(grouped_matmul, limit=LIMIT)
    wrong = {
        "w1": (x[:, 1:], w1, w3, w2, expert, weight),
        "w2": (x, w1, w3, w3[:, 5:], expert, weight),
        "weight": (x, w1, w3, w2, expert, weight[:, :1]),
        "integer": (x, w1, w3, w2, weight, weight),
    }
    for name, operands in wrong.items():
        with pytest.raises(ValueError, match=name):
            run(*operands)
    with pytest.raises(ValueError, match="live"):
        run(x, w1, w3, w2, expert, weight, live=weight[:, 0])


def test_a_named_choice_that_cannot_run_says_why() -> None:
    case = random_case(np.random.default_rng(7), SIZES[0])
    for impl, reason in {
        "tpu": "needs",
        "gpu": "no kernel for GPUs; use 'auto' or 'ref'",
        "cuda": "choose one of",
    }.items():
        with pytest.raises(ValueError, match=reason):
            case.run(impl)


def test_auto_takes_the_platform_or_logs_its_fallback_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = {"ref": lambda: "ref", "cpu": lambda: "cpu", "tpu": "not built"}
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert dispatch.resolve("auto", "op", backends)() == "cpu"
    assert dispatch.resolve("ref", "op", backends)() == "ref"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert dispatch.resolve("auto", "op", backends)() == "ref"
    assert [record.getMessage() for record in caplog.records] == [
        "op falls back to its definition: not built"
    ]
