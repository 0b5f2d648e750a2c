"""The static sizes of a run: room for all that its requests commit and emit, and little more."""

from __future__ import annotations

import random

import pytest

from jaxspec.answer import Answer
from jaxspec.settings import RunConfig
from jaxspec.shapes import CHUNK_COST, CHUNKS, ROUND, plan


def answer_of(length: int, limit: int) -> Answer:
    return Answer(0, 0, (1,) * length, limit, seed=0, eos=-1, tokenizer=None, scan=None)


@pytest.mark.parametrize("seed", range(4))
def test_there_is_room_for_every_request_and_little_more(seed: int) -> None:
    """Limits lie above and below the run's own, and needs around every multiple of the rounding."""
    rng = random.Random(seed)
    for _ in range(200):
        answers = [
            answer_of(rng.randint(1, 140), rng.randint(1, 140)) for _ in range(rng.randint(1, 5))
        ]
        run = RunConfig(batch_size=rng.randint(1, 8), max_new_tokens=rng.randint(1, 200))
        shapes = plan(answers, run)
        assert shapes.batch == min(run.batch_size, len(answers))
        emitted = max(answer.limit for answer in answers)
        # The last token that is emitted is not committed.
        committed = max(len([*answer.prompt, *range(answer.limit)][:-1]) for answer in answers)
        for size, need in ((shapes.max_new, emitted), (shapes.max_len, committed)):
            assert size % ROUND == 0
            assert need <= size < need + ROUND
        given = rng.randint(committed, 300)
        assert plan(answers, RunConfig(budget=1, max_len=given)).max_len == given


@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [
        ([1], 32),
        ([32], 32),
        ([33], 64),  # one forward, for the most part padding, rather than two
        ([65], 128),
        ([512], 512),
        ([513], 128),
        ([33, 1, 1, 1, 1], 32),  # the many short ones count
    ],
)
def test_the_chunk_is_the_cheapest_for_the_prompts(lengths: list[int], chunk: int) -> None:
    def cost(size: int) -> int:
        return sum(size + CHUNK_COST for length in lengths for _ in range(0, length, size))

    found = plan([answer_of(length, 1) for length in lengths], RunConfig()).chunk
    assert cost(found) == min(map(cost, CHUNKS))
    assert found == chunk
