"""The gather plan on GPUs: which rows of the cache each block of threads reads.

A block has 64 query rows: one node, or several where heads are few. What these nodes select is
brought to a list of rows, in order, and the kernel fetches just these rows. The lists are made of
the packed bits: blocks of words are counted, then each place of a list finds its block, its word
and its bit.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.tree_attention.gpu_layout import TILE
from pallas_kernels.tree_attention.sources import Committed
from pallas_kernels.words import WORD, leading, merge, pack

BLOCK = 8
"""Words that are counted together: 32 bytes, the least that device memory gives."""
GAIN = 1.15
"""Rows are gathered if the capacity is more than so many times the most that a block selects."""


class Selected(NamedTuple):
    """The rows that someone of a set of nodes sees."""

    rows: Array  # [B, S, U] int32: in order, then the last of them again, or 0 if there is none
    words: Array  # [B, N, U / 32] uint32: of which a node sees
    held: Array  # [B, S] int32: how many there are


def nodes_together(heads: int) -> int:
    """Nodes of 64 query rows; `heads` is padded."""
    return max(1, TILE // heads)


def list_size(committed: Committed, nodes: int, heads: int) -> int:
    """U: places of a list, whole tiles; `topk` is known."""
    capacity = jax.tree.leaves(committed.entries)[0].shape[1]
    most = min(capacity, min(nodes, nodes_together(heads)) * committed.topk)
    return -(-most // TILE) * TILE


def gathers(committed: Committed, nodes: int, heads: int, mode: str) -> bool:
    """Whether single rows are read, those that the nodes of each block select.

    Raises:
        ValueError: an unknown mode, or a gather where nothing bounds the selections.
    """
    if mode not in ("auto", "stream", "gather"):
        raise ValueError(f"unknown mode {mode!r} of the GPU kernel; choose auto, stream or gather")
    bounded = committed.selected is not None and committed.topk > 0
    if mode == "gather" and not bounded:
        raise ValueError("only a selection of a known top-k can be gathered")
    if not bounded or mode == "stream":
        return False
    capacity = jax.tree.leaves(committed.entries)[0].shape[1]
    return mode == "gather" or capacity > GAIN * list_size(committed, nodes, heads)


def list_selected(selected: Array, count: Array, together: int, size: int) -> Selected:
    """Lists of what each set of nodes selects.

    Args:
        selected: `[B, N, ceil(C / 32)]` uint32, bits of committed entries.
        count: `[B]` int32: how many of them there are; bits beyond mean nothing.
        together: nodes of a set; the last has fewer where N is no multiple.
        size: U, places of a list, a multiple of 32.
    """
    batch, nodes, length = selected.shape
    padded = jnp.pad(selected, [(0, 0), (0, -nodes % together), (0, -length % BLOCK)])
    each = padded.reshape(batch, -1, together, padded.shape[2])
    of_sets = jax.vmap(partial(_places, size=size), (0, None))
    rows, held = jax.vmap(of_sets)(merge(each, 2), count)
    if together == 1:
        return Selected(rows, leading(held, size // WORD), held)
    words = jnp.take_along_axis(each, (rows // WORD)[:, :, None], axis=3)
    seen = (words >> (rows % WORD).astype(jnp.uint32)[:, :, None]) & 1 == 1
    seen &= (jnp.arange(size) < held[..., None])[:, :, None]
    return Selected(rows, pack(seen).reshape(batch, -1, size // WORD)[:, :nodes], held)


def _places(words: Array, count: Array, *, size: int) -> tuple[Array, Array]:
    """Places of those of the first `count` bits that are set in `[W]` words, and their number.

    All but the counts of the blocks is done place by place, without an axis of words or bits, which
    XLA would write to device memory.
    """

    def there(number: Array) -> Array:
        return words[number] & leading(count - WORD * number, 1)[..., 0]

    within = _bits(there(jnp.arange(len(words)))).reshape(-1, BLOCK).sum(-1)
    ends = jnp.cumsum(within)
    held = ends[-1]
    rank = jnp.clip(jnp.arange(size), 0, jnp.maximum(held - 1, 0))
    block = jnp.searchsorted(ends, rank, side="right", method="scan_unrolled")
    block = jnp.minimum(block, len(within) - 1)
    rank -= (ends - within)[block]
    found, place, rest = jnp.zeros_like(rank, jnp.uint32), jnp.zeros_like(rank), rank
    for number in range(BLOCK):
        word = there(BLOCK * block + number)
        here = (rank >= 0) & (rank < _bits(word))
        found = jnp.where(here, word, found)
        place = jnp.where(here, WORD * (BLOCK * block + number), place)
        rest = jnp.where(here, rank, rest)
        rank -= _bits(word)
    for half in (16, 8, 4, 2, 1):  # the bit before which `rest` others are set
        low = _bits(found & jnp.uint32((1 << half) - 1))
        place += jnp.where(rest >= low, half, 0)
        found = jnp.where(rest >= low, found >> half, found)
        rest -= jnp.where(rest >= low, low, 0)
    return jnp.where(held > 0, place, 0).astype(jnp.int32), held.astype(jnp.int32)


def _bits(words: Array) -> Array:
    return lax.population_count(words).astype(jnp.int32)
