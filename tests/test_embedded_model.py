"""The embedded model through the whole engine: layers, MTP drafter, slots, tokenizer."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec import Engine, Request, RunConfig, load_checkpoint
from jaxspec.resources import model_dir
from jaxspec.text import Tokenizer

PROMPTS = [
    Request("short", "What is 3 plus 4?"),
    Request(
        "long", "Tom has 12 apples and gives 5 of them to each of his " + "good " * 90 + "friends."
    ),
    Request("limit", "Write a function that adds two numbers.", max_new_tokens=7),
    Request("one", "Name a colour.", max_new_tokens=1),
]


@pytest.mark.xdist_group("embedded model")
@pytest.mark.usefixtures("full_compile")
@pytest.mark.parametrize("method", [pytest.param("linear", marks=pytest.mark.slow), "tree"])
def test_a_draft_changes_no_token_of_what_is_sampled_or_greedy(method: str) -> None:
    """Four prompts in two slots, so that freed slots are used; one answer passes the window."""
    params, cfg = load_checkpoint("nano", dtype="float32")
    tokenizer = Tokenizer.load(model_dir("nano"))
    plain = RunConfig(method="none", batch_size=2, max_new_tokens=40, dtype="float32")
    drafting = dataclasses.replace(plain, method=method, budget=6)
    for temperature in (0.0, 0.8):
        streams = []
        for run in (plain, drafting):
            run = dataclasses.replace(run, temperature=temperature)
            engine = Engine(params, cfg, run, tokenizer=tokenizer)
            streams.append([each.token_ids for each in engine.generate(PROMPTS)])
            assert (engine.statistics.accepted_length > 1.2) == (run.method != "none")
        assert streams[0] == streams[1]
        start, count = len(engine.answers[1].prompt), len(streams[0][1])
        assert start < cfg.sliding_window < start + count
        assert [len(ids) for ids in streams[0]][2:] == [7, 1]
