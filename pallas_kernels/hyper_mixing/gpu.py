"""Hyper-connections' mixing weights on Hopper GPUs: a thread has a row, its matrix in registers.

XLA launches several kernels for each of Sinkhorn's iterations; this is one launch in all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import check_interpreter
from pallas_kernels.memory import nbytes

THREADS = 128
"""Of a warpgroup, each with a row of features."""
ONE_EACH = plgpu.Layout.WG_STRIDED((THREADS,), 1)
Matrix = tuple[tuple[Array, ...], ...]
"""Entries by row and column, one a thread."""


def hyper_mixing(
    features: Array,
    scale: Array,
    base: Array,
    *,
    streams: int,
    iterations: int,
    eps: float,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """See `op.hyper_mixing`; forward only.

    `interpret` is what `plgpu.kernel` takes.

    Raises:
        NotImplementedError: on differentiation.
        ValueError: interpretation is asked of a JAX that cannot.
    """
    check_interpreter(interpret)
    pre, post, mix = _weigh((streams, iterations, eps, interpret), features, scale, base)
    return pre, post, mix.reshape(*mix.shape[:-1], streams, streams)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weigh(
    static: tuple[int, int, float, Any], features: Array, scale: Array, base: Array
) -> list[Array]:
    """Pre, post and the flat matrices, each `[..., its width]`."""
    s, iterations, eps, interpret = static
    *outer, width = features.shape
    rows = features.reshape(-1, width)
    blocks = pl.cdiv(len(rows), THREADS)
    padded = jnp.pad(rows, [(0, blocks * THREADS - len(rows)), (0, 0)])

    def hyper_mixing(*refs: Any) -> None:  # the kernel is named after it
        _kernel(s, iterations, eps, *refs)

    weights = plgpu.kernel(
        hyper_mixing,
        out_type=[
            jax.ShapeDtypeStruct((size, blocks * THREADS), jnp.float32) for size in (s, s, s * s)
        ],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LoweringSemantics.Lane),
        interpret=interpret,
    )(padded.T, scale, base)
    return [x.T[: len(rows)].reshape(*outer, len(x)) for x in weights]


def _no_gradient(*_: Any) -> Any:
    raise NotImplementedError(
        "the GPU kernel of hyper_mixing has no gradient; differentiate impl='ref'"
    )


_weigh.defvjp(_no_gradient, _no_gradient)


def _kernel(s: int, iterations: int, eps: float, *refs: Any) -> None:
    u, scale, base, pre, post, mix = refs
    mine = pl.ds(lax.axis_index("block") * THREADS, THREADS)

    def logit(k: int) -> Array:
        return _load(u, (k, mine)) * scale[min(k // s, 2)] + base[k]

    for k in range(s):
        pre[k, mine] = 1.0 / (1.0 + jnp.exp(-logit(k))) + eps
        post[k, mine] = 2.0 / (1.0 + jnp.exp(-logit(s + k)))
    matrix = tuple(_softmax([logit((2 + i) * s + j) for j in range(s)], eps) for i in range(s))
    matrix = lax.fori_loop(
        0, iterations - 1, lambda _, m: _columns(_rows(m, eps), eps), _columns(matrix, eps)
    )
    for k, entry in enumerate(entry for row in matrix for entry in row):
        mix[k, mine] = entry


def traffic(features: Array, scale: Array, base: Array, **_: Any) -> tuple[int, int, int]:
    """Bytes read, written, and the fewest possible: weights are as many as features."""
    width, rows = features.shape[-1], features.size // features.shape[-1]
    moved = pl.cdiv(rows, THREADS) * THREADS * width * features.dtype.itemsize
    scalars = nbytes((scale, base))
    return moved + scalars, moved, 2 * nbytes(features) + scalars


def _softmax(row: Sequence[Array], eps: float) -> tuple[Array, ...]:
    top = functools.reduce(jnp.maximum, row)
    parts = [jnp.exp(x - top) for x in row]
    total = functools.reduce(jnp.add, parts)
    return tuple(part / total + eps for part in parts)


def _rows(mix: Matrix, eps: float) -> Matrix:
    """Divides rows by their sums."""
    sums = [functools.reduce(jnp.add, row) + eps for row in mix]
    return tuple(tuple(x / total for x in row) for row, total in zip(mix, sums, strict=True))


def _columns(mix: Matrix, eps: float) -> Matrix:
    """Divides columns by their sums."""
    return tuple(zip(*_rows(tuple(zip(*mix, strict=True)), eps), strict=True))


def _load(ref: Any, index: Any) -> Array:
    read: Any = plgpu.load
    if "idx" in inspect.signature(read).parameters:  # jax before 0.11
        return read(ref, index, layout=ONE_EACH, optimized=False)
    return read(ref.at[index], layout=ONE_EACH, optimized=False)
