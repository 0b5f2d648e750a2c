"""Every kind of call that kernels are promised to be held to stands in the tables of cases.

A kind is a question about a case's sizes, never its name, so that a case that is taken out or cut
is missed here. Sizes of the models are those of their configurations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import ModelConfig, read_model_toml
from tests.pallas_kernels import cases_grouped_matmul as experts
from tests.pallas_kernels import cases_index_topk as index
from tests.pallas_kernels import cases_tree_attention as attention

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
FLASH, PRO, NANO = (read_model_toml(MODELS / f"{name}.toml") for name in ("flash", "pro", "nano"))
CUT = 8  # of the heads, the top-k, and the width of the experts, in cases like V4-Flash and V4-Pro
NODES = (1, 5, 6, 7, 8, 16, 64)
ATTENTION_BLOCK, INDEX_BLOCK, ROW_BLOCK = 512, 1024, 8
"""Entries and rows that the kernels take at a time, or a multiple of it."""

Kinds = dict[str, Callable[[Any], bool]]


def nodes(kinds: Iterable[int] = NODES) -> Kinds:
    """A tree of each number of nodes, and decoding."""
    return {f"N = {count}": lambda case, count=count: case.nodes == count for count in kinds}


def entries(case: attention.Case) -> list[int]:
    """Committed entries, one a sequence."""
    return [length // case.ratio for length in case.lengths]


def ends_a_block(size: int, block: int) -> bool:
    """Whether a capacity is more than a block and ends in a part of one, and of eight rows."""
    return size > block and size % block > 0 and size % 8 > 0


def attends_like(model: ModelConfig, cut: int = 1) -> Callable[[attention.Case], bool]:
    """All sizes of a model; of one that is cut, heads and top-k by `cut` and half the head dim."""

    def holds(case: attention.Case) -> bool:
        sizes = case.heads * cut, case.dim * (1 if cut == 1 else 2)
        rest = case.ratio in model.compress_ratios and case.window == model.sliding_window
        return (
            sizes == (model.num_attention_heads, model.head_dim)
            and case.topk * cut in {0, model.index_topk}
            and case.rotary == model.qk_rope_head_dim
            and (cut > 1 or rest)
        )

    return holds


COMPRESSED: Kinds = {
    "V4-Flash": attends_like(FLASH, CUT),
    "V4-Pro": attends_like(PRO, CUT),
    "nano": attends_like(NANO),
    "ragged lengths": lambda case: len(set(entries(case))) > 1,
    "an empty cache beside another": lambda case: 0 in entries(case) and max(entries(case)) > 0,
    "no entry in any cache": lambda case: not any(entries(case)),
    "one entry": lambda case: 1 in entries(case),
    "capacity ends a block": lambda case: ends_a_block(case.capacity, ATTENTION_BLOCK),
    "a full cache": lambda case: case.capacity in entries(case),
    "a prefill chunk": lambda case: case.kind == "chain" and case.nodes > case.window,
} | nodes()
CSA: Kinds = COMPRESSED | {
    "top-k is more than the entries": lambda case: case.topk > case.capacity + case.own_entries,
    "top-k is less than the entries": lambda case: case.topk < min(entries(case)),
}
SLIDING: Kinds = {
    "ragged lengths": lambda case: len(set(case.lengths)) > 1,
    "an empty cache": lambda case: 0 in case.lengths,
    "one token": lambda case: 1 in case.lengths,
    "a full ring": lambda case: max(case.lengths) > case.window,
    "a prefill chunk": lambda case: case.kind == "chain" and case.nodes > case.window,
} | nodes((1, 8, 64))

SELECTION: Kinds = {
    "V4-Flash": lambda case: selects_like(FLASH, case),
    "V4-Pro": lambda case: selects_like(PRO, case),
    "nano": lambda case: selects_like(NANO, case),
    "ragged lengths": lambda case: len(set(case.committed)) > 1,
    "an empty cache": lambda case: 0 in case.committed and case.capacity > 0,
    "no cache": lambda case: case.capacity == 0,
    "one entry": lambda case: 1 in case.committed,
    "capacity ends a block": lambda case: ends_a_block(case.capacity, INDEX_BLOCK),
    "a full cache": lambda case: case.capacity in case.committed,
    "top-k is more than the entries": lambda case: case.topk >= case.capacity + case.own,
    "top-k is more than some entries": lambda case: (
        min(case.committed) + case.own < case.topk < case.capacity
    ),
    "top-k is less than the entries": lambda case: case.topk < min(case.committed),
    "a prefill chunk": lambda case: case.nodes > 16 and case.own * 2 < case.nodes,
} | nodes()


def selects_like(model: ModelConfig, case: index.Case) -> bool:
    """Whether the indexer is the model's, whole."""
    whole = model.index_n_heads, model.index_head_dim, model.index_topk
    return (case.heads, case.dim, case.topk) == whole


ROUTED: Kinds = {
    "V4-Flash": lambda case: routes_like(FLASH, case, CUT),
    "V4-Pro": lambda case: routes_like(PRO, case, CUT),
    "rows that are not live": lambda case: 0 < case.live < 1,
    "no live row": lambda case: case.live == 0,
    "every row is live": lambda case: case.live == 1,
    "rows end a block": lambda case: case.rows > ROW_BLOCK and case.rows % ROW_BLOCK > 0,
    "fewer pairs than experts": lambda case: case.rows * case.choices < case.experts,
    "widths that end a tile": lambda case: case.width % 128 > 0 and case.inner % 128 > 0,
    "a prefill chunk": lambda case: case.rows > 128,
} | {f"{count} rows": lambda case, count=count: case.rows == count for count in NODES}
ROUTED_NANO: Kinds = {"nano": lambda case: routes_like(NANO, case, 1)}  # 144 is no sum of 32s


def routes_like(model: ModelConfig, case: experts.Case, cut: int) -> bool:
    """Width by `cut` and experts a token of a model, its other sizes by whole numbers."""
    inner, count = model.moe_intermediate_size, model.n_routed_experts
    whole = (inner, count) == (case.inner, case.experts)
    return (
        (case.width * cut, case.choices) == (model.hidden_size, model.num_experts_per_tok)
        and not (inner % case.inner or count % case.experts)
        and (cut > 1 or whole)
    )


TREES = [*attention.CASES, *attention.TPU_CASES]
WIDELY_TAKEN = [case for case in TREES if case.dtype == "bfloat16"]
"""Cases for every backend; those in float32 are no kernel's but the TPU's."""
TABLES = {
    "sliding": (SLIDING, [case for case in WIDELY_TAKEN if not case.ratio]),
    **{
        f"{layer}-{form}": (
            kinds,
            [
                case
                for case in WIDELY_TAKEN
                if case.ratio and bool(case.topk) == (layer == "CSA") and case.form == form
            ],
        )
        for layer, kinds in [("CSA", CSA), ("HCA", COMPRESSED)]
        for form in ("plain", "fp8", "bytes", "words")
    },
    "index": (SELECTION, index.CASES),
    **{
        f"experts-{kind}": (
            ROUTED if kind == "fp4" else ROUTED | ROUTED_NANO,
            [case for case in experts.CASES if case.takes(kind)],
        )
        for kind in experts.KINDS
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_each_kind_of_call_stands_in_the_table(name: str) -> None:
    kinds, cases = TABLES[name]
    missing = [kind for kind, holds in kinds.items() if not any(map(holds, cases))]
    assert missing == []


@pytest.mark.parametrize("name", TABLES)
def test_no_kind_is_every_case(name: str) -> None:
    """A question that every case answers would ask nothing."""
    kinds, cases = TABLES[name]
    assert [kind for kind, holds in kinds.items() if all(map(holds, cases))] == []


def test_keys_of_the_indexer_are_held_in_bfloat16_and_fp8() -> None:
    assert {"bfloat16", "fp8"} <= set(index.DTYPES)


@pytest.mark.parametrize("cases", [set(TREES), index.CASES, experts.CASES])
def test_no_two_cases_share_a_name(cases: Iterable[Any]) -> None:
    names = Counter(case.name if hasattr(case, "live") else str(case) for case in cases)
    assert [name for name, count in names.items() if count > 1] == []
