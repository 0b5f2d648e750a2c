"""The Hopper kernel against the definition, in the interpreter: races, NaN, ragged ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention import gpu
from pallas_kernels.tree_attention.gpu_tiles import padded_heads
from tests.pallas_kernels.cases_tree_attention import CASES, Case, bound, compare, draw, expected

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="this jax's interpreter of GPU kernels transposes no operand of wgmma; 0.12's does",
)
HELD = [case for case in CASES if case.dtype == "bfloat16"]
QUICK = ("sliding-tree", "hca-one-entry", "csa-few-entries", "csa-decode", "flash-hca")
BY_NAME = {str(case): case for case in HELD}


def run(case: Case, arguments: Any = None, **keywords: Any) -> jax.Array:
    interpret = plgpu.InterpretGPUParams(detect_races=True)

    def kernel(*given: Any, position: Any) -> jax.Array:
        return gpu.tree_attention(*given, position=position, interpret=interpret, **keywords)

    call, arrays = bound(kernel, arguments or draw(case))
    return jax.jit(call)(*arrays)


def hold(case: Case, **keywords: Any) -> None:
    compare(case, run(case, **keywords), expected(draw(case)))


@interpreted
@pytest.mark.parametrize("name", QUICK)
def test_a_few_cases_agree_with_the_definition(name: str) -> None:
    hold(BY_NAME[f"{name}-bfloat16"])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("case", HELD, ids=str)
def test_every_case_agrees_with_the_definition(case: Case) -> None:
    hold(case)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "gather"])
@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
def test_splits_change_nothing_even_where_some_have_no_key(splits: int, mode: str) -> None:
    hold(BY_NAME["csa-stream-bfloat16"], splits=splits, mode=mode)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "gather"])
@pytest.mark.parametrize(
    "name",
    [
        "csa-empty-bfloat16",
        "csa-empty-fp8",
        "csa-one-entry-bfloat16",
        "csa-one-entry-fp8",
        "csa-few-entries-fp8",
        "csa-stream-bfloat16",
        "csa-gather-fp8",
        "chain-csa-bfloat16",
        "nano-csa-narrow-bfloat16",
    ],
)
def test_either_plan_agrees_with_the_definition(name: str, mode: str) -> None:
    hold(BY_NAME[name], mode=mode)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "fp8"])
@pytest.mark.parametrize("mode", ["stream", "gather"])
@pytest.mark.parametrize(
    ("heads", "dim", "nodes"), [(1, 128, 3), (3, 64, 5), (64, 512, 2), (80, 192, 2)]
)
def test_any_number_of_heads_fits(heads: int, dim: int, nodes: int, mode: str, form: str) -> None:
    case = BY_NAME["csa-few-entries-bfloat16"]
    case = case._replace(heads=heads, dim=dim, nodes=nodes, form=form, rotary=min(64, dim // 2))
    hold(case, mode=mode)


@interpreted
@pytest.mark.slow
def test_heads_of_one_node_read_what_it_selects_alone() -> None:
    """64 heads are one node's: entries that no node of the block selects may hold anything."""
    case = BY_NAME["csa-gather-bfloat16"]._replace(heads=64, nodes=3)
    given = draw(case)
    octets = np.asarray(given.committed.selected).view(np.uint8)
    chosen = np.unpackbits(octets, axis=-1, bitorder="little").any(1)[:, : case.capacity]
    kept = jnp.where(chosen[..., None], given.committed.entries, jnp.nan)
    compare(
        case,
        run(case, given._replace(committed=given.committed._replace(entries=kept))),
        expected(given),
    )


@interpreted
def test_a_sibling_changes_no_bit() -> None:
    """A node's result depends on nothing that it does not see."""
    case = BY_NAME["csa-few-entries-bfloat16"]
    given = draw(case)
    before = run(case, given)
    bits = given.own.row_bits[:, :, 0]
    other = jnp.arange(case.nodes) == case.nodes - 1  # the last node has no descendants
    rows = jnp.where(other[:, None], given.own.rows + 1, given.own.rows)
    after = run(case, given._replace(own=given.own._replace(rows=rows)))
    blind = (bits >> (case.nodes - 1)) & 1 == 0
    assert blind.sum() == blind.size - len(case.lengths)  # itself alone
    assert (jnp.where(blind[..., None, None], before - after, 0) == 0).all()
    assert (jnp.where(blind[..., None, None], 0, before - after) != 0).any()


def test_heads_fill_rows_of_64() -> None:
    wanted = {1: 1, 3: 4, 4: 4, 33: 64, 64: 64, 65: 128, 128: 128}
    assert {heads: padded_heads(heads) for heads in wanted} == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dim": 96}, "head dims 64, 128"),
        ({"dim": 320}, "head dims 64, 128"),
        ({"dim": 640}, "head dims 64, 128"),
    ],
)
def test_what_the_kernel_cannot_take_is_said(change: dict[str, Any], words: str) -> None:
    case = BY_NAME["csa-few-entries-bfloat16"]._replace(**change)
    given = draw(case)
    with pytest.raises(ValueError, match=words):
        gpu.tree_attention(*given[:4], position=given.position)


@pytest.mark.parametrize("splits", [3, 32])
def test_splits_that_are_no_cluster_are_refused(splits: int) -> None:
    given = draw(BY_NAME["csa-few-entries-bfloat16"])
    with pytest.raises(ValueError, match=f"splits must be one of 1, 2, 4, 8, 16; got {splits}"):
        gpu.tree_attention(*given[:4], position=given.position, splits=splits)
