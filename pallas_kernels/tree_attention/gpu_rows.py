"""Single rows from device memory into the swizzled shared memory that wgmma reads.

TMA copies boxes, and Mosaic GPU lets it write no less than the 8 lines of a tile, so rows that lie
apart are copied by `cp.async`, 16 bytes a thread at a time, each to its place in a tile. What the
hardware reads there is given by PTX ISA, "Shared memory layout" of asynchronous warpgroup matrices:
a line of a tile is as long as the swizzle, and bits 4 and up of an address, which number the pieces
of 16 bytes of a line, are xored with as many from bit 7 up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, nvvm

PIECE = 16
"""Bytes that a thread copies at once: the most of `cp.async`."""
THREADS = 128
LINES = 8
"""Lines of a tile of shared memory."""


class Step(NamedTuple):
    """Which piece of which row a thread copies, and where to; integers, or MLIR values."""

    row: Any
    piece: Any  # of the row
    tile: Any  # down the rows
    column: Any  # tile along the row
    offset: Any  # bytes from the start of the tile


def step_of(number: Any, pieces: int, swizzle: int) -> Step:
    """Piece `number` of rows of so many pieces, which go to tiles of 8 lines of `swizzle` bytes."""
    row, piece = number // pieces, number % pieces
    line, along = row % LINES, piece % (swizzle // PIECE)
    # From bit 7 up an address numbers groups of 128 bytes, which are one line or more.
    place = along ^ (line // (128 // swizzle))
    offset = line * swizzle + place * PIECE
    return Step(row, piece, row // LINES, piece // (swizzle // PIECE), offset)


def together(place: Any) -> int:
    """Rows of one `copy_rows` to `[.., K]`: whole tiles, and as many pieces for every thread."""
    rows, pieces = LINES, place.shape[-1] * jnp.dtype(place.dtype).itemsize // PIECE
    while rows * pieces % THREADS:
        rows *= 2
    return rows


class Number:
    """A whole number, not negative, that is known when the kernel runs: an i32 of MLIR."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    def _with(self, operation: Callable[..., ir.Value], other: int | Number) -> Number:
        value = self.value
        second = other.value if isinstance(other, Number) else utils.c(other, value.type)
        return Number(operation(value, second))

    def __add__(self, other: int | Number) -> Number:
        return self._with(arith.addi, other)

    def __mul__(self, other: int | Number) -> Number:
        return self._with(arith.muli, other)

    def __floordiv__(self, other: int | Number) -> Number:
        return self._with(arith.divui, other)

    def __mod__(self, other: int | Number) -> Number:
        return self._with(arith.remui, other)

    def __xor__(self, other: int | Number) -> Number:
        return self._with(arith.xori, other)


def copy_rows(source: Any, index: Any, place: Any) -> None:
    """Starts the copy of rows by a warpgroup, `together` of them or a multiple.

    Args:
        source: `[M, K]` in device memory, or columns of it.
        index: `[rows]` int32 in device memory: rows of `source`.
        place: `[rows, K]` in shared memory, in swizzled tiles of 8 lines of 64.
    """
    columns = 64
    swizzle = columns * jnp.dtype(place.dtype).itemsize
    tiles = plgpu.TilingTransform((LINES, columns)), plgpu.SwizzleTransform(swizzle)
    pieces = place.shape[1] * jnp.dtype(place.dtype).itemsize // PIECE

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(tiles)))
    def start(context: Any, source: ir.Value, index: ir.Value, place: ir.Value) -> None:
        i32 = ir.IntegerType.get_signless(32)
        thread = Number(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)))
        for turn in range(index.type.shape[0] * pieces // THREADS):
            step = step_of(thread % THREADS + turn * THREADS, pieces, swizzle)
            _copy_piece(source, index, place, step)

    start(source, index, place)


def _copy_piece(source: ir.Value, index: ir.Value, place: ir.Value, step: Step) -> None:
    i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
    element = utils.bytewidth(source.type.element_type)
    number = arith.index_cast(ir.IndexType.get(), step.row.value)
    row = arith.extui(i64, memref.load(index, [number]))
    strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
    first = arith.muli(row, utils.c(strides[0] * element, i64))
    first = arith.addi(first, arith.extui(i64, (step.piece * PIECE).value))
    strides, _ = ir.MemRefType(place.type).get_strides_and_offset()
    tile = step.tile * (strides[0] * element) + step.column * (strides[1] * element)
    given = utils.getelementptr(utils.memref_ptr(source), [first], byte)
    given = llvm.addrspacecast(llvm.PointerType.get(address_space=1), given)
    wanted = utils.getelementptr(utils.memref_ptr(place), [(tile + step.offset).value], byte)
    nvvm.cp_async_shared_global(wanted, given, PIECE, nvvm.LoadCacheModifierKind.CG)


def close_group() -> None:
    """What `copy_rows` started since the last call, nothing too, is one group to wait for."""

    @plgpu.inline_mgpu()
    def close(context: Any) -> None:
        nvvm.cp_async_commit_group()

    close()


def await_copies(under_way: int) -> None:
    """Waits for all groups of this warpgroup but the last so many.

    `plgpu.commit_smem` has to follow before wgmma reads what was copied.
    """

    @plgpu.inline_mgpu()
    def wait(context: Any) -> None:
        context.await_cp_async_copy(under_way)

    wait()
