"""The engine on TPU kernels, interpreted on the CPU, against the engine on their definitions."""

import dataclasses

import pytest

from jaxspec import Engine, Request, RunConfig, load_checkpoint
from jaxspec.demo import PROMPTS
from jaxspec.resources import model_dir
from jaxspec.text import Tokenizer
from tests.conftest import TINY
from tests.serial import random_model

REF = RunConfig(impl="ref", max_new_tokens=3)


def tokens(model, run: RunConfig, requests: list[Request]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in Engine(model[0], model[1], run).generate(requests)]


def equal(model, run: RunConfig, requests: list[Request]) -> None:
    """Both implementations emit the same tokens."""
    expected = tokens(model, run, requests)
    assert min(map(len, expected)) > 1
    kernels = dataclasses.replace(run, impl="tpu", interpret=True)
    assert tokens(model, kernels, requests) == expected


def test_a_csa_layer_decodes_the_same_tokens(tmp_path) -> None:
    """Prefill and single tokens of one layer with all three ops; entries are more than top-k."""
    model = random_model(tmp_path, TINY | {"compress_ratios": [4]})
    run = dataclasses.replace(REF, method="none")
    equal((model.params, model.cfg), run, [Request(id=1, prompt=tuple(range(3, 24)))])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["tree", "linear"])
def test_all_layer_kinds_draft_and_verify_the_same_tokens(tmp_path, method: str) -> None:
    sizes = {"compress_ratios": [0, 4, 8, 0], "num_nextn_predict_layers": 1}
    model = random_model(tmp_path, TINY | sizes)
    requests = [Request(id=1, prompt=tuple(range(3, 24))), Request(id=2, prompt=(5, 6, 7))]
    run = dataclasses.replace(REF, method=method, budget=4, batch_size=2, max_new_tokens=8)
    equal((model.params, model.cfg), run, requests)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_embedded_model_emits_the_same_tokens() -> None:
    params, cfg = load_checkpoint("nano", dtype="float32")
    ids = Tokenizer.load(model_dir("nano")).encode_chat(PROMPTS[0], ())
    run = dataclasses.replace(REF, budget=4, max_new_tokens=6)
    equal((params, cfg), run, [Request(id=1, prompt=tuple(ids))])
