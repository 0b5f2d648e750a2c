"""The shapes on which every kernel of `index_topk` is held against its definition.

One table serves the interpreters and, with the true sizes below, the ahead-of-time compilers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.index_topk import ref
from pallas_kernels.index_topk.op import IndexKeys, PackedKeys, pack_keys

DTYPES = ("bfloat16", "float32", "fp8")  # of the keys; queries are bfloat16 beside fp8 keys

GAP = 2.0**-18
"""How near the boundary a score must lie for its entry to be chosen differently than in `ref`, as
a fraction of sum_h |w_h| sum_c |q_hc k_c|. A float32 sum of n terms is within n 2^-24 of its exact
value in that measure; n is up to 128 + 64 here, and roundings of both signs cancel."""


class Case(NamedTuple):
    """Shapes of one selection; the letters are those of `op.index_topk`."""

    name: str
    nodes: int  # N
    heads: int  # Hi
    dim: int  # ci
    capacity: int  # C
    committed: tuple[int, ...]  # one a sequence
    own: int  # J
    topk: int
    whole: bool = False  # small whole numbers and equal keys: scores are exact, ties abound


FLASH, PRO, NANO = (64, 128), (64, 128), (4, 32)  # heads and dim of the indexers

# The first ones are the quick suite.
CASES = (
    Case("nano-ties", 5, *NANO, 200, (200, 7), 5, 32, whole=True),
    Case("flash-tree", 8, *FLASH, 640, (611,), 8, 64),
    Case("flash-ties", 6, *FLASH, 300, (299, 130), 6, 48, whole=True),
    Case("nano-tree", 8, *NANO, 256, (200, 0, 1), 8, 32),
    Case("nano-one-node", 1, *NANO, 130, (130, 129, 31), 1, 32),
    Case("nano-one-entry", 7, *NANO, 40, (1, 0), 7, 4, whole=True),
    Case("nano-few-entries", 6, *NANO, 9, (9, 3), 6, 32),
    Case("nano-wide-tree", 64, *NANO, 512, (500, 33), 64, 32, whole=True),
    Case("nano-prefill", 130, *NANO, 300, (0, 290), 35, 32),
    Case("nano-empty-capacity", 5, *NANO, 0, (0,), 5, 2, whole=True),
    Case("nano-none-of-its-own", 3, *NANO, 40, (40,), 0, 2, whole=True),
    Case("flash-one-node", 1, *FLASH, 257, (257, 256), 1, 512),
    Case("flash-sixteen", 16, *FLASH, 384, (384, 383), 16, 200, whole=True),
    Case("flash-long", 8, *FLASH, 4400, (4399, 4096), 8, 512),
    Case("flash-long-ties", 3, *FLASH, 8300, (8300, 4097), 3, 512, whole=True),
    Case("flash-wide-tree", 64, *FLASH, 640, (600, 100), 64, 128),
    Case("flash-prefill", 72, *FLASH, 700, (0, 512), 20, 64),
    Case("pro-tree", 5, *PRO, 1400, (1300, 1029), 5, 1024),
    Case("pro-prefill", 40, *PRO, 1100, (1024,), 11, 1024, whole=True),
)
QUICK = CASES[:3]


class TrueCase(NamedTuple):
    """One selection at V4's own sizes, for compilers: nothing of it is ever computed."""

    name: str
    batch: int
    nodes: int
    capacity: int
    own: int
    topk: int


TRUE_CASES = (
    *(
        TrueCase(f"flash-{context // 1024}k-b{batch}", batch, 8, context // 4, 8, 512)
        for context in (8192, 65536, 1 << 20)
        for batch in (1, 8, 64)
    ),
    TrueCase("flash-decode-64k", 8, 1, 16384, 1, 512),
    TrueCase("flash-wide-1m", 1, 64, 262144, 64, 512),
    TrueCase("flash-prefill-64k", 1, 512, 16384, 130, 512),
    TrueCase("flash-prefill-8k", 1, 2048, 2048, 514, 512),
    TrueCase("pro-tree-64k", 8, 8, 16384, 8, 1024),
)


class Operands(NamedTuple):
    """What a kernel is called with."""

    q: jax.Array
    weight: jax.Array
    entries: IndexKeys


def avals(case: TrueCase, dtype: str) -> Operands:
    """Shapes and dtypes of a selection at true sizes."""
    shape = jax.ShapeDtypeStruct
    heads, dim = FLASH
    narrow = jnp.float32 if dtype == "float32" else jnp.bfloat16

    def keys(size: int) -> jax.ShapeDtypeStruct | PackedKeys:
        if dtype != "fp8":
            return shape((case.batch, size, dim), narrow)
        scale = shape((case.batch, size), jnp.float8_e8m0fnu)
        return PackedKeys(shape((case.batch, size, dim), jnp.float8_e4m3fn), scale)

    entries = IndexKeys(
        keys(case.capacity),
        shape((case.batch,), jnp.int32),
        keys(case.own),
        shape((case.batch, case.nodes, -(-case.own // 32)), jnp.uint32),
    )
    q = shape((case.batch, case.nodes, heads, dim), narrow)
    return Operands(q, shape((case.batch, case.nodes, heads), jnp.float32), entries)


def make(case: Case, dtype: str, seed: int = 0) -> Operands:
    """Random operands; cache rows that nobody wrote hold NaN."""
    rng = np.random.default_rng([seed, case.nodes, case.capacity, case.topk])
    batch = len(case.committed)
    narrow = jnp.float32 if dtype == "float32" else jnp.bfloat16

    def draw(*shape: int) -> np.ndarray:
        drawn = rng.integers(-2, 3, shape) if case.whole else rng.standard_normal(shape)
        return drawn.astype(narrow)

    q = draw(batch, case.nodes, case.heads, case.dim)
    every = draw(batch, case.capacity + case.own, case.dim)
    if case.whole:  # each key stands in about eight places, committed and own
        every = every[:, rng.integers(0, max(3, every.shape[1] // 8), every.shape[1])]
    keys, own = every[:, : case.capacity], every[:, case.capacity :]
    weight = draw(batch, case.nodes, case.heads).astype(np.float32)
    committed = np.array(case.committed, np.int32)
    unwritten = np.arange(case.capacity) >= committed[:, None]
    sees = pack(rng.random((batch, case.nodes, case.own)) < 0.6)
    if dtype == "fp8":
        keys, own = _packed(keys, unwritten), _packed(own, np.zeros(own.shape[:2], bool))
    else:
        keys[unwritten] = np.nan
    return jax.tree.map(jnp.asarray, Operands(q, weight, IndexKeys(keys, committed, own, sees)))


@jax.jit
def _packed(keys: jax.Array, unwritten: jax.Array) -> PackedKeys:
    packed = pack_keys(keys)
    value = jnp.where(unwritten[..., None], jnp.asarray(jnp.nan, packed.value.dtype), packed.value)
    return PackedKeys(value, jnp.where(unwritten, jnp.float8_e8m0fnu(jnp.nan), packed.scale))


_definition = jax.jit(ref.index_topk, static_argnames="topk")


def check(case: Case, operands: Operands, chosen: tuple[jax.Array, jax.Array]) -> None:
    """Holds packed selections against `ref`'s, and both against sums in float64.

    Whole numbers leave no room: every bit must agree. Otherwise an entry chosen by one and not by
    the other must lie within `GAP` of the least score that is chosen.
    """
    want = _definition(*operands, topk=case.topk)
    for got, right in zip(chosen, want, strict=True):
        assert got.shape == right.shape
        assert got.dtype == right.dtype
    sizes = (case.capacity, case.own)
    got, want = (_join(words, sizes) for words in (chosen, want))
    if case.whole:
        np.testing.assert_array_equal(got, want)
    score, size = _exact_scores(operands)
    visible = _visible(operands, sizes)
    count = np.minimum(visible.sum(-1), case.topk)
    assert not (got & ~visible).any()
    np.testing.assert_array_equal(got.sum(-1), count)
    ranked = -np.sort(-np.where(visible, score, -np.inf), axis=-1)
    least = np.take_along_axis(ranked, np.maximum(count - 1, 0)[..., None], axis=-1)
    differs = got != want
    assert (np.abs(score - least)[differs] <= GAP * size[differs]).all()
    near = np.abs(score - least) <= GAP * size
    np.testing.assert_array_equal(got & ~near, (score > least) & visible & ~near)


def pack(mask: np.ndarray) -> np.ndarray:
    """The last axis in words of 32 bits, the lowest bit first."""
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def unpack(words: jax.Array, size: int) -> np.ndarray:
    """Undoes `pack`."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little")[..., :size].astype(bool)


def _join(words: tuple[jax.Array, jax.Array], sizes: tuple[int, int]) -> np.ndarray:
    parts = [unpack(w, size) for w, size in zip(words, sizes, strict=True)]
    return np.concatenate(parts, axis=-1)


def _visible(operands: Operands, sizes: tuple[int, int]) -> np.ndarray:
    entries, (batch, nodes) = operands.entries, operands.q.shape[:2]
    there = np.arange(sizes[0]) < np.asarray(entries.committed)[:, None, None]
    there = np.broadcast_to(there, (batch, nodes, sizes[0]))
    return np.concatenate([there, unpack(entries.own_bits, sizes[1])], axis=-1)


def _exact_scores(operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """Scores `[B, N, C + J]` in float64, and the sums of the absolute values of their terms."""
    entries = operands.entries
    keys = np.concatenate([_float64(entries.keys), _float64(entries.own)], axis=1)
    keys = np.nan_to_num(keys)
    q, weight = _float64(operands.q), _float64(operands.weight)
    dots = np.maximum(np.einsum("bnhc,bmc->bnhm", q, keys), 0)
    score = np.einsum("bnhm,bnh->bnm", dots, weight)
    sizes = np.einsum("bnhc,bmc,bnh->bnm", np.abs(q), np.abs(keys), np.abs(weight), optimize=True)
    return score, sizes


def _float64(x: jax.Array | PackedKeys) -> np.ndarray:
    if isinstance(x, PackedKeys):
        return _float64(x.value) * _float64(x.scale)[..., None]
    return np.asarray(x).astype(np.float64)
