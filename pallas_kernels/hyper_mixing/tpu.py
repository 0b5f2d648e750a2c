"""Hyper-connections' mixing weights on TPUs: every entry of a matrix is a vector of rows.

A row has a lane of its own, so that sums over a matrix are sums of registers, and the whole
iteration runs in them: XLA's own loop is several operations an iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.memory import nbytes

LANES, SUBLANES = 128, 8
Matrix = tuple[tuple[Array, ...], ...]
"""Entries by row and column, each an array over rows of features."""


def hyper_mixing(
    features: Array, scale: Array, base: Array, *, streams: int, iterations: int, eps: float
) -> tuple[Array, Array, Array]:
    """See `op.hyper_mixing`; forward only.

    Raises:
        NotImplementedError: on differentiation.
    """
    pre, post, mix = _weigh((streams, iterations, eps), features, scale, base)
    return pre, post, mix.reshape(*mix.shape[:-1], streams, streams)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weigh(
    static: tuple[int, int, float], features: Array, scale: Array, base: Array
) -> list[Array]:
    """Pre, post and the flat matrices, each `[..., its width]`."""
    *outer, width = features.shape
    rows = features.reshape(-1, width)
    lines = pl.cdiv(len(rows), LANES)
    padded = jnp.pad(rows, [(0, lines * LANES - len(rows)), (0, 0)])
    s = static[0]
    operand, *results = (
        (jax.ShapeDtypeStruct((size, lines, LANES), jnp.float32), _block(size, lines))
        for size in (width, s, s, s * s)
    )
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    weights = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=(pl.cdiv(lines, SUBLANES),),
        in_specs=[operand[1], scalars, scalars],
        out_specs=[spec for _, spec in results],
        out_shape=[shape for shape, _ in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="hyper_mixing",
    )(padded.T.reshape(operand[0].shape), scale, base)
    return [x.reshape(len(x), -1).T[: len(rows)].reshape(*outer, len(x)) for x in weights]


def _block(size: int, lines: int) -> pl.BlockSpec:
    return pl.BlockSpec((size, min(lines, SUBLANES), LANES), lambda i: (0, i, 0))


def _no_gradient(*_: Any) -> Any:
    raise NotImplementedError(
        "the TPU kernel of hyper_mixing has no gradient; differentiate impl='ref'"
    )


_weigh.defvjp(_no_gradient, _no_gradient)


def _kernel(static: tuple[int, int, float], *refs: Any) -> None:
    u, scale, base, pre, post, mix = refs
    s, iterations, eps = static

    def logit(k: int) -> Array:
        return u[k] * scale[min(k // s, 2)] + base[k]

    for k in range(s):
        pre[k] = 1 / (1 + jnp.exp(-logit(k))) + eps
        post[k] = 2 / (1 + jnp.exp(-logit(s + k)))
    matrix = tuple(_softmax([logit((2 + i) * s + j) for j in range(s)], eps) for i in range(s))
    matrix = jax.lax.fori_loop(
        0,
        iterations - 1,
        lambda _, m: _divide_columns(_divide_rows(m, eps), eps),
        _divide_columns(matrix, eps),
    )
    for k, entry in enumerate(entry for row in matrix for entry in row):
        mix[k] = entry


def traffic(features: Array, scale: Array, base: Array, **_: Any) -> tuple[int, int, int]:
    """Bytes read, written, and the fewest possible: weights are as many as features."""
    width, rows = features.shape[-1], features.size // features.shape[-1]
    moved = pl.cdiv(rows, LANES) * LANES * width * features.dtype.itemsize
    scalars = nbytes((scale, base))
    return moved + scalars, moved, 2 * nbytes(features) + scalars


def _softmax(row: Sequence[Array], eps: float) -> tuple[Array, ...]:
    top = functools.reduce(jnp.maximum, row)
    parts = [jnp.exp(x - top) for x in row]
    factor = 1 / functools.reduce(jnp.add, parts)
    return tuple(part * factor + eps for part in parts)


def _divide_rows(mix: Matrix, eps: float) -> Matrix:
    """Divides rows by their sums; one quotient a row, since divisions are dear."""
    factors = [1 / (functools.reduce(jnp.add, row) + eps) for row in mix]
    return tuple(tuple(x * factor for x in row) for row, factor in zip(mix, factors, strict=True))


def _divide_columns(mix: Matrix, eps: float) -> Matrix:
    return tuple(zip(*_divide_rows(tuple(zip(*mix, strict=True)), eps), strict=True))
