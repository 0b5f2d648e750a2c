"""FP8 entries: the scale rule and the rounding, number by number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.tree_attention import forms

quantise, dequantise = jax.jit(forms.quantise, static_argnums=1), jax.jit(forms.dequantise)


def serial(row: np.ndarray, rotary: int) -> np.ndarray:
    """One row through FP8, a group at a time, by the formula of the report."""
    out = row.astype(np.float64)
    for start in range(0, len(row) - rotary, 64):
        group = slice(start, min(start + 64, len(row) - rotary))
        largest = max(np.abs(row[group].astype(np.float64)).max(), np.float32(1e-4))
        scale = 2.0
        while scale / 2 >= largest / 448:
            scale /= 2
        while scale < largest / 448:
            scale *= 2
        rounded = (row[group].astype(np.float64) / scale).astype(np.float32)
        out[group] = rounded.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    out[len(row) - rotary :] = row[len(row) - rotary :].astype(ml_dtypes.bfloat16)
    return out


@pytest.mark.parametrize(("dim", "rotary"), [(512, 64), (64, 32), (160, 64)])
def test_entries_are_rounded_in_groups_of_64_and_their_rotary_part_is_not(
    dim: int, rotary: int
) -> None:
    rng = np.random.default_rng(dim)
    size = np.exp(rng.uniform(-14, 14, (2, 7, 1)))
    rows = (rng.standard_normal((2, 7, dim)) * size).astype(np.float32)
    rows[0, 0, :] = 0
    rows[0, 1, 3] = 448 * 2.0**5  # at a bound: the scale is 2^5 itself
    entries = quantise(rows, rotary)
    assert entries.values.shape == (2, 7, dim - rotary)
    assert entries.scale.shape == (2, 7, -(-(dim - rotary) // 64))
    got = np.asarray(dequantise(entries)).astype(np.float32)
    want = np.stack([[serial(row, rotary) for row in group] for group in rows])
    np.testing.assert_array_equal(got, want.astype(np.float32))


def test_quantised_entries_quantise_to_themselves() -> None:
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.standard_normal((1, 9, 512)), jnp.bfloat16)
    once = dequantise(quantise(rows, 64))
    twice = dequantise(quantise(once, 64))
    np.testing.assert_array_equal(np.asarray(twice), np.asarray(once))
