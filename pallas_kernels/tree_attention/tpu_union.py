"""The union of the selections of a few nodes."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.words import leading, merge

FIRST_OF = {1: 0xFFFFFFFF, 2: 0x55555555, 4: 0x11111111}
"""Bits of a word that stand for a place, by its size."""


def union(selected: Array, count: Array, *, tile: int, pack: int) -> Array:
    """Places that any node of a tile of nodes selects.

    A place is `pack` neighbouring entries, what a memory's smallest transfer brings; its first
    entry's bit stands for it.

    Args:
        selected: `[B, N, ceil(C / 32)]` uint32.
        count: `[B]` int32 committed entries; bits beyond them mean nothing.
        tile: nodes of a tile.
        pack: 1, 2 or 4.

    Returns:
        `[B, ceil(N / tile), ceil(C / 32)]` uint32.
    """
    batch, nodes, words = selected.shape
    tiles = -(-nodes // tile)
    if nodes % tile:
        selected = jnp.pad(selected, [(0, 0), (0, tiles * tile - nodes), (0, 0)])
    tiled = selected.reshape(batch, tiles, tile, words)
    any_node = merge(tiled, 2)
    places = any_node & leading(count, words)[:, None]
    for shift in (1, 2)[: pack.bit_length() - 1]:
        places = places | (places >> shift)
    return places & jnp.uint32(FIRST_OF[pack])
