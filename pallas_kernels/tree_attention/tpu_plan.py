"""How the TPU kernel goes over its keys: tiles, and the choice between stream and gather."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from pallas_kernels.tree_attention.forms import to_bytes
from pallas_kernels.tree_attention.sources import (
    Bf16Words,
    Committed,
    Entries,
    Fp8Bytes,
    Fp8Entries,
    Own,
)
from pallas_kernels.words import WORD

LANES = 128
"""Of a register, and so the words of a selection that a stream has in VMEM at a time."""
ALIGN = 16
"""Sublanes of a tile of two-byte values: a chain's rows are sliced at multiples of it."""
MOST_ENTRIES = WORD * LANES
"""Entries a step: more would take more words of a selection than a register has lanes."""


class Walk(NamedTuple):
    """How committed entries are visited; no steps where there are none."""

    form: str = "plain"  # plain | words | bytes
    rotary: int = 0  # dims that are not in FP8
    capacity: int = 0  # C
    ratio: int = 1
    gather: bool = False
    steps: int = 0
    size: int = 0  # entries a step
    pack: int = 1  # entries that one transfer brings (gather)

    @property
    def places(self) -> int:
        """Transfers a step (gather)."""
        return self.size // self.pack


class Plan(NamedTuple):
    """Everything static about one call."""

    batch: int
    nodes: int  # N
    heads: int  # H
    dim: int  # K
    window: int  # W
    rows: int  # M, the block's own raw rows
    chain: bool
    band: int  # rows that one tile of a chain's nodes looks at
    own_entries: int  # J
    node_tile: int
    entry_tile: int
    walk: Walk

    @property
    def tiles(self) -> int:
        """Tiles of nodes."""
        return -(-self.nodes // self.node_tile)

    @property
    def row_words(self) -> int:
        """Scalar words that say which own rows are seen."""
        return 0 if self.chain else -(-self.rows // WORD)

    @property
    def seen_words(self) -> int:
        """Scalar words a sequence: own rows, own entries."""
        return self.row_words + -(-self.own_entries // WORD)


class Rows(NamedTuple):
    """Entries as the kernel reads them: one array, a row an entry."""

    array: Array  # [B, C, X]
    form: str  # plain | words | bytes
    rotary: int = 0

    @property
    def pack(self) -> int:
        """Neighbouring rows that share 32-bit words: the least that a TPU can fetch."""
        return 4 // self.array.dtype.itemsize


def rows_of(entries: Entries | None) -> Rows | None:
    """The rows of entries of any form; `Fp8Entries` are copied into rows of bytes."""
    if entries is None:
        return None
    if isinstance(entries, Fp8Entries):
        entries = to_bytes(entries)
    if isinstance(entries, Fp8Bytes):
        return Rows(entries.rows, "bytes", entries.rotary)
    if isinstance(entries, Bf16Words):
        return Rows(entries.words, "words")
    return Rows(entries, "plain")


def choose(
    q: Array,
    committed: Committed,
    own: Own,
    rows: Rows | None,
    *,
    mode: str,
    node_tile: int,
    entry_tile: int,
) -> Plan:
    """The plan of a call.

    Args:
        q: queries `[B, N, H, K]`.
        committed: committed keys.
        own: the block's own keys.
        rows: committed entries.
        mode: `stream`, `gather`, or `auto`: the one that reads less.
        node_tile: nodes whose queries share a pass over the entries; a multiple of 8 if the block
            has more.
        entry_tile: entries a step, a multiple of 128.

    Raises:
        ValueError: the mode is unknown or cannot be, or a tile has no such size.
    """
    batch, nodes, heads, dim = q.shape
    if node_tile < 1 or (node_tile < nodes and node_tile % 8):
        raise ValueError(f"node_tile must be a multiple of 8, not {node_tile}")
    if entry_tile < LANES or entry_tile % LANES or MOST_ENTRIES % entry_tile:
        raise ValueError(f"entry_tile must be 128 times a power of two up to 32, not {entry_tile}")
    node_tile = min(node_tile, nodes)
    window, own_rows = committed.ring.shape[1], own.rows.shape[1]
    chain = own.row_bits is None
    if chain:
        own_rows = _up(own_rows, ALIGN)
    return Plan(
        batch=batch,
        nodes=nodes,
        heads=heads,
        dim=dim,
        window=window,
        rows=own_rows,
        chain=chain,
        band=min(own_rows, _up(window + node_tile + ALIGN, ALIGN)),
        own_entries=0 if own.entries is None else own.entries.shape[1],
        node_tile=node_tile,
        entry_tile=entry_tile,
        walk=_walk(committed, rows, mode, node_tile, entry_tile),
    )


def _walk(
    committed: Committed, rows: Rows | None, mode: str, node_tile: int, entry_tile: int
) -> Walk:
    """Gather reads at most `topk` places for each node of a tile, stream reads every entry."""
    if mode not in ("auto", "stream", "gather"):
        raise ValueError(f"unknown mode {mode!r}; choose auto, stream or gather")
    if rows is None:
        if mode == "gather":
            raise ValueError("mode 'gather' cannot be: there are no entries")
        return Walk()
    capacity, pack = rows.array.shape[1], rows.pack
    # Words of several rows end with the last of them, so a part of one cannot be fetched.
    can = committed.selected is not None and committed.topk > 0 and capacity % pack == 0
    if mode == "gather" and not can:
        raise ValueError(
            "mode 'gather' cannot be: it takes a selection, the bound `topk` on it, and a capacity "
            f"that is a multiple of {pack}"
        )
    most = node_tile * committed.topk * pack
    gather = mode == "gather" or (mode == "auto" and can and most < capacity)
    visited = min(most, capacity) if gather else capacity
    size = min(entry_tile, _up(visited, LANES if gather else WORD))
    return Walk(
        form=rows.form,
        rotary=rows.rotary,
        capacity=capacity,
        ratio=committed.ratio,
        gather=gather,
        steps=-(-visited // size),
        size=size,
        pack=pack,
    )


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
