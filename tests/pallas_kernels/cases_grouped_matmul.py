"""The shapes on which every kernel of `grouped_matmul` is held against its definition.

One table serves the interpreters and, with the true sizes below, the ahead-of-time compilers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import ref
from pallas_kernels.grouped_matmul.op import Fp4Weights, Fp8Weights, pack_fp4, pack_fp8
from pallas_kernels.grouped_matmul.packed import FP4_GROUP, FP8_BLOCK

KINDS = (
    "bfloat16",
    "float32",
    "fp8",
    "fp4",
)  # of the weights; rows are bfloat16 beside packed ones
LIMIT = 2.0  # so low that clamping is common
TOLERANCE = {"float32": 2.0**-18, "bfloat16": 2.0**-16, "fp8": 2.0**-16, "fp4": 2.0**-16}
"""Greatest error as a fraction of sum_k |weight_k| sum_i |hidden_i w2_i|. Kernels for narrow
weights may hold hidden rows in two bfloat16 numbers, 2^-18 of them short at most; the rest is for
sums in float32 in another order."""


class Case(NamedTuple):
    """Sizes of one product; the letters are those of `op.grouped_matmul`."""

    name: str
    rows: int  # M
    width: int  # E
    inner: int  # I
    experts: int  # X
    choices: int  # k
    live: float = 0.8  # share of the rows
    taste: float = 1.0  # how unevenly experts are used

    def takes(self, kind: str) -> bool:
        """Whether weights of this kind have such sizes."""
        return kind != "fp4" or not (self.width % FP4_GROUP or self.inner % FP4_GROUP)


NANO, FLASH, PRO = (256, 144, 8, 2), (512, 512, 16, 6), (896, 384, 12, 6)

# The first ones are the quick suite.
CASES = (
    Case("nano-tree", 8, *NANO),
    Case("flash-tree", 6, *FLASH),
    Case("flash-one-row", 1, *FLASH, live=1.0),
    Case("nano-one-row", 1, *NANO, live=1.0),
    Case("nano-all-dead", 5, *NANO, live=0.0),
    Case("nano-wide-tree", 64, *NANO),
    Case("nano-prefill", 300, *NANO, live=0.95),
    Case("flash-all-dead", 5, *FLASH, live=0.0),
    Case("flash-eight", 8, *FLASH),
    Case("flash-sixteen", 16, *FLASH, taste=0.0),
    Case("flash-wide-tree", 64, *FLASH, taste=5.0),
    Case("flash-same-experts", 40, *FLASH, live=1.0, taste=1e6),
    Case("pro-tree", 5, *PRO),
    Case("pro-prefill", 130, *PRO),
    Case("odd-sizes", 7, 96, 64, 5, 3),
)
QUICK = CASES[:2]


class TrueCase(NamedTuple):
    """One layer's experts at V4's own sizes, for compilers: nothing of it is ever computed."""

    name: str
    rows: int
    width: int = 4096
    inner: int = 2048
    experts: int = 256
    choices: int = 6


TRUE_CASES = (
    *(TrueCase(f"flash-{rows}", rows) for rows in (1, 8, 64, 512, 2048)),
    TrueCase("pro-64", 64, 7168, 3072, 384, 6),
)


class Operands(NamedTuple):
    """What a kernel is called with."""

    x: Any
    weights: tuple[Any, Any, Any]
    routing: tuple[Any, Any, Any]


def avals(case: TrueCase, kind: str) -> Operands:
    """Shapes and dtypes of a product at true sizes."""
    shape = jax.ShapeDtypeStruct
    narrow = jnp.float32 if kind == "float32" else jnp.bfloat16

    def stacked(rows: int, columns: int) -> Any:
        if kind == "fp8":
            blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
            value = shape((case.experts, rows, columns), jnp.float8_e4m3fn)
            return Fp8Weights(value, shape((case.experts, *blocks), jnp.float8_e8m0fnu))
        if kind == "fp4":
            value = shape((case.experts, rows, columns // 2), jnp.uint8)
            scale = shape((case.experts, rows, columns // FP4_GROUP), jnp.float8_e8m0fnu)
            return Fp4Weights(value, scale)
        return shape((case.experts, rows, columns), narrow)

    up, down = stacked(case.inner, case.width), stacked(case.width, case.inner)
    pairs = case.rows, case.choices
    routing = shape(pairs, jnp.int32), shape(pairs, jnp.float32), shape(pairs[:1], jnp.bool_)
    return Operands(shape((case.rows, case.width), narrow), (up, up, down), routing)


_pack_fp8, _pack_fp4, _dequantise = map(jax.jit, (pack_fp8, pack_fp4, ref.dequantise))
_definition = jax.jit(ref.grouped_matmul, static_argnames="limit")


def make(case: Case, kind: str, seed: int = 0) -> Operands:
    """Random operands; rows that are not live hold NaN."""
    rng = np.random.default_rng([seed, case.rows, case.width, case.experts])
    narrow = jnp.float32 if kind == "float32" else jnp.bfloat16
    pack = {"fp8": _pack_fp8, "fp4": _pack_fp4}.get(kind, lambda w: jnp.asarray(w.astype(narrow)))

    def stacked(rows: int, columns: int) -> Any:
        # Experts and rows of very different size, so that a wrong scale is far off.
        size = np.exp2(rng.integers(-3, 3, (case.experts, rows, 1)))
        w = rng.standard_normal((case.experts, rows, columns)) * size / columns**0.5
        return pack(w.astype(np.float32))

    weights = [stacked(case.inner, case.width) for _ in range(2)]
    weights.append(stacked(case.width, case.inner))
    x = rng.standard_normal((case.rows, case.width)) * rng.choice([0.1, 1, 4], (case.rows, 1))
    live = rng.random(case.rows) < case.live
    x[~live] = np.nan
    liking = rng.standard_normal(case.experts) * case.taste
    liking = liking + rng.gumbel(size=(case.rows, case.experts))
    expert = np.argsort(-liking, axis=-1)[:, : case.choices].astype(np.int32)
    weight = (rng.random(expert.shape) * 2).astype(np.float32)
    routing = tuple(map(jnp.asarray, (expert, weight, live)))
    return Operands(jnp.asarray(x.astype(narrow)), tuple(weights), routing)


def check(kind: str, operands: Operands, y: jax.Array) -> None:
    """Holds a result, and the definition's, against a loop over pairs in float64."""
    want, size = _loop_over_pairs(operands)
    live = np.asarray(operands.routing[2])
    assert y.shape == want.shape
    assert y.dtype == jnp.float32
    assert not np.asarray(y)[~live].any()
    for got in (_definition(*operands, limit=LIMIT), y):
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= TOLERANCE[kind] * size).all()


def _loop_over_pairs(operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """The result, and the sums of the absolute values of its terms."""
    w1, w3, w2 = (np.asarray(_dequantise(w), np.float64) for w in operands.weights)
    x = np.asarray(operands.x).astype(np.float64)
    expert, weight, live = (np.asarray(part) for part in operands.routing)
    y, size = np.zeros(x.shape), np.zeros(x.shape)
    for m in np.flatnonzero(live):
        for e, scale in zip(expert[m], weight[m], strict=True):
            gate = np.minimum(w1[e] @ x[m], LIMIT)
            up = np.clip(w3[e] @ x[m], -LIMIT, LIMIT)
            hidden = scale * gate / (1 + np.exp(-gate)) * up
            y[m] += w2[e] @ hidden
            size[m] += np.abs(w2[e]) @ np.abs(hidden)
    return y, size
