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

WORD, LANES = 32, 128
ALIGN = 16
"""Sublanes of a tile of two-byte values: a chain's rows are sliced at multiples of it."""


class Tuning(NamedTuple):
    """Choices that change no result."""

    mode: str = "auto"  # stream | gather | auto
    node_tile: int = 8  # nodes whose queries share a pass over the entries
    entry_tile: int = 512  # entries a step
    vmem_limit: int = 32 << 20  # bytes; v5e and v5p grant 16 MiB unless asked, all have 64 or more


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

    @property
    def word_block(self) -> int:
        """Words of a selection that are in VMEM at a time (stream): the lanes of a register."""
        return max(LANES, self.size // WORD)


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


def choose(q: Array, committed: Committed, own: Own, rows: Rows | None, tuning: Tuning) -> Plan:
    """The plan of a call.

    Raises:
        ValueError: the tuning's mode is unknown or cannot be.
    """
    batch, nodes, heads, dim = q.shape
    node_tile = min(tuning.node_tile, nodes)
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
        entry_tile=tuning.entry_tile,
        walk=_walk(committed, rows, node_tile, tuning),
    )


def _walk(committed: Committed, rows: Rows | None, node_tile: int, tuning: Tuning) -> Walk:
    """Gather reads at most `topk` places for each node of a tile, stream reads every entry."""
    mode = tuning.mode
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
    size = min(tuning.entry_tile, _up(visited, LANES if gather else WORD))
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
