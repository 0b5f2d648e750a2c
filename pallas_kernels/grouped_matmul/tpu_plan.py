"""Static sizes of the TPU kernel of `grouped_matmul`, and the bytes that it moves."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.grouped_matmul.packed import Fp4Weights, Weights
from pallas_kernels.memory import nbytes

LEAST_ROWS, MOST_ROWS = 16, 128  # of a tile: a register of packed bfloat16; what costs no time
VMEM_LIMIT = 56 << 20  # bytes; a 7x has 64 MiB, the other generations 128 MiB
BLOCK_BYTES = 8 << 20

Triple = tuple[Weights, Weights, Weights]


class Plan(NamedTuple):
    """Static sizes of one call; letters as in `op.grouped_matmul`."""

    width: int  # E
    inner: int  # I
    rows: int  # T
    block: int  # hidden columns at a time
    tiles: int  # at most

    @property
    def blocks(self) -> int:
        """Blocks of the hidden width."""
        return self.inner // self.block


def make_plan(weights: Triple, pairs: tuple[int, ...], block_bytes: int) -> Plan:
    """Tiles for these weights and for experts of shape `pairs [M, k]`."""
    experts, inner, width = weights[0].shape
    count = math.prod(pairs)
    rows = LEAST_ROWS
    while rows < min(2 * count / experts, MOST_ROWS):
        rows *= 2
    column = sum(value_bytes(w) for w in weights) // (experts * inner)
    step = 256 if isinstance(weights[0], Fp4Weights) else 128  # a lane of e2m1 holds two columns
    sizes = [size for size in range(step, inner, step) if inner % size == 0]
    fitting = [size for size in [*sizes, inner] if size * column <= block_bytes]
    block = max(fitting, default=min([*sizes, inner]))
    return Plan(width, inner, rows, block, min(count, count // rows + experts))


def traffic(
    x: Array,
    weights: Triple,
    routing: tuple[Array, Array, Array],
    *,
    limit: float,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[int, int, int]:
    """Bytes that a call reads and writes, and the fewest possible.

    Arguments are those of `grouped_matmul`; of abstract ones every pair has an expert of its own
    as far as there are experts, and the others are spread evenly. Counted beside the kernel are
    the rows sorted before it and gathered after it. The fewest are the weights of the experts in
    use, the rows and the routing read once, and the result written once.
    """
    expert, _, live = routing
    plan = make_plan(weights, expert.shape, block_bytes)
    experts = weights[0].shape[0]
    if isinstance(expert, jax.ShapeDtypeStruct):
        count = np.bincount(np.arange(expert.size) % experts, minlength=experts)
    else:
        count = np.bincount(np.asarray(expert)[np.asarray(live)].ravel(), minlength=experts)
    tiles = -(-count // plan.rows)
    each = nbytes(weights) // experts
    # With one block of the hidden width a second tile of an expert finds its weights in VMEM.
    reads = int(tiles.sum()) if plan.blocks > 1 else int((count > 0).sum())
    row = plan.width * (4 if x.dtype == jnp.float32 else 2)
    places, used = plan.tiles * plan.rows, int(tiles.sum()) * plan.rows
    out = x.shape[0] * plan.width * 4
    rest = nbytes(routing)
    fewest = int((count > 0).sum()) * each + nbytes(x) + rest + out
    read = reads * each + (places + used) * row + expert.size * plan.width * 4 + rest
    return read, places * row + used * plan.width * 4 + out, fewest


def value_bytes(w: Weights) -> int:
    """Bytes of weights without their scales."""
    return nbytes(jax.tree.leaves(w)[0])
