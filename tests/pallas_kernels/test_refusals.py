"""What the GPU kernels cannot take: named, they say why; `auto` takes the definition and logs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from pallas_kernels import dispatch, grouped_matmul, index_topk, tree_attention
from pallas_kernels.grouped_matmul.packed import pack_fp8
from tests.pallas_kernels import cases_index_topk, cases_tree_attention

ATTENTION = {str(case): case for case in cases_tree_attention.CASES}["csa-few-entries-bfloat16"]
INDEXER = {case.name: case for case in cases_index_topk.CASES}["nano-tree"]


class Call(NamedTuple):
    """A call of an op that takes `impl`, and what the refusal says."""

    op: str
    run: Callable[[str], Any]
    words: str


def attention(words: str, **change: Any) -> Call:
    given = cases_tree_attention.draw(ATTENTION._replace(**change))
    position = given.position
    return Call(
        "tree_attention",
        lambda impl: tree_attention.tree_attention(*given[:4], position=position, impl=impl),
        words,
    )


def indexer(words: str, dtype: str, **change: Any) -> Call:
    case = INDEXER._replace(**change)
    operands = cases_index_topk.make(case, dtype)
    if words == "float32 and float8_e4m3fn":
        operands = operands._replace(q=operands.q.astype("float32"))
    return Call(
        "index_topk",
        lambda impl: index_topk.index_topk(*operands, topk=case.topk, impl=impl),
        words,
    )


def experts(words: str, is_packed: bool) -> Call:
    rng = np.random.default_rng(3)
    x, w1, w3, w2 = (
        jax.numpy.asarray(rng.standard_normal(shape), "float32")
        for shape in ((5, 16), (4, 8, 16), (4, 8, 16), (4, 16, 8))
    )
    weights = [pack_fp8(w) if is_packed else w for w in (w1, w3, w2)]
    expert = jax.numpy.asarray(rng.integers(0, 4, (5, 2)))
    share = jax.numpy.full((5, 2), 0.5)
    return Call(
        "grouped_matmul",
        lambda impl: grouped_matmul.grouped_matmul(x, *weights, expert, share, limit=10, impl=impl),
        words,
    )


REFUSED: dict[str, Callable[[], Call]] = {
    "attention-dtype": lambda: attention("no float32, .* got float32", dtype="float32"),
    "attention-width": lambda: attention("head dims 64, 128, .* got 96", dim=96),
    "attention-bytes": lambda: attention("not Fp8Bytes", form="bytes"),
    "attention-words": lambda: attention("not Bf16Words", form="words"),
    "indexer-dtype": lambda: indexer("got float32 and float32", "float32"),
    "indexer-dtype-of-queries": lambda: indexer("float32 and float8_e4m3fn", "fp8"),
    "indexer-width": lambda: indexer("keys of 32, 64, .* got 48", "bfloat16", dim=48),
    "experts": lambda: experts("no kernel for GPUs; use 'auto' or 'ref'", False),
    "experts-packed": lambda: experts("no kernel for GPUs; use 'auto' or 'ref'", True),
}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if JAX ran on a GPU: what is chosen there, computed here."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    dispatch._log_fallback.cache_clear()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", REFUSED)
def test_named_it_raises_and_auto_takes_the_definition(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = REFUSED[name]()
    with pytest.raises(ValueError, match=f"impl 'gpu' of {call.op} cannot run: .*{call.words}"):
        call.run("gpu")
    with caplog.at_level(logging.WARNING, logger="pallas_kernels.dispatch"):
        results = [call.run("auto") for _ in range(2)]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{call.op} falls back to its definition: ")
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result, call.run("ref"))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("op", "call"),
    [
        (tree_attention, lambda: attention("")),
        (tree_attention, lambda: attention("", form="fp8")),
        (tree_attention, lambda: attention("", ratio=0, capacity=0, topk=0)),
        (index_topk, lambda: indexer("", "bfloat16")),
        (index_topk, lambda: indexer("", "fp8")),
    ],
)
def test_what_it_takes_is_not_refused(
    op: Any, call: Callable[[], Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(op.op.BACKENDS, "gpu", lambda *given, **static: "the kernel")
    assert call().run("auto") == call().run("gpu") == "the kernel"


@pytest.mark.parametrize("name", ["attention-dtype", "attention-bytes", "indexer-width"])
def test_a_kernel_called_by_itself_says_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {"tree_attention": tree_attention.op, "index_topk": index_topk.op}
    call = REFUSED[name]()
    op = kernels[call.op]
    monkeypatch.setattr(op, "resolve", lambda *names, **static: op.BACKENDS["gpu"])
    with pytest.raises(ValueError, match=call.words):
        call.run("gpu")
