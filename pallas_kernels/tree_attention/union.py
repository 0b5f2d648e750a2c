"""The union of the selections of a few nodes, as a list of places to fetch."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

WORD = 32


class Union(NamedTuple):
    """Places that any node of a tile of nodes selects, ascending, and who selects them.

    A place is `pack` neighbouring entries: what a memory's smallest transfer brings.
    """

    place: Array  # [B, I, U] int32, I tiles; arbitrary from `used` on
    used: Array  # [B, I] int32
    nodes: (
        Array  # [B, I, U * pack] int32: bit n of an entry is set if node n of the tile selects it
    )


def union(selected: Array, count: Array, *, tile: int, pack: int, size: int) -> Union:
    """Lists what the nodes of each tile select.

    Words are counted and searched instead of bits, so the work is of size C / 32 and U.

    Args:
        selected: `[B, N, ceil(C / 32)]` uint32.
        count: `[B]` int32 committed entries; bits beyond them mean nothing.
        tile: nodes of a tile, at most 32.
        pack: 1, 2 or 4.
        size: U; there must be no more places in a tile's union.
    """
    batch, nodes, words = selected.shape
    tiles = -(-nodes // tile)
    committed = _first(count[:, None] - jnp.arange(words) * WORD)
    mine = jnp.pad(selected & committed[:, None], [(0, 0), (0, tiles * tile - nodes), (0, 0)])
    mine = mine.reshape(batch, tiles, tile, words)
    places = lax.reduce(mine, jnp.uint32(0), lax.bitwise_or, (2,))
    for shift in [1, 2][: pack.bit_length() - 1]:
        places = places | (places >> shift)
    places = places & jnp.uint32({1: 0xFFFFFFFF, 2: 0x55555555, 4: 0x11111111}[pack])
    ends = jnp.cumsum(lax.population_count(places).astype(jnp.int32), axis=-1)

    entry = jnp.arange(size * pack, dtype=jnp.int32)  # of the list: `pack` for each place
    rank = entry // pack
    word = (ends[..., None, :] <= rank[:, None]).sum(-1, dtype=jnp.int32)  # [B, I, U * pack]
    word = jnp.minimum(word, words - 1)
    bits = jnp.take_along_axis(places, word, axis=-1)
    after = jnp.take_along_axis(ends, word, axis=-1) - rank
    bit = _from_the_top(bits, after)
    owners = jnp.take_along_axis(mine, word[:, :, None], axis=-1)  # [B, I, tile, U * pack]
    owners = (owners >> (bit + entry % pack)[:, :, None].astype(jnp.uint32)) & 1
    flags = owners.astype(jnp.int32) << jnp.arange(tile, dtype=jnp.int32)[:, None]
    return Union(
        place=((word * WORD + bit) // pack)[..., ::pack],
        used=ends[..., -1],
        nodes=flags.sum(2, dtype=jnp.int32),
    )


def _from_the_top(words: Array, nth: Array) -> Array:
    """Place of the n-th set bit of each word, counted from the top; 0 if there are fewer.

    Halves are searched: the wanted bit is in the upper one if that one has enough.
    """
    place = jnp.zeros(words.shape, jnp.int32)
    for half in (16, 8, 4, 2, 1):
        upper = words >> (place + half).astype(jnp.uint32)
        place = jnp.where(lax.population_count(upper).astype(jnp.int32) >= nth, place + half, place)
    return place


def _first(count: Array) -> Array:
    """Words with the lowest `count` bits set, for any count."""
    partial = (jnp.uint32(1) << jnp.clip(count, 0, WORD - 1).astype(jnp.uint32)) - 1
    return jnp.where(count >= WORD, jnp.uint32(0xFFFFFFFF), partial)
