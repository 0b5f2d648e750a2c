"""Packed masks and sizes in memory, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import words
from pallas_kernels.memory import nbytes
from tests.pallas_kernels.cases_tree_attention import pack


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100])
def test_masks_are_packed_with_the_lowest_bit_first(size: int) -> None:
    mask = np.random.default_rng(size).random((2, 3, size)) < 0.5
    got = words.pack(jnp.asarray(mask))
    assert got.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(got), np.asarray(pack(mask)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_leading_bits_can_be_set(size: int) -> None:
    count = np.array([[-40, -1, 0, 1, 31, 32], [33, 63, 64, 95, 96, 5000]])
    got = np.asarray(words.leading(jnp.asarray(count), size))
    want = np.arange(32 * size) < count[..., None]
    np.testing.assert_array_equal(got, np.asarray(pack(want)))


def test_merged_words_hold_the_bits_that_anyone_has() -> None:
    mask = np.random.default_rng(0).random((2, 7, 70)) < 0.1
    got = np.asarray(words.merge(pack(mask), 1))
    np.testing.assert_array_equal(got, np.asarray(pack(mask.any(1, keepdims=True)))[:, 0])


def test_bytes_of_a_tree_are_those_of_its_arrays() -> None:
    tree = {"a": jnp.zeros((3, 5), jnp.bfloat16), "b": [None, jax.ShapeDtypeStruct((7,), "uint32")]}
    assert nbytes(tree) == 3 * 5 * 2 + 7 * 4
    assert nbytes(None) == 0
