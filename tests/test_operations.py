"""Single operations of the model: rotary tables, Sinkhorn, routing, the clamp of an expert.

Against closed forms, against the oracle, and against the released code's values where the fixtures
are at hand.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxspec.config import config_from_released
from jaxspec.model import hyper
from jaxspec.model.basic import per_head, rotary_frequencies, rotate, rotation
from jaxspec.model.layout import make_layout
from jaxspec.model.moe import gated_mlp, route
from jaxspec.model.params import ExpertParams, MoeParams
from jaxspec.tree import TokenBlock
from pallas_kernels.hyper_mixing.ref import sinkhorn
from tests.oracle import Config, random_checkpoint
from tests.oracle.basic import rope_frequencies

RELEASED = {"head_dim": 64, "index_head_dim": 64, "qk_rope_head_dim": 64}
YARN = {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}


def settings_of(original_length: int, **overrides) -> dict:
    raw, _ = random_checkpoint(RELEASED | overrides)
    return raw | {"rope_scaling": YARN | {"original_max_position_embeddings": original_length}}


@pytest.fixture(scope="module")
def operations(fixtures) -> dict[str, np.ndarray]:
    with safe_open(fixtures / "ops.safetensors", "np") as file:
        names = file.keys()
        plain = [name for name in names if file.get_slice(name).get_dtype() in ("F32", "I64")]
        return {name: file.get_tensor(name) for name in plain}


@pytest.mark.parametrize("original_length", [64, 4096, 65536])
@pytest.mark.parametrize("compressed", [False, True])
def test_rotation_at_near_and_far_positions(original_length, compressed):
    """An angle is a float32 product, as in the release: its error grows with the position."""
    raw = settings_of(original_length)
    cfg, config = config_from_released(raw), Config.from_released(raw)
    frequency = rope_frequencies(config, ratio=4 if compressed else 0)
    np.testing.assert_allclose(
        rotary_frequencies(cfg, compressed=compressed), frequency, rtol=1e-6, atol=0
    )
    for position in (0, 1, 100, 4095, 70000, 1_000_000):
        cos, sin = rotation(cfg, jnp.array(position), compressed=compressed)
        close = {"rtol": 0, "atol": 2e-7 * (position + 1)}
        np.testing.assert_allclose(cos, np.cos(position * frequency), **close)
        np.testing.assert_allclose(sin, np.sin(position * frequency), **close)


def test_the_ratio_chooses_the_rotation():
    cfg = config_from_released(settings_of(64))
    layout = make_layout(cfg, TokenBlock.chain(np.zeros((2, 3), np.int32), np.array([0, 70])))
    for ratio in cfg.compress_ratios:
        want = rotation(cfg, layout.block.position, compressed=ratio != 0)
        for got, table in zip(layout.turn(ratio), want, strict=True):
            assert np.array_equal(got, table)


def test_turning_back_gives_what_was_turned():
    cfg = config_from_released(settings_of(64, head_dim=96))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4, 96)), jnp.float32)
    turn = per_head(rotation(cfg, jnp.array([[0, 1, 2], [7, 80, 900]]), compressed=True))
    turned = rotate(x, turn)
    np.testing.assert_allclose(rotate(turned, turn, inverse=True), x, atol=1e-6)
    assert np.array_equal(turned[..., :32], x[..., :32])
    assert np.abs(turned - x)[1, ..., 32:].max() > 0.1


def test_rotary_tables_of_the_release(operations):
    cfg = config_from_released(settings_of(65536))
    for compressed, name in ((False, "sliding"), (True, "compress")):
        got = rotary_frequencies(cfg, compressed=compressed)
        np.testing.assert_allclose(got, operations[f"rope.inv_freq_{name}"], rtol=1e-6)


def test_sinkhorn_of_the_release(operations):
    mixes, scale, base = (operations[f"hc.{name}"] for name in ("mixes", "scale", "base"))
    logits = (mixes[..., 8:] * scale[2] + base[8:]).reshape(*mixes.shape[:2], 4, 4)
    np.testing.assert_allclose(sinkhorn(logits, 20, 1e-6), operations["hc.comb"], atol=1e-6)


def test_sinkhorn_makes_rows_and_columns_sum_to_one():
    logits = np.random.default_rng(0).standard_normal((50, 4, 4)).astype(np.float32)
    mix = jax.jit(sinkhorn, static_argnums=(1, 2))(logits, 200, 1e-6)
    for axis in (-1, -2):
        np.testing.assert_allclose(mix.sum(axis), 1.0, atol=1e-4)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_sinkhorn_step_by_step(iterations):
    """After so few iterations neither their number nor their order is forgotten."""
    logits = np.random.default_rng(0).normal(scale=3, size=(20, 4, 4))
    mix = np.exp(logits - logits.max(-1, keepdims=True))
    mix = mix / mix.sum(-1, keepdims=True) + 1e-3
    for step in range(iterations):
        if step:
            mix = mix / (mix.sum(-1, keepdims=True) + 1e-3)
        mix = mix / (mix.sum(-2, keepdims=True) + 1e-3)
    np.testing.assert_allclose(sinkhorn(jnp.float32(logits), iterations, 1e-3), mix, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streams_are_collected_and_spread_by_their_weights(monkeypatch, platform, dtype):
    """Sums over streams are written out for accelerators: a reduction is a pass of its own."""
    monkeypatch.setattr(hyper, "target_platform", lambda: platform)
    rng = np.random.default_rng(0)
    streams, y = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 5, 3, 8), (2, 5, 8)))
    sizes = (2, 5, 3), (2, 5, 3), (2, 5, 3, 3)
    mixing = hyper.Mixing(*(jnp.asarray(rng.standard_normal(s), "float32") for s in sizes))
    x, update, pre, post, mix = (np.asarray(a, np.float64) for a in (streams, y, *mixing))
    collected = np.einsum("bns,bnse->bne", pre, x)
    mixed = np.einsum("bnjk,bnje->bnke", mix, x) + post[..., None] * update[:, :, None]
    rtol = {"float32": 1e-6, "bfloat16": 2.0**-8}[dtype]
    for got, want in (
        (hyper.collect(streams, mixing.pre), collected),
        (hyper.spread(streams, y, mixing), mixed),
    ):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rtol, atol=1e-5)
    for function, operands in ((hyper.collect, mixing[:1]), (hyper.spread, (y, mixing))):
        program = jax.make_jaxpr(functools.partial(function))(streams, *operands)
        assert ("reduce_sum" in str(program)) == (platform == "cpu")


@pytest.mark.parametrize("seed", range(3))
def test_routing_by_hand(seed):
    """The bias steers the choice alone; a table goes by the token, whatever the affinities."""
    rng = np.random.default_rng(seed)
    cfg = config_from_released(settings_of(64, n_routed_experts=8, num_experts_per_tok=3))
    x, gate, bias = (rng.standard_normal(shape) for shape in ((12, 8), (8, 8), 8))
    table = np.stack([rng.permutation(8)[:3] for _ in range(20)]).astype(np.int32)
    token = rng.integers(12, 20, 12)  # no row's own index
    affinity = np.sqrt(np.log1p(np.exp(x @ gate)))
    by_bias = np.argsort(-(affinity + bias), axis=-1)[:, :3]
    for given, want in (({"bias": bias}, by_bias), ({"table": table}, table[token])):
        arrays = {"gate": gate, "bias": None, "table": None} | given
        arrays = {name: None if a is None else jnp.asarray(a) for name, a in arrays.items()}
        p = MoeParams(**arrays, experts=None, shared=None)
        expert, weight = route(p, cfg, jnp.float32(x), jnp.asarray(token))
        picked = np.take_along_axis(affinity, want, axis=-1)
        scale = cfg.routed_scaling_factor / picked.sum(-1, keepdims=True)
        assert np.array_equal(expert, want)
        np.testing.assert_allclose(weight, picked * scale, rtol=1e-4)


def test_gated_mlp_clamps_its_halves():
    """The gate from above, its mate from both sides."""
    rng = np.random.default_rng(0)
    x, w1, w3, w2 = (4 * rng.standard_normal(shape) for shape in ((9, 6), (6, 5), (6, 5), (5, 6)))
    gate, up = np.minimum(x @ w1, 2.0), np.clip(x @ w3, -2.0, 2.0)
    assert ((gate < -2) & (np.abs(up) < 2)).any()
    assert (up == -2).any()
    want = (gate / (1 + np.exp(-gate)) * up) @ w2
    p = ExpertParams(*(jnp.float32(w) for w in (w1, w3, w2)))
    np.testing.assert_allclose(gated_mlp(p, jnp.float32(x), 2.0), want, rtol=1e-4, atol=1e-3)


def test_routing_of_the_release(operations):
    cfg = config_from_released(settings_of(64, n_routed_experts=16, num_experts_per_tok=6))
    bias = operations["router.bias"]
    p = MoeParams(gate=jnp.eye(16), bias=bias, table=None, experts=None, shared=None)
    logits = operations["router.logits"]
    expert, weight = route(p, cfg, jnp.asarray(logits), np.zeros(len(logits), np.int32))
    assert np.array_equal(expert, operations["router.idx"])
    np.testing.assert_allclose(weight, operations["router.w"], rtol=1e-6)


def test_a_gate_is_clamped_above_and_what_it_multiplies_on_both_sides():
    """Of the shared expert; `pallas_kernels/test_grouped_matmul.py` has the routed ones."""
    gate = np.array([-100, -100, 100, 100, 12, -12, 3], np.float32)
    up = np.array([-100, 100, -100, 100, 5, 11, -2], np.float32)
    p = ExpertParams(w1=jnp.diag(gate), w3=jnp.diag(up), w2=jnp.eye(7))
    x = np.minimum(gate.astype(np.float64), 10)
    want = x / (1 + np.exp(-x)) * np.clip(up, -10, 10)
    np.testing.assert_allclose(gated_mlp(p, jnp.ones((1, 7)), 10.0)[0], want, rtol=1e-6, atol=1e-6)
