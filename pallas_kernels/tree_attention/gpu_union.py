"""The gather plan on GPUs: the union of all nodes' selections, brought together by XLA.

Rows of the cache that some node selects are copied to a buffer of their own, and the bits with
them; the kernel then streams the buffer. That moves a selected row three times, where the stream
plan reads every tile of 64 rows that holds one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tree_attention.sources import Committed
from pallas_kernels.words import WORD

MOVES = 4
"""A union is gathered if the capacity is more than so many times its largest size."""


class Union(NamedTuple):
    """The entries that someone sees, in order, then anything."""

    entries: Any  # [B, U, K], in the form of the cache
    seen: Array  # [B, N, U] bool
    held: Array  # [B] int32: how many there are


def gathers(committed: Committed, nodes: int, mode: str) -> bool:
    """Whether the selections of `nodes` nodes are gathered.

    Raises:
        ValueError: an unknown mode, or a gather where nothing bounds the selections.
    """
    if mode not in ("auto", "stream", "gather"):
        raise ValueError(f"unknown mode {mode!r} of the GPU kernel; choose auto, stream or gather")
    bounded = committed.selected is not None and committed.topk > 0
    if mode == "gather" and not bounded:
        raise ValueError("only a selection of a known top-k can be gathered")
    capacity = jax.tree.leaves(committed.entries)[0].shape[1] if bounded else 0
    large = capacity > MOVES * nodes * committed.topk
    return bounded and mode != "stream" and (large or mode == "gather")


def union(committed: Committed, selected: Array) -> Union:
    """Gathers what is selected.

    Args:
        committed: the cache.
        selected: `[B, N, ceil(C / 32)]` uint32, bits of committed entries alone.
    """
    capacity = jax.tree.leaves(committed.entries)[0].shape[1]
    size = min(capacity, selected.shape[1] * committed.topk)
    bits = (selected[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    someone = bits.any(1).reshape(selected.shape[0], -1)[:, :capacity]

    def places(chosen: Array) -> Array:
        return jnp.nonzero(chosen, size=size, fill_value=0)[0].astype(jnp.int32)

    index = jax.vmap(places)(someone)
    count = someone.sum(-1, dtype=jnp.int32)
    entries = jax.tree.map(
        lambda x: jnp.take_along_axis(x, index[..., None], axis=1), committed.entries
    )
    words = jnp.take_along_axis(selected, (index // WORD)[:, None], axis=2)
    seen = (words >> (index % WORD).astype(jnp.uint32)[:, None]) & 1 == 1
    return Union(entries, seen & (jnp.arange(size) < count[:, None])[:, None], count)
