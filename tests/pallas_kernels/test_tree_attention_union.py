"""Unions of selections, and the forms that entries are stored in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import forms
from pallas_kernels.tree_attention.gpu_selected import list_selected
from pallas_kernels.tree_attention.tpu_union import union
from tests.pallas_kernels.cases_tree_attention import pack


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_place_is_in_the_union_where_any_node_selects_any_of_its_entries(size: int) -> None:
    rng = np.random.default_rng(size)
    for capacity, nodes, tile in [(37, 5, 3), (100, 8, 8), (64, 4, 4), (32, 1, 1), (512, 9, 8)]:
        mask = rng.random((3, nodes, capacity)) < 0.04
        count = rng.integers(0, capacity + 1, 3)
        count = count.astype(np.int32)
        words = jax.jit(union, static_argnames=("tile", "pack"))(
            pack(mask), count, tile=tile, pack=size
        )
        assert words.shape == (3, -(-nodes // tile), -(-capacity // 32))
        bits = np.unpackbits(np.asarray(words).view(np.uint8), axis=-1, bitorder="little")
        for b, i in np.ndindex(words.shape[:2]):
            seen = mask[b, i * tile : (i + 1) * tile].any(0) & (np.arange(capacity) < count[b])
            places = sorted({int(entry) // size * size for entry in np.flatnonzero(seen)})
            assert np.flatnonzero(bits[b, i]).tolist() == places


@pytest.mark.parametrize(
    ("capacity", "nodes", "together", "share", "size"),
    [
        (37, 5, 2, 0.2, 64),
        (1000, 8, 1, 0.03, 64),
        (700, 5, 4, 0.02, 64),
        (64, 1, 1, 0.0, 64),
        (3000, 3, 1, 0.1, 512),
        (768, 2, 1, 1.0, 768),
    ],
)
def test_a_list_has_every_entry_that_its_nodes_select_once_and_in_order(
    capacity: int, nodes: int, together: int, share: float, size: int
) -> None:
    rng = np.random.default_rng(capacity)
    mask = rng.random((2, nodes, capacity)) < share
    mask[1, 0] = False
    count = np.array([capacity, capacity - capacity // 3])
    found = jax.jit(list_selected, static_argnums=(2, 3))(
        pack(mask), jnp.asarray(count, jnp.int32), together, size
    )
    mask &= np.arange(capacity) < count[:, None, None]
    rows, words, held = (np.asarray(part) for part in found)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    assert rows.shape == (2, -(-nodes // together), size)
    assert bits.shape == (2, nodes, size)
    for b, i in np.ndindex(held.shape):
        mine = slice(i * together, (i + 1) * together)
        wanted = np.flatnonzero(mask[b, mine].any(0))
        count = held[b, i]
        assert rows[b, i, :count].tolist() == wanted.tolist()
        assert (rows[b, i, count:] == (wanted[-1] if count else 0)).all()
        np.testing.assert_array_equal(bits[b, mine, :count], mask[b, mine][:, wanted])
        assert not bits[b, mine, count:].any()


@pytest.mark.parametrize(("dim", "rotary"), [(512, 64), (256, 64), (128, 64), (64, 32)])
def test_rows_of_bytes_hold_the_same_entries(dim: int, rotary: int) -> None:
    rng = np.random.default_rng(dim)
    plain = rng.standard_normal((2, 5, dim)).astype(np.float32)
    entries = jax.jit(forms.quantise, static_argnums=1)(plain, rotary)
    rows = jax.jit(lambda entries: forms.to_bytes(entries).rows)(entries)
    assert rows.shape == (2, 5, dim + min(dim, 128))
    again = jax.jit(lambda rows: forms.from_bytes(forms.Fp8Bytes(rows, rotary)))(rows)
    for name, part in entries._asdict().items():
        got = getattr(again, name)
        assert got.dtype == part.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(part, np.float32))


def test_a_row_too_short_for_its_scales_is_refused() -> None:
    entries = forms.quantise(jnp.ones((1, 1, 72)), 72 - 8)
    assert forms.to_bytes(entries).rows.shape == (1, 1, 144)
    with pytest.raises(ValueError, match="no room for the scales of a row of 64 dims"):
        forms.to_bytes(forms.quantise(jnp.ones((1, 1, 64)), 64)._replace(scale=jnp.ones((1, 1, 1))))


def test_words_hold_two_dims_each() -> None:
    rng = np.random.default_rng(5)
    entries = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.bfloat16)
    rows = forms.to_words(entries)
    assert rows.words.shape == (2, 3, 32)
    halves = np.asarray(entries).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(np.asarray(rows.words), halves[..., :32] | halves[..., 32:] << 16)
    np.testing.assert_array_equal(np.asarray(forms.from_words(rows)), np.asarray(entries))
