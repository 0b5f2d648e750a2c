"""The indexer's selection on Hopper GPUs: one kernel, or one that scores and one that chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.hopper import SMS, check_interpreter
from pallas_kernels.index_topk import gpu_fused
from pallas_kernels.index_topk.gpu_choice import BLOCK, choose
from pallas_kernels.index_topk.gpu_plan import chunk_of, how
from pallas_kernels.index_topk.gpu_scores import GROUPS, TILE, Operands, Shape, orders
from pallas_kernels.index_topk.gpu_traffic import traffic
from pallas_kernels.index_topk.packed import PackedKeys, unpack_keys, values
from pallas_kernels.words import WORD, leading

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys

__all__ = ["index_topk", "refusal", "traffic"]

DIMS = (32, 64, 128, 256)
"""Dims of a key: a multiple of 16 for wgmma, in whole rows of a swizzle."""


def index_topk(
    q: Array,
    weight: Array,
    entries: IndexKeys,
    *,
    topk: int,
    mode: str = "auto",
    splits: int = 0,
    groups: int = 0,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See `op.index_topk`, whose arguments these are.

    Args:
        q: queries, bfloat16.
        weight: head weights.
        entries: keys in bfloat16, or packed ones, which are brought to it in shared memory. A
            capacity that is no multiple of 8 is copied to one, of 16 for scales.
        topk: entries to choose at most.
        mode: `fused`, one kernel, in which scores stay in shared memory; `split`, two kernels,
            between which they go through device memory, four bytes a node and entry; `auto`: see
            `how`. Static.
        splits: blocks of threads that share the keys of a sequence, or of a node where scores stay
            in shared memory, static; 0: as many as occupy the device.
        groups: warpgroups that choose for a node, and score where that is one kernel, static;
            0: two in one kernel, three in two.
        interpret: what `plgpu.kernel` takes, static.

    Raises:
        ValueError: a dtype or size that the kernels do not take, or that the mode does not.
    """
    check_interpreter(interpret)
    if (reason := refusal(q, entries)) is not None:
        raise ValueError(reason)
    keys = _of_one_form(entries)
    capacity, own = (values(x).shape[1] for x in keys)
    count = jnp.minimum(entries.committed, capacity)
    words = -(-capacity // WORD)
    if capacity + own <= topk:
        there = jnp.broadcast_to(leading(count, words)[:, None], (*q.shape[:2], words))
        return there, entries.own_bits & leading(jnp.array([own]), entries.own_bits.shape[2])
    sizes, chosen = how(q, entries, mode, splits, groups)
    if chosen is None:
        entries = entries._replace(keys=keys[0], own=keys[1])
        shape = Shape(0, splits, 0, interpret)
        return _two_kernels(q, weight, entries, (topk, groups), shape)
    bits = entries.own_bits if own else jnp.zeros((*q.shape[:2], 1), jnp.uint32)
    operands = gpu_fused.Operands(*_queries(q, weight), *_sources(keys), bits, count)
    found, ours = gpu_fused.select(operands, sizes, chosen, topk=topk, interpret=interpret)
    batch, nodes = q.shape[:2]
    found, ours = (x.reshape(batch, nodes, -1) for x in (found, ours))
    return found[..., :words], ours[..., : entries.own_bits.shape[2]]


def _two_kernels(
    q: Array, weight: Array, entries: IndexKeys, choice: tuple[int, int], shape: Shape
) -> tuple[Array, Array]:
    """One kernel writes the orders of scores, the other reads them and chooses."""
    keys = entries.keys, entries.own
    capacity, own = (values(x).shape[1] for x in keys)
    count = jnp.minimum(entries.committed, capacity)
    words = -(-capacity // WORD)
    there = jnp.broadcast_to(leading(count, words)[:, None], (*q.shape[:2], words))
    mine = entries.own_bits & leading(jnp.array([own]), entries.own_bits.shape[2])
    tiles = jnp.stack([-(-count // TILE), -(-count // TILE) + -(-own // TILE)], axis=-1)
    offset = tiles[:, 0] * (TILE // WORD)  # own entries follow the last tile of committed ones
    size = -(-(capacity + own + 2 * TILE) // BLOCK) * BLOCK
    visible = jnp.pad(there, [(0, 0), (0, 0), (0, size // WORD - words)])
    visible = _place(visible, mine, offset)
    operands, default = _operands(q, weight, keys, visible, tiles)
    shape = default._replace(
        size=size, splits=shape.splits or default.splits, interpret=shape.interpret
    )
    rank = orders(operands, shape)
    topk, groups = choice
    keywords = {"groups": groups or 3, "interpret": shape.interpret}
    chosen = choose(rank, tiles, topk=topk, tile=TILE, **keywords)[:, : q.shape[1]]
    taken = jnp.clip(offset[:, None] + jnp.arange(mine.shape[2]), 0, size // WORD - 1)
    ours = jnp.take_along_axis(chosen, taken[:, None], axis=2)
    return chosen[..., :words] & there, ours & mine


def _of_one_form(entries: IndexKeys) -> tuple[Array | PackedKeys, Array | PackedKeys]:
    """Committed and own keys; if one of them alone is packed, it is brought to bfloat16."""
    both = entries.keys, entries.own
    if all(isinstance(keys, PackedKeys) for keys in both):
        return both
    committed, own = (unpack_keys(keys).astype(jnp.bfloat16) for keys in both)
    return committed, own


def _lines(keys: Array | PackedKeys) -> Array | PackedKeys:
    """Keys in whole lines of 16 bytes, as TMA reads them: a copy where the capacity is another."""
    if isinstance(keys, PackedKeys):
        bits = lax.bitcast_convert_type(keys.scale, jnp.uint8)
        return PackedKeys(_up_to(8, keys.value), _up_to(16, bits))
    return _up_to(8, keys)


def _up_to(multiple: int, rows: Array) -> Array:
    """Rows `[B, C, ...]`, padded to a multiple."""
    spare = -rows.shape[1] % multiple
    return jnp.pad(rows, [(0, 0), (0, spare), *[(0, 0)] * (rows.ndim - 2)])


def refusal(q: Array, entries: IndexKeys) -> str | None:
    """Why the kernels cannot take a call, in words, or None; arguments are those of the kernels."""
    for keys in (entries.keys, entries.own):
        is_read = isinstance(keys, PackedKeys) or keys.dtype == jnp.bfloat16
        if q.dtype != jnp.bfloat16 or not is_read:
            return (
                f"the GPU kernel multiplies bfloat16 (wgmma has no float32); got {q.dtype} and"
                f" {values(keys).dtype}; use 'ref'"
            )
    if (dim := q.shape[-1]) not in DIMS:
        return f"the GPU kernel takes keys of 32, 64, 128 or 256 dims; got {dim}; use 'ref'"
    return None


def _queries(q: Array, weight: Array, chunk: int = 1) -> tuple[Array, Array]:
    """Heads padded to 8 for wgmma, weights to the 128 bytes of a copy, nodes to whole chunks."""
    batch, nodes, heads, dim = q.shape
    rows, spare = [(0, 0), (0, -nodes % chunk)], (0, -heads % 8)
    padded = jnp.pad(q, [*rows, spare, (0, 0)]).reshape(batch, -1, dim)
    return padded, jnp.pad(weight.astype(jnp.float32), [*rows, (0, -heads % 32)])


def _sources(sources: tuple[Any, Any]) -> tuple[Any, Any]:
    """Keys as TMA reads them; where there are none the others stand in, and are never read."""
    committed, own = (_lines(next(y for y in (x, *sources) if values(y).shape[1])) for x in sources)
    return committed, own


def _operands(
    q: Array, weight: Array, sources: tuple[Any, Any], visible: Array, tiles: Array
) -> tuple[Operands, Shape]:
    batch, nodes, heads, dim = q.shape
    chunk = chunk_of(nodes, heads, dim)
    visible = jnp.pad(visible, [(0, 0), (0, -nodes % chunk), (0, 0)])
    operands = Operands(*_queries(q, weight, chunk), *_sources(sources), visible, tiles)
    most = sum(-(-values(x).shape[1] // TILE) for x in sources)
    blocks = batch * (operands.weight.shape[1] // chunk)
    splits = max(1, min(SMS // blocks, most // (2 * GROUPS)))
    return operands, Shape(chunk, splits, 0, None)


def _place(words: Array, mine: Array, offset: Array) -> Array:
    """Own words put at an offset `[B]` into words that are zero there."""
    index = jnp.arange(words.shape[2]) - offset[:, None]
    own = jnp.take_along_axis(mine, jnp.clip(index, 0, mine.shape[2] - 1)[:, None], axis=2)
    here = (index >= 0) & (index < mine.shape[2])
    return words | jnp.where(here[:, None], own, jnp.uint32(0))
