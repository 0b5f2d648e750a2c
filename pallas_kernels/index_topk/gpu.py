"""The indexer's selection on Hopper GPUs: one kernel scores, one chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.hopper import SMS, check_interpreter
from pallas_kernels.index_topk.gpu_choice import BLOCK, choose
from pallas_kernels.index_topk.gpu_scores import GROUPS, TILE, Operands, Shape, orders
from pallas_kernels.index_topk.packed import PackedKeys, unpack_keys, values
from pallas_kernels.memory import nbytes
from pallas_kernels.words import WORD, leading

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys

CHUNK_BYTES = 128 << 10
"""Shared memory for the queries of the nodes that share a pass over the keys."""


def index_topk(
    q: Array,
    weight: Array,
    entries: IndexKeys,
    *,
    topk: int,
    splits: int = 0,
    groups: int = 3,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See `op.index_topk`, whose arguments these are.

    Scores go through device memory, four bytes a node and entry; at B = 1 they stay in L2.

    Args:
        q: queries, bfloat16.
        weight: head weights.
        entries: keys in bfloat16; packed ones are brought to it first (which is exact), and a
            capacity that is no multiple of 8 is copied to one.
        topk: entries to choose at most.
        splits: blocks of threads that share the keys of a sequence, static; 0: as many as occupy
            the device.
        groups: warpgroups that choose for a node, static.
        interpret: what `plgpu.kernel` takes, static.

    Raises:
        ValueError: a dtype or size that the kernels do not take.
    """
    check_interpreter(interpret)
    keys = _plain(entries.keys), _plain(entries.own)
    _check(q, *keys)
    capacity, own = keys[0].shape[1], keys[1].shape[1]
    count = jnp.minimum(entries.committed, capacity)
    words = -(-capacity // WORD)
    there = jnp.broadcast_to(leading(count, words)[:, None], (*q.shape[:2], words))
    mine = entries.own_bits & leading(jnp.array([own]), entries.own_bits.shape[2])
    if capacity + own <= topk:
        return there, mine
    tiles = jnp.stack([-(-count // TILE), -(-count // TILE) + -(-own // TILE)], axis=-1)
    offset = tiles[:, 0] * (TILE // WORD)  # own entries follow the last tile of committed ones
    size = -(-(capacity + own + 2 * TILE) // BLOCK) * BLOCK
    visible = jnp.pad(there, [(0, 0), (0, 0), (0, size // WORD - words)])
    visible = _place(visible, mine, offset)
    operands, shape = _operands(q, weight, keys, visible, tiles)
    shape = shape._replace(size=size, splits=splits or shape.splits, interpret=interpret)
    rank = orders(operands, shape)
    chosen = choose(rank, tiles, topk=topk, tile=TILE, groups=groups, interpret=interpret)[
        :, : q.shape[1]
    ]
    taken = jnp.clip(offset[:, None] + jnp.arange(mine.shape[2]), 0, size // WORD - 1)
    ours = jnp.take_along_axis(chosen, taken[:, None], axis=2)
    return chosen[..., :words] & there, ours & mine


def _plain(keys: Array | PackedKeys) -> Array:
    return unpack_keys(keys).astype(jnp.bfloat16) if isinstance(keys, PackedKeys) else keys


def traffic(
    q: Array,
    weight: Array,
    entries: IndexKeys,
    *,
    topk: int,
    splits: int = 0,
    groups: int = 3,
) -> tuple[int, int, int]:
    """Bytes that a call reads and writes by the kernels' schedule, and the fewest possible.

    Arguments are those of `index_topk`; abstract ones count every entry as committed. Nodes that
    share a pass read a key once, and the orders of scores are read once from device memory: they
    are read anew for each digit of the bisection, from the caches.
    """
    batch, nodes, heads, dim = q.shape
    del splits, groups  # who does the work changes no byte
    capacity, own = (values(x).shape[1] for x in (entries.keys, entries.own))
    committed = np.full(batch, capacity)
    if not isinstance(entries.committed, jax.ShapeDtypeStruct):
        committed = np.asarray(entries.committed)
    small = nbytes((q, weight, entries.own, entries.own_bits, entries.committed))
    results = 4 * batch * nodes * (-(-capacity // WORD) - (-own // WORD))
    packed = isinstance(entries.keys, PackedKeys)
    fewest = small + results + int(committed.sum()) * (dim + 1 if packed else 2 * dim)
    if capacity + own <= topk:
        return small, results, fewest
    passes = -(-nodes // _chunk(nodes, heads, dim))
    tiles = int((-(-committed // TILE)).sum()) + batch * -(-own // TILE)
    read = small + passes * int(committed.sum()) * 2 * dim
    # Orders, and the bits of who sees what, before and after.
    written = 4 * nodes * tiles * TILE + 4 * nodes * tiles * 2
    read, written = read + written + results, written + 2 * results
    if packed or capacity % 8:
        read += nbytes(entries.keys)
        written += batch * capacity * 2 * dim
    return read, written, fewest


def _chunk(nodes: int, heads: int, dim: int) -> int:
    """Nodes whose queries fit into shared memory together."""
    return max(1, min(nodes, CHUNK_BYTES // (-(-heads // 8) * 8 * dim * 2)))


def _check(q: Array, *every: Array) -> None:
    for keys in every:
        if q.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
            raise ValueError(
                f"the GPU kernel multiplies bfloat16 (wgmma has no float32); got {q.dtype} and"
                f" {keys.dtype}; use 'ref'"
            )
    if q.shape[-1] not in (32, 64, 128, 256):
        raise ValueError(f"the GPU kernel takes keys of 32, 64, 128 or 256 dims; got {q.shape[-1]}")


def _operands(
    q: Array, weight: Array, sources: tuple[Array, Array], visible: Array, tiles: Array
) -> tuple[Operands, Shape]:
    """Heads and keys padded to 8, as wgmma and TMA want them, and nodes to whole chunks."""
    batch, nodes, heads, dim = q.shape
    padded = -(-heads // 8) * 8
    chunk = _chunk(nodes, heads, dim)
    rows = [(0, 0), (0, -nodes % chunk)]
    spare = (0, padded - heads)
    keys, own = sources
    if not keys.shape[1]:
        keys = own  # none is committed: never read
    lines = [jnp.pad(x, [(0, 0), (0, -x.shape[1] % 8), (0, 0)]) for x in (keys, own)]
    operands = Operands(
        q=jnp.pad(q, [*rows, spare, (0, 0)]).reshape(batch, -1, dim),
        weight=jnp.pad(weight.astype(jnp.float32), [*rows, spare]),
        keys=lines[0],
        own=lines[1],
        visible=jnp.pad(visible, [*rows, (0, 0)]),
        tiles=tiles,
    )
    blocks = batch * (operands.weight.shape[1] // chunk)
    most = -(-keys.shape[1] // TILE) + -(-own.shape[1] // TILE)
    splits = max(1, min(SMS // blocks, most // (2 * GROUPS)))
    return operands, Shape(chunk, splits, 0, None)


def _place(words: Array, mine: Array, offset: Array) -> Array:
    """Own words put at an offset `[B]` into words that are zero there."""
    index = jnp.arange(words.shape[2]) - offset[:, None]
    own = jnp.take_along_axis(mine, jnp.clip(index, 0, mine.shape[2] - 1)[:, None], axis=2)
    here = (index >= 0) & (index < mine.shape[2])
    return words | jnp.where(here[:, None], own, jnp.uint32(0))
