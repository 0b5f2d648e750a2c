"""Shapes that every kernel of tree attention is held to, and how a case is drawn.

`CASES` run in interpretation (cut in heads, width and context), `RELEASED` are the sizes of the
released models, for compilers alone. `avals(case)` gives the arguments of
`tree_attention(q, sink, committed, own, position=...)` as shapes, `draw(case)` as arrays:

- lengths are the case's, one a sequence; a ring slot, entry or scratch row that holds nothing is
  NaN, as is an own entry that no node sees;
- a tree's parents are random, its nodes' positions are length + depth, its row bits the ancestors
  and the node itself; entry j is completed by node j where its position ends a window, and seen by
  that node's descendants and itself;
- a chain has no row bits, positions length + i, and one entry a window end in order;
- with `topk` (CSA) a node selects at random, in all `topk` entries at the most (or all there are),
  among the committed and the own entries that it sees; bits beyond the committed entries are set
  too and mean nothing;
- entries are plain, or in one of the forms of `pallas_kernels.tree_attention.forms`.

Tolerances: `compare` holds results to `TOLERANCE` of the dtype, a fraction of the largest absolute
value of the expected result of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import forms, ref
from pallas_kernels.tree_attention.op import Committed, Fp8Bytes, Own
from tests.random_trees import random_parents

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


class Case(NamedTuple):
    """One block over one layer."""

    name: str
    kind: str  # tree | chain
    nodes: int  # N
    lengths: tuple[int, ...]  # committed tokens, one a sequence
    ratio: int = 0  # 0: a sliding layer, without entries
    capacity: int = 0  # C
    topk: int = 0  # 0: every entry
    heads: int = 4
    dim: int = 128
    rotary: int = 64
    window: int = 16
    dtype: str = "bfloat16"
    form: str = "plain"  # of the entries: plain | fp8 | bytes (FP8) | words (bfloat16)
    scratch: int = 0  # rows of the block beyond its N nodes

    @property
    def own_entries(self) -> int:
        """J: a tree's entry j is node j's; a chain ends at most so many windows."""
        return self.nodes if self.kind == "tree" else -(-self.nodes // self.ratio)

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype if self.form == 'plain' else self.form}"


class Arguments(NamedTuple):
    """Positional arguments and `position` of `tree_attention`."""

    q: Any
    sink: Any
    committed: Committed
    own: Own
    position: Any


NANO = {"dim": 64, "rotary": 32, "window": 128, "dtype": "float32"}
NARROW_NANO = NANO | {"dtype": "bfloat16"}  # for kernels that take no float32
FLASH = {"heads": 8, "dim": 256}
PRO = {"heads": 16, "dim": 256}

SHAPES = [
    Case("sliding-decode", "tree", 1, (0, 1, 15, 16, 40)),
    Case("sliding-tree", "tree", 8, (0, 3, 17, 100)),
    Case("sliding-scratch", "tree", 3, (5, 40), scratch=9),
    Case("sliding-64-nodes", "tree", 64, (9,)),
    Case("hca-empty", "tree", 5, (0, 3), ratio=4, capacity=1),
    Case("hca-one-entry", "tree", 6, (4, 7), ratio=4, capacity=3),
    Case("hca-decode", "tree", 1, (130, 700, 1023), ratio=8, capacity=130),
    Case("hca-ragged-capacity", "tree", 7, (0, 1301, 2399), ratio=4, capacity=601),
    Case("hca-16-nodes", "tree", 16, (33, 1000), ratio=8, capacity=125),
    Case("hca-64-nodes", "tree", 64, (77,), ratio=8, capacity=12),
    Case("csa-empty", "tree", 7, (0, 3), ratio=4, capacity=20, topk=4),
    Case("csa-one-entry", "tree", 6, (4, 7), ratio=4, capacity=33, topk=3),
    Case("csa-decode", "tree", 1, (3, 900), ratio=4, capacity=300, topk=16),
    Case("csa-few-entries", "tree", 8, (0, 40, 61), ratio=4, capacity=16, topk=32),
    Case("csa-stream", "tree", 8, (1199, 2100), ratio=4, capacity=550, topk=100),
    Case("csa-gather", "tree", 5, (0, 90, 3000), ratio=4, capacity=1100, topk=8),
    Case("csa-16-nodes", "tree", 16, (33, 1000), ratio=4, capacity=300, topk=24),
    Case("csa-64-nodes", "tree", 64, (77,), ratio=4, capacity=40, topk=16),
    Case("nano-csa", "tree", 8, (127, 700), ratio=4, capacity=256, topk=32, **NANO),
    Case("nano-hca", "tree", 8, (127, 700), ratio=128, capacity=8, **NANO),
    Case("nano-chain", "chain", 150, (0, 130), ratio=4, capacity=128, topk=32, **NANO),
    Case("nano-csa-narrow", "tree", 7, (4, 815), ratio=4, capacity=203, topk=32, **NARROW_NANO),
    Case("nano-hca-narrow", "tree", 5, (127, 700), ratio=128, capacity=8, **NARROW_NANO),
    Case("flash-csa", "tree", 8, (2049,), ratio=4, capacity=520, topk=64, **FLASH),
    Case("flash-csa-gather", "tree", 8, (9000,), ratio=4, capacity=2304, topk=16, **FLASH),
    Case("flash-hca", "tree", 8, (2303,), ratio=16, capacity=144, **FLASH),
    Case("pro-csa", "tree", 8, (2049,), ratio=4, capacity=520, topk=128, **PRO),
    Case("pro-hca", "tree", 12, (2303,), ratio=16, capacity=144, **PRO),
    Case("chain-short", "chain", 9, (0, 100), ratio=4, capacity=40, topk=8),
    Case("chain-sliding", "chain", 53, (0, 9, 100)),
    Case("chain-hca", "chain", 40, (0, 500), ratio=8, capacity=75),
    Case("chain-csa", "chain", 70, (6, 2399), ratio=4, capacity=620, topk=80),
    Case("chain-csa-gather", "chain", 24, (2399,), ratio=4, capacity=606, topk=2),
]


def _forms(shapes: list[Case], *names: str) -> list[Case]:
    """Every case, and those with entries in other forms too."""
    return [
        *shapes,
        *(case._replace(form=form) for form in names for case in shapes if case.capacity),
    ]


CASES = _forms(SHAPES, "fp8")
"""What every backend takes."""
TPU_CASES = _forms(SHAPES, "bytes", "words")
"""The forms of entries that are made for TPUs; the first of `CASES` again, in these."""


def _released() -> list[Case]:
    """V4 Flash and Pro at their true sizes: D = 8 over 8k, 64k and 1M tokens, and a chunk."""
    cases = []
    for model, heads, topk in [("flash", 64, 512), ("pro", 128, 1024)]:
        sizes = {"heads": heads, "dim": 512, "rotary": 64, "window": 128}
        cases.append(Case(f"{model}-sliding", "tree", 8, (999,) * 8, **sizes))
        for context, label in [(1 << 13, "8k"), (1 << 16, "64k"), (1 << 20, "1M")]:
            for kind, ratio in [("csa", 4), ("hca", 128)]:
                entries = {"ratio": ratio, "capacity": context // ratio}
                entries["topk"] = topk if kind == "csa" else 0
                for batch in (1, 8, 64):
                    name = f"{model}-{kind}-{label}-b{batch}"
                    lengths = (context - 9,) * batch
                    cases.append(Case(name, "tree", 8, lengths, **entries, **sizes))
                name = f"{model}-{kind}-{label}"
                cases.append(Case(name + "-decode", "tree", 1, (context - 9,), **entries, **sizes))
                cases.append(Case(name + "-n64", "tree", 64, (context - 99,), **entries, **sizes))
                lengths = (context - 513,)
                cases.append(Case(name + "-chunk", "chain", 512, lengths, **entries, **sizes))
    return cases


RELEASED = _forms(_released(), "fp8")
TPU_RELEASED = _forms(_released(), "bytes", "words")


def _formed(case: Case, entries: Any, call: Callable[..., Any]) -> Any:
    """Plain entries in the form of the case; `call(function, entries)` applies a function."""
    if case.form == "plain":
        return entries
    if case.form == "words":
        return call(forms.to_words, entries)
    fp8 = call(lambda plain: forms.quantise(plain, case.rotary), entries)
    if case.form == "fp8":
        return fp8
    rows = call(lambda values: forms.to_bytes(values).rows, fp8)
    return Fp8Bytes(rows, case.rotary)


def avals(case: Case) -> Arguments:
    """Shapes and dtypes of a case's arguments."""
    batch, nodes, dim = len(case.lengths), case.nodes, case.dim
    dtype = jnp.dtype(case.dtype)

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    def words(size: int) -> jax.ShapeDtypeStruct:
        return array(nodes, -(-size // 32), dtype=jnp.uint32)

    rows = nodes + case.scratch
    committed = Committed(array(case.window, dim), array(dtype=jnp.int32))
    bits = words(rows) if case.kind == "tree" else None
    own = Own(array(rows, dim), array(rows, dtype=jnp.int32), bits)
    if case.ratio:
        entries: Any = array(case.capacity, dim)
        entries = _formed(case, entries, jax.eval_shape)
        selected = words(case.capacity) if case.topk else None
        committed = committed._replace(
            entries=entries, selected=selected, ratio=case.ratio, topk=case.topk
        )
        bits = words(case.own_entries)
        own = own._replace(entries=array(case.own_entries, dim), entry_bits=bits)
    q = array(nodes, case.heads, dim)
    sink = jax.ShapeDtypeStruct((case.heads,), jnp.float32)
    return Arguments(q, sink, committed, own, array(nodes, dtype=jnp.int32))


def draw(case: Case, seed: int = 0) -> Arguments:
    """Random arguments of a case, see the module."""
    rng = np.random.default_rng([seed, *case.lengths, case.nodes, case.capacity])
    length = np.array(case.lengths)
    rows, nodes = case.nodes + case.scratch, case.nodes
    seen, position = _block(rng, case, length)
    held = np.arange(case.window) < length[:, None]  # the ring fills from slot 0
    committed = Committed(_keys(rng, case, held), jnp.asarray(length.astype(np.int32)))
    there = np.broadcast_to(np.arange(rows) < nodes, (len(length), rows))
    mask = np.pad(seen, [(0, 0), (0, 0), (0, case.scratch)])
    own = Own(
        rows=_keys(rng, case, there),
        row_position=jnp.asarray(np.pad(position, [(0, 0), (0, case.scratch)]).astype(np.int32)),
        row_bits=pack(mask) if case.kind == "tree" else None,
    )
    if case.ratio:
        committed, own = _with_entries(rng, case, (committed, own), seen, position)
    shape = len(length), nodes, case.heads, case.dim
    # Scores of a few units, so that the softmax is neither flat nor a choice of one key.
    q = jnp.asarray((rng.standard_normal(shape) * 2).astype(jnp.dtype(case.dtype)))
    sink = jnp.asarray(rng.standard_normal(case.heads).astype(np.float32))
    return Arguments(q, sink, committed, own, jnp.asarray(position.astype(np.int32)))


def _block(rng: np.random.Generator, case: Case, length: np.ndarray) -> tuple:
    """Ancestors and self `[B, N, N]` and positions `[B, N]`."""
    nodes = case.nodes
    seen = np.broadcast_to(np.tril(np.ones((nodes, nodes), bool)), (len(length), nodes, nodes))
    if case.kind == "tree":
        seen = np.zeros((len(length), nodes, nodes), bool)
        for sees in seen:
            for node, parent in enumerate(random_parents(rng, nodes)):
                sees[node] = sees[parent] if node else False
                sees[node, node] = True
    return seen, length[:, None] + seen.sum(-1) - 1


def _keys(rng: np.random.Generator, case: Case, there: np.ndarray) -> jax.Array:
    """Keys `[B, M, K]`, NaN but where `there [B, M]`."""
    keys = rng.standard_normal((*there.shape, case.dim))
    return jnp.asarray(np.where(there[..., None], keys, np.nan).astype(jnp.dtype(case.dtype)))


def _with_entries(
    rng: np.random.Generator,
    case: Case,
    sources: tuple[Committed, Own],
    seen: np.ndarray,
    position: np.ndarray,
) -> tuple[Committed, Own]:
    """The sources with committed and own entries."""
    count = np.array(case.lengths)[:, None] // case.ratio
    there = np.arange(case.capacity) < count
    ends = (position + 1) % case.ratio == 0
    mine = seen & ends[:, None]
    if case.kind == "chain":
        index = np.arange(case.own_entries)
        mine = index < (position[..., None] + 1) // case.ratio - count[..., None]
    entries = _formed(case, _keys(rng, case, there), lambda form, keys: jax.jit(form)(keys))
    selected = None
    if case.topk:
        old = np.broadcast_to(there[:, None], (*position.shape, case.capacity))
        chosen = _at_most(rng, np.concatenate([old, mine], axis=-1), case.topk)
        stray = rng.random(old.shape) < 0.3
        selected = pack(chosen[..., : case.capacity] | (stray & ~old))
        mine = chosen[..., case.capacity :]
    own_entries = _keys(rng, case, mine.any(1))
    return (
        sources[0]._replace(entries=entries, selected=selected, ratio=case.ratio, topk=case.topk),
        sources[1]._replace(entries=own_entries, entry_bits=pack(mine)),
    )


def _at_most(rng: np.random.Generator, mask: np.ndarray, count: int) -> np.ndarray:
    """`count` random places of each row of a mask, or all where there are no more."""
    rank = np.where(mask, rng.random(mask.shape), 2.0).argsort(-1).argsort(-1)
    return mask & (rank < count)


def pack(mask: np.ndarray) -> jax.Array:
    """`[B, N, M]` to uint32 words `[B, N, ceil(M / 32)]`."""
    padded = np.pad(mask, [(0, 0), (0, 0), (0, -mask.shape[-1] % 32)])
    return jnp.asarray(np.packbits(padded, axis=-1, bitorder="little").view(np.uint32))


def compare(case: Case, got: Any, want: Any) -> None:
    """Holds a result to the tolerance of the case."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    scale = np.abs(want).max(-1, keepdims=True)
    worst = (np.abs(got - want) / scale).max()
    assert worst < TOLERANCE[case.dtype], f"{case}: off by {worst:.2e} of the largest value"


def bound(function: Callable[..., Any], arguments: Arguments) -> tuple[Callable[..., Any], list]:
    """A function of arrays (or avals) alone, ready for `jax.jit`, and these arrays.

    Ratio and top-k are static, but a named tuple has only leaves.
    """
    leaves, tree = jax.tree.flatten(arguments)
    static = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, int)}

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        every = [static[i] if i in static else next(rest) for i in range(len(leaves))]
        q, sink, committed, own, position = jax.tree.unflatten(tree, every)
        return function(q, sink, committed, own, position=position)

    return call, [leaf for leaf in leaves if not isinstance(leaf, int)]


def expected(arguments: Arguments) -> jax.Array:
    """The definition's result."""
    call, arrays = bound(ref.tree_attention, arguments)
    return jax.jit(call)(*arrays)
