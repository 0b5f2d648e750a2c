"""What is counted of a request's steps, against plain walks of random trees."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.answer import Answer, News, acceptance_by_rank, tally
from jaxspec.text import StopScan
from jaxspec.verify import next_tokens, ranks, walk
from tests.doubles import FIRST_LETTER, Letters
from tests.random_trees import random_trees


@jax.jit
def verified(tree, choice):
    result = walk(tree, choice)
    return result.count, next_tokens(tree.token, result), *ranks(tree, result)


def new_answer(index: int, limit: int) -> Answer:
    return Answer(index, index, (0,), limit, seed=0, eos=-1, tokenizer=None, scan=None)


def follow(tree, row: int, choice, room: int, counts: Counter) -> int:
    """Walks one tree and counts ranks by the way; the number of drafts among the emitted tokens."""
    token, parent, live = (np.asarray(leaf[row]) for leaf in (tree.token, tree.parent, tree.live))
    node = drafts = 0
    for _ in range(room):
        children = [c for c in range(len(token)) if live[c] and parent[c] == node]
        matching = [c for c in children if token[c] == choice[node]]
        counts.update(("offered", rank) for rank in range(1, len(children) + 1))
        if not matching:
            break
        counts["accepted", children.index(matching[0]) + 1] += 1
        drafts, node = drafts + 1, matching[0]
    return drafts


@pytest.mark.parametrize("seed", range(4))
def test_ranks_and_depths_are_those_of_plain_walks(seed: int) -> None:
    """Rows that start with prefill's token and take some random steps, cut off at a limit."""
    rng = np.random.default_rng(seed)
    rows, counts = 40, Counter()
    answers = [new_answer(row, int(rng.integers(2, 12))) for row in range(rows)]
    steps = [[] for _ in answers]
    for answer in answers:
        answer.take(News([7], [0], [0], None, is_done=False))
    for _ in range(5):
        tree = random_trees(rng, rows, 9, vocab=3, dead=0.2)
        tree = tree.replace(live=tree.live.at[:, 0].set(True))
        choice = jnp.asarray(rng.integers(0, 3, (rows, 9)), jnp.int32)
        count, token, rank, offered = map(np.asarray, verified(tree, choice))
        for row, answer in enumerate(answers):
            room = answer.limit - len(answer.tokens)
            if room == 0:
                continue
            steps[row].append(follow(tree, row, np.asarray(choice)[row], room, counts))
            kept = slice(min(int(count[row]), room))
            news = (leaf[row, kept].tolist() for leaf in (token, rank, offered))
            answer.take(News(*news, None, is_done=int(count[row]) >= room))
    found = acceptance_by_rank(answers)
    assert len(found) > 2
    for rank, (offered, accepted) in enumerate(found, 1):
        assert offered == counts["offered", rank]
        assert accepted == counts["accepted", rank]
    assert sum(counts.values()) == sum(map(sum, found))
    statistics = tally(answers, depth=8, seconds=1.0)
    drafts = [each for row in steps for each in row]
    assert statistics.steps == len(drafts)
    assert statistics.reached == tuple(sum(each > d for each in drafts) for d in range(8))


def test_without_drafts_there_are_no_ranks() -> None:
    answer = new_answer(0, 3)
    answer.take(News([7, 8, 9], [0, 0, 0], [0, 0, 0], None, is_done=True))
    assert acceptance_by_rank([answer]) == ()
    assert acceptance_by_rank([]) == ()


@pytest.mark.parametrize("place", range(1, 7))
def test_of_a_stop_string_and_a_limit_in_one_step_the_earlier_counts(place: int) -> None:
    """A step of four drafts and the bonus token reaches the limit; place 6 is behind it."""
    text, letters = "cdefghi", Letters()
    scan = StopScan(letters, (text[place],))
    answer = dataclasses.replace(new_answer(0, 6), tokenizer=letters, scan=scan)
    token = [ord(letter) - FIRST_LETTER for letter in text[:6]]
    answer.take(News(token[:1], [0], [0], None, is_done=False))
    (emission,) = answer.take(News(token[1:], [1, 1, 1, 1, 0], [1] * 5, None, is_done=True))
    kept = min(place, 5)
    assert emission.token_ids == tuple(token[1 : kept + 1])
    done = answer.completion
    assert (done.token_ids, done.text) == (tuple(token[: kept + 1]), text[:place])
    assert done.finish_reason == ("stop" if place < 6 else "length")
    figures = tally([answer], depth=4, seconds=1.0)
    assert figures.accepted_length == kept
    assert figures.reached == tuple(int(kept > level) for level in range(4))
