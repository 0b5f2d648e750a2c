"""The TPU kernel of the indexer's selection, interpreted, against its definition."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_topk import ref, tpu
from tests.pallas_kernels.cases_index_topk import (
    CASES,
    DTYPES,
    QUICK,
    TRUE_CASES,
    Case,
    avals,
    check,
    make,
)
from tests.pallas_kernels.interpreted import run_interpreted

BY_NAME = {case.name: case for case in CASES}
QUICK_DTYPES = ("float32", "fp8", "bfloat16")  # of the cases in QUICK


def select(case: Case, dtype: str, seed: int = 0, **choices: int) -> None:
    operands = make(case, dtype, seed)
    kernel = functools.partial(tpu.index_topk, topk=case.topk, **choices)
    check(case, operands, run_interpreted(kernel, *operands))


@pytest.mark.parametrize(
    ("case", "dtype"), [*zip(QUICK, QUICK_DTYPES, strict=True)], ids=lambda x: getattr(x, "name", x)
)
def test_selects_as_its_definition(case: Case, dtype: str) -> None:
    select(case, dtype, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_selects_as_its_definition_at_all_shapes(case: Case, dtype: str) -> None:
    select(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nano-wide-tree", "nano-prefill", "flash-sixteen"])
def test_node_tiles_and_small_key_tiles_select_the_same(name: str) -> None:
    select(BY_NAME[name], "bfloat16", tile=128, score_bytes=1)


def test_all_that_is_visible_is_selected_without_a_kernel() -> None:
    case = BY_NAME["nano-few-entries"]
    for capacity, own in [(9, 6), (0, 6), (32, 0), (31, 1), (1, 31)]:
        sized = case._replace(capacity=capacity, own=own, committed=(capacity, capacity // 2))
        operands = make(sized, "float32")
        select = jax.jit(functools.partial(tpu.index_topk, topk=case.topk))
        check(sized, operands, select(*operands))


def test_the_check_sees_a_choice_that_is_not_the_first_of_equals() -> None:
    """And so a kernel that breaks ties otherwise fails it."""
    case = BY_NAME["flash-ties"]
    operands = make(case, "float32")
    scores = np.asarray(ref.index_scores(operands.q, operands.weight, operands.entries.keys))
    chosen, own = ref.index_topk(*operands, topk=case.topk)
    words = np.array(chosen)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    node = bits[0, 0]
    least = scores[0, 0][: case.committed[0]][node[: case.committed[0]] == 1].min()
    equal = np.flatnonzero(scores[0, 0][: case.committed[0]] == least)
    inside, outside = (equal[node[equal] == bit] for bit in (1, 0))
    assert len(outside) > 0
    node[inside[-1]], node[outside[0]] = 0, 1
    wrong = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)
    check(case, operands, (chosen, own))
    with pytest.raises(AssertionError):
        check(case, operands, (jnp.asarray(wrong), own))


@pytest.mark.parametrize("dtype", DTYPES)
def test_trees_move_few_more_bytes_than_they_must(dtype: str) -> None:
    for case in TRUE_CASES:
        operands = avals(case, dtype)
        read, written, fewest = tpu.traffic(*operands, topk=case.topk)
        if case.nodes <= 8:
            assert fewest <= read + written <= 1.15 * fewest


def test_traffic_counts_the_tiles_that_sequences_use() -> None:
    case = Case("ragged", 8, 4, 32, 4096, (4096, 1, 0, 1025), 8, 32)
    operands = make(case, "float32")
    full, _, _ = tpu.traffic(*_abstract(operands), topk=32)
    read, written, fewest = tpu.traffic(*operands, topk=32)
    assert full - read == (4 * 4096 - 4096 - 1024 - 1024 - 2048) * 32 * 4
    assert written == 4 * 4 * 8 * (128 + 1)
    assert fewest - written - (full - 4 * 4096 * 128) == (4096 + 1 + 1025) * 128


def _abstract(operands):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
