"""Single rows copied into swizzled shared memory: every piece lies where the hardware reads it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func
from jaxlib.mlir.passmanager import PassManager

from pallas_kernels.tree_attention.gpu_rows import LINES, PIECE, THREADS, Number, step_of, together


def copied(source: np.ndarray, swizzle: int, rows: int) -> np.ndarray:
    """Shared memory after copies of `rows` rows each of `source`, bytes `[64, row bytes]`."""
    pieces = source.shape[1] // PIECE
    across = source.shape[1] // swizzle
    memory = np.zeros(source.size, np.uint8)
    filled = np.zeros(source.size, int)
    for first in range(0, len(source), rows):
        for number in range(rows * pieces):
            step = step_of(number, pieces, swizzle)
            tile = ((first // LINES + step.tile) * across + step.column) * LINES * swizzle
            place = slice(tile + step.offset, tile + step.offset + PIECE)
            wanted = source[first + step.row, step.piece * PIECE : (step.piece + 1) * PIECE]
            memory[place], filled[place] = wanted, filled[place] + 1
    assert (filled == 1).all()
    return memory


@pytest.mark.parametrize("width", [64, 128, 192, 320, 512])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_pieces_lie_where_the_hardware_reads_them(width: int, dtype: Any) -> None:
    size = jnp.dtype(dtype).itemsize
    swizzle, place = 64 * size, ShapeDtypeStruct((64, width), dtype)
    rows = together(place)
    assert 64 % rows == 0
    assert rows % LINES == 0
    assert rows * width * size % (THREADS * PIECE) == 0
    source = np.random.default_rng(width).integers(0, 256, (64, width * size), np.uint8)
    memory = copied(source, swizzle, rows)
    # Tiles of 8 lines, and bits 4 and up of an address are xored with as many from bit 7 up.
    row, byte = np.meshgrid(np.arange(64), np.arange(width * size), indexing="ij")
    tile = row // LINES * (width // 64) + byte // swizzle
    address = (tile * LINES + row % LINES) * swizzle + byte % swizzle
    address ^= (address >> 7) % (swizzle // PIECE) << 4
    np.testing.assert_array_equal(memory[address], source)


@pytest.mark.parametrize(("pieces", "swizzle"), [(64, 128), (24, 128), (8, 128), (4, 64), (28, 64)])
def test_the_kernel_counts_as_python_does(pieces: int, swizzle: int) -> None:
    numbers = [0, 1, 7, 127, 128, 517, 2047]
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        i32 = ir.IntegerType.get_signless(32)
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("steps", ([], [i32] * 5 * len(numbers)))
            with ir.InsertionPoint(function.add_entry_block()):
                given = [Number(arith.constant(i32, number)) for number in numbers]
                steps = [step_of(number + 0, pieces, swizzle) for number in given]
                func.return_([part.value for step in steps for part in step])
        PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        block = function.entry_block
        found = [x.owner.attributes["value"].value for x in block.operations[-1].operands]
    want = [part for number in numbers for part in step_of(number, pieces, swizzle)]
    assert found == want
