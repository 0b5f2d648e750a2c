"""Requests in, completions out: each is the stream of plain decoding, wherever it was decoded."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxspec.engine import Engine
from jaxspec.errors import UsageError
from jaxspec.requests import Request, Turn
from jaxspec.results import Completion, Emission
from jaxspec.settings import RunConfig
from tests.doubles import VOCAB, Letters, Toy, Wish, dice_drafter, plain_stream

RUN = RunConfig(
    method="tree", budget=8, batch_size=3, max_new_tokens=14, max_len=64, temperature=0.9, seed=3
)


@pytest.fixture
def make_engine(toy, drafter, monkeypatch) -> Callable[..., Engine]:
    """Makes engines of the toy model that draft with its drafter, unless the method is none."""

    def make(tokenizer=None, **changes) -> Engine:
        run = dataclasses.replace(RUN, **changes)
        if run.method != "none":
            monkeypatch.setattr("jaxspec.engine.select_drafter", lambda cfg, run: drafter)
        return Engine(toy.params, toy.cfg, run, tokenizer)

    return make


def requests_of(seed: int, count: int = 9) -> list[Request]:
    """Prompts of several lengths, with and without a limit and a seed of their own."""
    rng = random.Random(seed)
    return [
        Request(
            id=f"request {index}" if index % 2 else index,
            prompt=tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 7, 33, 40]))),
            max_new_tokens=(None, 1, 2, 9, 20)[index % 5],
            seed=rng.choice([None, 0, 2**32 - 1]),
        )
        for index in range(count)
    ]


def expect(toy: Toy, run: RunConfig, request: Request) -> list[int]:
    """Tokens of plain decoding on the host."""
    limit = request.max_new_tokens or run.max_new_tokens
    seed = request.resolve_seed(run.seed)
    return plain_stream(toy, Wish(request.prompt, limit, run.temperature, seed))[0]


def check(
    engine: Engine, requests: Sequence[Request], want: Sequence[Sequence[int]]
) -> list[Completion]:
    """Decodes and compares completions, emissions and statistics."""
    emissions: list[Emission] = []
    completions = engine.generate(requests, emissions.append)
    assert [completion.id for completion in completions] == [request.id for request in requests]
    assert [[*completion.token_ids] for completion in completions] == [[*x] for x in want]
    begun = list(dict.fromkeys(emission.index for emission in emissions))
    assert begun == list(range(len(requests)))
    steps, reached = 0, [0] * engine.drafter.depth
    for index, completion in enumerate(completions):
        mine = [emission for emission in emissions if emission.index == index]
        assert sum((emission.token_ids for emission in mine), ()) == completion.token_ids
        assert [emission.completion for emission in mine] == [None] * (len(mine) - 1) + [completion]
        mine = [emission for emission in mine if emission.token_ids]
        assert (len(mine[0].token_ids), mine[0].drafted) == (1, 0)  # prefill's
        for emission in mine[:-1]:
            assert len(emission.token_ids) == emission.drafted + 1
        assert len(mine[-1].token_ids) - mine[-1].drafted in (0, 1)
        for emission in mine[1:]:
            steps += 1
            for depth in range(emission.drafted):
                reached[depth] += 1
    figures = engine.statistics
    total = sum(map(len, want))
    assert (figures.rows, figures.tokens, figures.steps) == (len(requests), total, steps)
    assert figures.reached == tuple(reached)
    if steps:
        assert figures.accepted_length == (total - len(requests)) / steps
    assert figures.seconds > 0
    return completions


def test_a_request_gets_the_same_in_any_batch_slot_and_order(toy, make_engine):
    requests = requests_of(0)
    want = [expect(toy, RUN, request) for request in requests]
    counts = []
    for batch_size in (1, 3, 64):
        engine = make_engine(batch_size=batch_size)
        for order in (range(9), [4, 0, 8, 3, 7, 1, 6, 2, 5]):
            completions = check(engine, [requests[i] for i in order], [want[i] for i in order])
            counts.append(dataclasses.replace(engine.statistics, seconds=0.0))
            for completion in completions:
                ended = completion.token_ids[-1] == toy.cfg.eos_token_id
                assert completion.finish_reason == ("stop" if ended else "length")
                assert completion.text is completion.margins is None
    assert len({*counts}) == 1
    assert counts[0].reached[1] > 0
    assert {len(tokens) for tokens in want} >= {1, 2, RUN.max_new_tokens}


def test_many_requests_at_every_temperature(toy, make_engine):
    for temperature in (0.0, 1.3):
        engine = make_engine(temperature=temperature)
        for seed in range(1, 5):
            requests = requests_of(seed, 14)
            check(engine, requests, [expect(toy, engine.run, request) for request in requests])


def test_plain_decoding_and_its_margins(toy, make_engine):
    """A comparison's plain run records margins, and goes on from a copy to time the phases."""
    requests = requests_of(0)
    engine = make_engine(method="none", compare=True)
    want = [expect(toy, RUN, request) for request in requests]
    for request, completion in zip(requests, check(engine, requests, want), strict=True):
        seed, limit = request.resolve_seed(RUN.seed), len(completion.token_ids)
        wish = Wish(request.prompt, limit, RUN.temperature, seed)
        assert completion.margins == pytest.approx(plain_stream(toy, wish)[1], abs=2e-5)
    figures = engine.statistics
    assert figures.accepted_length == 1
    phases = (figures.draft_s, figures.verify_s, figures.commit_s)
    assert phases[0] == 0  # nothing is drafted
    assert all(phase is not None and phase > 0 for phase in phases[1:])


def test_a_seed_is_the_requests_own_or_made_of_the_runs_and_the_id(make_engine):
    prompt = (5, 6, 7)
    own, first, second = (
        Request(id, prompt, seed=seed) for id, seed in [(1, 9), (2, None), (3, None)]
    )
    again = dataclasses.replace(own, id="another")
    outputs = [
        [
            completion.token_ids
            for completion in make_engine(seed=seed).generate([own, first, second, again])
        ]
        for seed in (3, 3, 4)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == outputs[0][3] == outputs[2][0] == outputs[2][3]
    assert len({*outputs[0], *outputs[2]}) == 5


def test_stop_strings_end_a_completion_before_them(toy, make_engine):
    """Text prompts get the tokenizer's form; a slot that a stop string frees is filled again."""
    letters = Letters()
    prompts = [Request(index, "cdefghijklmnopqrstuvwx"[index:]) for index in range(12)]
    encoded = [
        dataclasses.replace(request, prompt=(0, *(ord(c) - 97 for c in request.prompt)))
        for request in prompts
    ]
    free = [expect(toy, RUN, request) for request in encoded]
    # Two letters from somewhere in each of the first seven answers.
    texts = [letters.decode(tokens) for tokens in free[:7]]
    stops = tuple(text[place : place + 2] for place, text in enumerate(texts) if len(text) > place)
    want = [until_stop(letters, tokens, stops) for tokens in free]
    engine = make_engine(letters, stop=stops)
    completions = check(engine, prompts, [tokens for tokens, _, _ in want])
    reasons = []
    for completion, (tokens, text, stopped) in zip(completions, want, strict=True):
        assert completion.text == text
        ended = stopped or tokens[-1] == toy.cfg.eos_token_id
        assert completion.finish_reason == ("stop" if ended else "length")
        reasons.append(stopped)
    assert {*reasons} == {True, False}
    assert any(len(a) < len(b) for (a, _, _), b in zip(want, free, strict=True))


def until_stop(letters: Letters, tokens: list[int], stops: Sequence[str]):
    """Tokens up to the one that completes a stop string, the text before it, and whether."""
    for count in range(1, len(tokens) + 1):
        text = letters.decode(tokens[:count])
        if found := [text.index(stop) for stop in stops if stop in text]:
            return tokens[:count], text[: min(found)], True
    return tokens, letters.decode(tokens), False


GOOD = Request(1, (2, 3))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Request(2, ()), "needs at least one token"),
        (Request(2, (3, -1)), "ids >= 0"),
        (Request(2, (3, VOCAB, 4)), f"token id {VOCAB}; the vocabulary ends at {VOCAB - 1}"),
        (Request(2, [3, VOCAB, 4]), f"token id {VOCAB}; the vocabulary ends at {VOCAB - 1}"),
        (Request(2, np.array([3, VOCAB])), f"token id {VOCAB}; the vocabulary ends"),
        (Request(2, (3, 2.5)), "each token id must be an integer, not 2.5"),
        (Request(2, np.array([3.0, 2.0])), "each token id must be an integer, not"),
        (Request(2, (3, True)), "each token id must be an integer, not True"),
        (Request(2, (3,), (Turn("user", "a"),)), "history goes with text"),
        (Request(2, (3,), max_new_tokens=2.0), "max_new_tokens must be an integer, not 2.0"),
        (Request(2, (3,), seed=1.5), "seed must be an integer, not 1.5"),
        (Request(2, (3,), seed=-1), "seed -1; it must be from 0 to 4294967295"),
        (Request(2, (3,), seed=2**40), "seed 1099511627776; it must be from 0"),
        (Request(2, "text"), "without a tokenizer"),
        (Request(2, (3,) * 65), "65 tokens, above the capacity of 64"),
        (Request(2, (3,) * 60), "from 1 to 5, not 14, at a capacity of 64"),
        (Request(2, (3,) * 60, max_new_tokens=np.int8(100)), "from 1 to 5, not 100"),
        (Request(2, (3,), max_new_tokens=65), "from 1 to 64, not 65"),
        (Request(2, (3,), max_new_tokens=0), "from 1 to 64, not 0"),
    ],
)
def test_one_bad_request_refuses_all_before_anything_is_decoded(make_engine, bad, words):
    emissions: list[Emission] = []
    engine = make_engine()
    with pytest.raises(UsageError, match=words) as error:
        engine.generate([GOOD, bad], emissions.append)
    assert "prompt 2" in str(error.value)
    assert "\n" not in str(error.value)
    assert not emissions
    assert engine.statistics.tokens == 0


def test_any_sequence_of_integers_is_a_prompt(toy, make_engine):
    """A list, an array or an iterator, and NumPy's integers."""
    prompt, engine = (2, 3, 4) * 6, make_engine()
    want = expect(toy, RUN, Request(1, prompt, max_new_tokens=40, seed=7))
    forms = [list(prompt), np.array(prompt, np.int8), iter(prompt)]
    asked = [
        Request(n, form, max_new_tokens=np.int8(40), seed=np.uint32(7))
        for n, form in enumerate(forms)
    ]
    check(engine, asked, [want] * len(forms))


def test_the_capacity_is_used_to_its_last_place(toy, make_engine):
    """The last token emitted has no row; without a max_len the model's own end is the limit."""
    full = [Request(1, (2,) * 64, max_new_tokens=1), Request(2, (3,) * 51), Request(3, (4,))]
    check(make_engine(), full, [expect(toy, RUN, request) for request in full])
    engine = make_engine(max_len=None)
    most = toy.cfg.max_position_embeddings
    with pytest.raises(UsageError, match=f"capacity of {most} .the model ends there"):
        engine.generate([Request(1, (2,) * most, max_new_tokens=2)])


def test_a_slot_whose_answer_ends_in_prefill_is_filled_again_at_once(toy, make_engine):
    """No step is taken while one waits and a slot is held by an answer that is whole."""
    engine = make_engine(batch_size=2)
    stepped: list[bool] = []
    step = engine._step

    def spy(state, *, steps, refill):
        stepped.append(bool(refill and np.asarray(state.done).any()))
        return step(state, steps=steps, refill=refill)

    engine._step = spy
    limits = (1, 9, 1, 1, 5, 1, 1)
    asked = [Request(n, (2 + n, 3), max_new_tokens=limit) for n, limit in enumerate(limits)]
    check(engine, asked, [expect(toy, RUN, request) for request in asked])
    assert len(stepped) > 1
    assert not any(stepped)


def test_the_device_knows_what_waits_and_what_a_stop_string_ended(toy, make_engine, monkeypatch):
    """A slot without an answer is done, and a step loop ends early while a request waits."""
    monkeypatch.setattr("jaxspec.engine.STEPS_A_LOOK", 1)
    letters, requests = Letters(), [Request(n, (n, 5), max_new_tokens=14) for n in range(12)]
    free = [expect(toy, RUN, request) for request in requests]
    stops = tuple({letters.decode(tokens[1:3]) for tokens in free[::2] if len(tokens) > 3})
    engine = make_engine(letters, stop=stops, batch_size=3)
    step, prefill = engine._step, engine._prefill
    begun, idle, waited = [], [], []

    def spy_prefill(answer, shapes):
        begun.extend([] if answer is None else [answer])
        return prefill(answer, shapes)

    def spy_step(state, *, steps, refill):
        if steps:
            held = [answer for answer in begun if answer.completion is None]
            assert (~np.asarray(state.done)).sum() <= len(held)
            idle.append(len(held) < 3)
            waited.append(refill)
            assert refill == (len(begun) < len(requests))
        return step(state, steps=steps, refill=refill)

    engine._prefill, engine._step = spy_prefill, spy_step
    check(engine, requests, [until_stop(letters, tokens, stops)[0] for tokens in free])
    assert {*waited} == {*idle} == {True, False}


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_runs_top_k_and_top_p_are_obeyed(toy, make_engine, narrow):
    """So narrow that what is sampled is what is likeliest."""
    requests = requests_of(6)
    engine = make_engine(temperature=1.3, **narrow)
    greedy = dataclasses.replace(RUN, temperature=0.0)
    check(engine, requests, [expect(toy, greedy, request) for request in requests])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_has_the_type_of_the_parameters(toy, make_engine, dtype):
    engine, dtypes = make_engine(), set()
    engine.params = jax.tree.map(lambda leaf: leaf.astype(dtype), toy.params)
    start = engine._start

    def spy(answers, shapes):
        state = start(answers, shapes)
        dtypes.add(state.draft.feature.dtype.name)
        return state

    engine._start = spy
    engine.generate([GOOD])
    assert dtypes == {dtype}


def test_no_requests_and_what_an_engine_cannot_be_made_of(toy, make_engine):
    engine = make_engine()
    assert engine.generate([]) == []
    figures = engine.statistics
    assert (figures.rows, figures.tokens, figures.steps, figures.accepted_length) == (0, 0, 0, None)
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        make_engine(stop=("a",))
    most = toy.cfg.max_position_embeddings
    with pytest.raises(UsageError, match=f"max_len {most + 1} is above the {most} positions"):
        make_engine(max_len=most + 1)


def test_a_model_without_an_mtp_block_cannot_draft(toy):
    with pytest.raises(UsageError, match="decode with method none"):
        Engine(toy.params, toy.cfg, RUN)
    assert Engine(toy.params, toy.cfg, dataclasses.replace(RUN, budget=1)).drafter.depth == 0


def test_an_engine_that_decodes_refuses_a_second_call_and_goes_on(toy, make_engine):
    """From its own callback or from another thread; the first call's answers stay its own."""
    engine, requests = make_engine(), requests_of(0)
    want = [expect(toy, RUN, request) for request in requests]
    refused: list[str] = []

    def call_again(_: Emission) -> None:
        with pytest.raises(RuntimeError, match="decoding already") as error:
            engine.generate(requests[:2])
        refused.append(str(error.value))

    def from_a_thread(emission: Emission) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(call_again, emission).result()

    for again in (call_again, from_a_thread):
        refused.clear()
        completions = engine.generate(requests, again)
        assert [[*completion.token_ids] for completion in completions] == want
        assert engine.statistics.tokens == sum(map(len, want))
        assert refused


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, StopIteration])
def test_a_callback_that_raises_leaves_an_engine_that_decodes(toy, make_engine, exception):
    """At the first token, in the midst and at the last; the figures are those of what was taken."""
    engine, requests = make_engine(), requests_of(0)
    want = [expect(toy, RUN, request) for request in requests]
    emissions: list[Emission] = []
    engine.generate(requests, emissions.append)
    for last in (1, len(emissions) // 2, len(emissions)):
        heard: list[Emission] = []

        def stop_at(emission: Emission, heard: list[Emission] = heard, last: int = last) -> None:
            heard.append(emission)
            if len(heard) == last:
                raise exception

        with pytest.raises(exception):
            engine.generate(requests, stop_at)
        assert heard == emissions[:last]
        figures, answers = engine.statistics, engine.answers
        assert figures.tokens >= sum(len(emission.token_ids) for emission in heard) > 0
        assert figures.tokens == sum(len(answer.tokens) for answer in answers)
        assert figures.rows == sum(bool(answer.tokens) for answer in answers)
        assert [a.tokens for a in answers] == [
            tokens[: len(a.tokens)] for a, tokens in zip(answers, want, strict=True)
        ]
        check(engine, requests, want)


def test_drafters_that_propose_differently_share_the_prefill(toy, make_engine, caplog):
    requests = requests_of(0)[:4]
    first = make_engine()
    first.generate(requests)
    other = dice_drafter(toy, nodes=3, depth=2, seed=1)
    second = make_engine()
    second.drafter = other
    # For all threads: the engine compiles in some of its own.
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING):
            check(second, requests, [expect(toy, RUN, request) for request in requests])
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [record.getMessage() for record in caplog.records]
    assert any(re.search("Compiling.*generate", line) for line in compiled)
    assert not any(re.search("Compiling.*prefill", line) for line in compiled)


def test_history_goes_through_the_tokenizer(make_engine):
    """What `encode_chat` gives is what is decoded."""
    seen = []

    class Spy(Letters):
        def encode_chat(self, prompt, history=()):
            seen.append((prompt, history))
            return super().encode_chat(prompt, history)

    turns = (Turn("user", "hello"),)
    engine = make_engine(Spy())
    text = engine.generate([Request(7, "ghi", turns, seed=1)])
    assert seen == [("ghi", turns)]
    assert text[0].token_ids == engine.generate([Request(7, (0, 6, 7, 8), seed=1)])[0].token_ids
    assert text[0].text == Letters().decode(text[0].token_ids)
