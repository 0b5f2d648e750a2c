"""`tuned.toml`: what it may hold, which bucket counts, and that kernels take what it says."""

import inspect

import jax
import pytest

from pallas_kernels import (
    dispatch,
    grouped_matmul,
    hyper_mixing,
    index_topk,
    tree_attention,
    tuning,
)
from tests.pallas_kernels.test_dispatch import DEVICES, compiling_for

ROW = '[[index_topk]]\ndevice = "TPU v6 lite"\nsource = "a test"\n'
GOOD = ROW + "up_to = { nodes = 8 }\nchoose = { tile = 64 }\n"
OPS = {
    "tree_attention": tree_attention,
    "index_topk": index_topk,
    "grouped_matmul": grouped_matmul,
    "hyper_mixing": hyper_mixing,
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[index_topk]\n", "Expected"),
        ("[[index_topq]]\n", "unknown op: 'index_topq'"),
        ("[index_topk]\n", "must be a list of tables"),
        (GOOD + "tyle = 3\n", "unknown key of index_topk: 'tyle'"),
        (ROW + "choose = { tile = 64 }\n", "lacks up_to"),
        (GOOD.replace("nodes", "heads"), "unknown size of index_topk: 'heads'"),
        (GOOD.replace("64", "0"), "whole numbers above 0"),
        (GOOD.replace("64", "true"), "whole numbers above 0"),
        (GOOD.replace("64", "[64]"), "whole numbers above 0 and words"),
        (GOOD.replace("8 }", '"8" }'), "whole numbers above 0"),
        (GOOD.replace('"TPU v6 lite"', "6"), "device of index_topk must be text"),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tuning.read_tuned(text)


def test_the_first_bucket_that_holds_a_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    any_size = ROW + "up_to = {}\nchoose = { tile = 512 }\n"
    read = tuning.read_tuned(GOOD + any_size)
    monkeypatch.setattr(tuning, "_shipped", lambda: read)

    def chosen(device: str, nodes: int) -> dict[str, int]:
        return tuning.select("index_topk", device, {"batch": 1, "nodes": nodes, "entries": 9})

    assert chosen("TPU v6 lite", 8) == {"tile": 64}
    assert chosen("TPU v6 lite", 9) == {"tile": 512}
    assert chosen("TPU v5", 8) == {}


def test_kernels_take_their_choices_and_definitions_none(monkeypatch) -> None:
    read = tuning.read_tuned(GOOD)
    monkeypatch.setattr(tuning, "_shipped", lambda: read)
    backends = {name: (lambda **choices: choices) for name in ("ref", "cpu", "tpu", "gpu")}
    sizes = {"batch": 1, "nodes": 1, "entries": 9}

    def run(impl: str) -> dict[str, int]:
        return dispatch.resolve(impl, "index_topk", backends, sizes=sizes)()

    assert run("auto") == {}
    with compiling_for("tpu"):
        assert run("tpu") == run("auto") == {"tile": 64}
        assert run("ref") == run("cpu") == {}
    with compiling_for("gpu"):
        assert run("gpu") == {}


def test_what_ships_is_what_the_kernels_take() -> None:
    kinds = {
        "TPU v5 lite": "tpu",
        "TPU v5": "tpu",
        "TPU v6 lite": "tpu",
        "TPU7x": "tpu",
        "NVIDIA H100 80GB HBM3": "gpu",
        "NVIDIA H200": "gpu",
    }
    assert {kind for kind, _ in DEVICES.values()} <= kinds.keys()
    assert jax.devices()[0].device_kind not in kinds
    for op_name, buckets in tuning._shipped().items():
        for bucket in buckets:
            kernel = OPS[op_name].op.BACKENDS[kinds[bucket.device]]
            parameters = inspect.signature(kernel).parameters
            taken = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
            assert bucket.choose.keys() <= taken
