"""What the TPU kernel is given, and how the grid walks over it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.sources import Committed, Own
from pallas_kernels.tree_attention.tpu_plan import LANES, Plan, Rows
from pallas_kernels.tree_attention.tpu_union import union
from pallas_kernels.words import WORD, merge

Block = tuple[Array, pl.BlockSpec]


class Operands(NamedTuple):
    """Arguments of the kernel in its order."""

    scalars: list[Array]  # lengths [B], bits of what is seen
    blocks: dict[str, Block]


def operands(
    plan: Plan,
    queries: tuple[Array, Array, Array],
    rows: Rows | None,
    committed: Committed,
    own: Own,
) -> Operands:
    """The kernel's arguments; nothing the size of the cache is copied or moved.

    Args:
        plan: of the call.
        queries: q, sink and position.
        rows: committed entries.
        committed: the rest of what is committed.
        own: the block's own keys.
    """
    q, sink, position = queries
    blocks = {
        "q": _tiled(q.reshape(plan.batch, -1, plan.dim), plan.node_tile * plan.heads),
        "sink": (sink.astype(jnp.float32)[:, None], pl.BlockSpec((plan.heads, 1), _origin)),
        "position": _tiled(position[..., None], plan.node_tile),
        "ring": _whole(committed.ring),
        **_own_blocks(plan, own),
    }
    length = committed.length.astype(jnp.int32)
    if rows is not None and plan.walk.gather:
        blocks |= _gathered(plan, committed.selected, length)
        blocks["entries"] = rows.array, pl.BlockSpec(memory_space=pl.ANY)
    elif rows is not None:
        if committed.selected is not None:
            blocks["selected"] = _selected(plan, committed.selected)
        blocks["entries"] = _streamed(plan, rows.array)
    return Operands([length, _seen(own)], blocks)


def _seen(own: Own) -> Array:
    """Bits of the own rows and entries that any node sees, words of all sequences in a row."""
    packed = [bits for bits in (own.row_bits, own.entry_bits) if bits is not None]
    if not packed:
        return jnp.zeros(1, jnp.int32)
    unions = [merge(bits, 1) for bits in packed]
    return _signed(jnp.concatenate(unions, axis=1)).reshape(-1)


def _own_blocks(plan: Plan, own: Own) -> dict[str, Block]:
    if plan.chain:
        spare = plan.rows - own.rows.shape[1]
        rows = jnp.pad(own.rows, [(0, 0), (0, spare), (0, 0)]) if spare else own.rows
        blocks = {"rows": _whole(rows)}
    else:
        blocks = {
            "rows": _whole(own.rows),
            "row_position": _whole(own.row_position[:, None]),
            "row_bits": _tiled(_signed(own.row_bits), plan.node_tile),
        }
    if own.entries is not None:
        blocks["own_entries"] = _whole(own.entries)
        blocks["entry_bits"] = _tiled(_signed(own.entry_bits), plan.node_tile)
    return blocks


def _gathered(plan: Plan, selected: Array, length: Array) -> dict[str, Block]:
    """The union of a tile's selections in scalar memory, the selections in vector memory."""
    walk = plan.walk
    spare = -selected.shape[-1] % LANES
    if spare:
        selected = jnp.pad(selected, [(0, 0), (0, 0), (0, spare)])
    count = jnp.minimum(length // walk.ratio, walk.capacity)
    places = union(selected, count, tile=plan.node_tile, pack=walk.pack)
    spec = pl.BlockSpec(
        (1, 1, 1, places.shape[-1]), lambda b, i, *_: (b, i, 0, 0), memory_space=pltpu.SMEM
    )
    return {
        "union": (_signed(places)[:, :, None], spec),
        "selected": _tiled(_signed(selected), plan.node_tile),
    }


def _selected(plan: Plan, selected: Array) -> Block:
    """Words of the selection in blocks that serve several steps."""
    walk = plan.walk
    spare = -selected.shape[-1] % LANES
    if spare:
        selected = jnp.pad(selected, [(0, 0), (0, 0), (0, spare)])

    def index(b: Any, i: Any, s: Any, length: Any, *_: Any) -> Any:
        return b, i, lax.div(_needed(plan, length[b], s) * (walk.size // WORD), LANES)

    return _signed(selected), pl.BlockSpec((1, plan.node_tile, LANES), index)


def _streamed(plan: Plan, entries: Array) -> Block:
    """Entries in order."""

    def index(b: Any, i: Any, s: Any, length: Any, *_: Any) -> Any:
        return b, _needed(plan, length[b], s), 0

    return entries, pl.BlockSpec((1, plan.walk.size, entries.shape[-1]), index)


def _needed(plan: Plan, length: Any, step: Any) -> Any:
    """The tile of a step; beyond what is committed the last one again, so nothing is read."""
    walk = plan.walk
    last = lax.div(lax.div(length, walk.ratio) - 1, walk.size)
    return jnp.clip(step - 1, 0, jnp.clip(last, 0, walk.steps - 1))


def _signed(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.int32)


def _tiled(array: Array, size: int) -> Block:
    """`[B, size * tiles, X]`, a tile at a time."""
    return array, pl.BlockSpec((1, size, array.shape[-1]), lambda b, i, *_: (b, i, 0))


def _whole(array: Array) -> Block:
    """`[B, Y, X]`, all of a sequence."""
    return array, pl.BlockSpec((1, *array.shape[1:]), lambda b, *_: (b, 0, 0))


def _origin(*_: Any) -> tuple[int, int]:
    return 0, 0
