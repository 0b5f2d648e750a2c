"""Scales of narrow formats, of whatever packs values, against exact arithmetic in float64."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax
import numpy as np
import pytest

from pallas_kernels.e8m0 import LEAST, MOST, exponent_for, power
from pallas_kernels.grouped_matmul.op import pack_fp4, pack_fp8
from pallas_kernels.index_topk.op import pack_keys
from pallas_kernels.tree_attention import forms

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Stored = tuple[np.ndarray, np.ndarray]  # values before scaling [G, size], exponents [G], float64


def fp8_weights(groups: np.ndarray) -> Stored:
    packed = jax.jit(pack_fp8)(groups.reshape(-1, 128, 128))
    value = np.asarray(packed.value).astype(np.float64)
    return value.reshape(groups.shape), scales(packed.scale)


def fp4_weights(groups: np.ndarray) -> Stored:
    packed = jax.jit(pack_fp4)(groups[None])
    octets = np.asarray(packed.value)[0]
    code = np.stack([octets & 15, octets >> 4], -1).reshape(groups.shape)
    return E2M1[code & 7] * np.where(code & 8, -1, 1), scales(packed.scale)


def keys(groups: np.ndarray) -> Stored:
    packed = jax.jit(pack_keys)(groups[None])
    return np.asarray(packed.value)[0].astype(np.float64), scales(packed.scale)


def entries(groups: np.ndarray) -> Stored:
    packed = jax.jit(forms.quantise, static_argnums=1)(groups[None], 0)
    exponent = np.asarray(packed.scale).astype(np.int64).reshape(-1) - 127
    return np.asarray(packed.values)[0].astype(np.float64), exponent


def scales(stored: jax.Array) -> np.ndarray:
    octets = np.asarray(stored).view(np.uint8).astype(np.int64)
    return octets.reshape(-1) - 127


class Packer(NamedTuple):
    """A way to pack groups of values."""

    pack: Callable[[np.ndarray], Stored]
    size: int  # of a group
    top: float  # of the format
    bits: int  # of the mantissa
    step: float  # between the least numbers of the format
    floor: float  # a group whose largest is less is packed as if it were this


PACKERS = {
    "fp8-weights": Packer(fp8_weights, 128 * 128, 448.0, 3, 2.0**-9, 0.0),
    "fp4-weights": Packer(fp4_weights, 32, 6.0, 1, 0.5, 0.0),
    "fp8-keys": Packer(keys, 128, 448.0, 3, 2.0**-9, 1e-4),
    "fp8-entries": Packer(entries, 64, 448.0, 3, 2.0**-9, 1e-4),
}


def largest_values(top: float) -> np.ndarray:
    """Bounds of scales with their neighbours, powers of two with theirs, and random ones."""
    rng = np.random.default_rng(int(top))
    powers = np.exp2(np.arange(-125, 118, 9, dtype=np.float64))
    bounds = np.concatenate([top * powers, powers]).astype(np.float32)
    neighbours = [np.nextafter(bounds, np.float32(to)) for to in (0, np.inf)]
    some = np.exp2(rng.uniform(-120, 120, 40)).astype(np.float32)
    return np.concatenate([bounds, *neighbours, some])


def least_exponent(largest: np.float32, top: float) -> int:
    exponent = LEAST
    while Fraction(top) * Fraction(2) ** exponent < Fraction(float(largest)):
        exponent += 1
    return exponent


@pytest.mark.parametrize("name", PACKERS)
def test_a_scale_is_the_least_power_of_two_that_holds_the_largest_value(name: str) -> None:
    packer = PACKERS[name]
    largest = largest_values(packer.top)
    rng = np.random.default_rng(0)
    groups = rng.uniform(-1, 1, (len(largest), packer.size)) * largest[:, None].astype(np.float64)
    groups = groups.astype(np.float32)
    sign = rng.choice([-1, 1], len(largest))
    groups[np.arange(len(largest)), rng.integers(0, packer.size, len(largest))] = sign * largest
    value, exponent = packer.pack(groups)
    groups = np.where(np.abs(groups) < 2.0**-126, 0, groups)  # as XLA takes subnormal numbers
    held = np.maximum(largest, np.float32(packer.floor))
    want = [least_exponent(x, packer.top) for x in held]
    np.testing.assert_array_equal(exponent, want)
    assert np.isfinite(value).all()
    assert np.abs(value).max() <= packer.top
    scale = np.exp2(exponent.astype(np.float64))[:, None]
    magnitude = np.abs(groups.astype(np.float64)) / scale
    assert (magnitude <= packer.top).all()
    binade = np.exp2(np.floor(np.log2(np.maximum(magnitude, 2.0**-60))))
    half = np.maximum(binade * 2.0**-packer.bits, packer.step) / 2
    assert (np.abs(value - groups / scale) <= half).all()


@pytest.mark.parametrize("name", PACKERS)
def test_groups_of_zeros_and_of_next_to_nothing_stay_finite(name: str) -> None:
    packer = PACKERS[name]
    tiny = np.array([0, 1e-45, -1e-40, 2.0**-126, -(2.0**-120)], np.float32)
    groups = np.repeat(tiny[:, None], packer.size, axis=1)
    value, exponent = packer.pack(groups)
    assert np.isfinite(value).all()
    assert not value[:3].any()  # float32 takes them for zeros
    assert (exponent >= LEAST).all()
    assert (exponent[:3] == exponent[0]).all()


@pytest.mark.parametrize("top", [448.0, 6.0, 1.0, 57344.0])
def test_exponents_are_exact_at_every_power_and_beside_it(top: float) -> None:
    powers = np.exp2(np.arange(-126, 128, dtype=np.float64))
    bounds = np.concatenate([powers, top * powers])
    bounds = bounds[(bounds < 2.0**127) & (bounds > 2.0**-125)].astype(np.float32)
    every = np.concatenate([bounds, *(np.nextafter(bounds, np.float32(to)) for to in (0, np.inf))])
    got = np.asarray(jax.jit(exponent_for, static_argnums=1)(every, top))
    want = np.clip([least_exponent(x, top) for x in every], LEAST, MOST)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.asarray(jax.jit(power)(got)), np.exp2(want * 1.0))
