"""The step, its loop and prefill: whatever is drafted, the tokens are those of plain decoding.

The model is one without layers (`doubles.py`), the reference a loop over its table on the host. The
last test takes a whole model and reads the program that its loop becomes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import step
from jaxspec.draft import Drafter
from jaxspec.draft.plain import PLAIN
from jaxspec.sample import Sampling
from jaxspec.state import DecodeState, init_state, insert
from jaxspec.step import generate, prefill, speculative_step
from tests.doubles import (
    TRACES,
    VOCAB,
    Toy,
    Wish,
    dice_drafter,
    plain_stream,
    rows_of,
)
from tests.random_trees import ancestry
from tests.states import same_bits

BATCH, LONGEST, MAX_NEW = 12, 9, 20
MAX_LEN = LONGEST + MAX_NEW
TEMPERATURES = (0.0, 0.7, 1.3)


def wishes_of(rng: np.random.Generator, count: int = BATCH) -> list[Wish]:
    """All temperatures side by side, prompts and limits of all lengths."""
    return [
        Wish(
            prompt=tuple(rng.integers(VOCAB, size=rng.integers(1, LONGEST + 1)).tolist()),
            limit=int(rng.integers(1, MAX_NEW + 1)),
            temperature=TEMPERATURES[row % len(TEMPERATURES)],
            seed=int(rng.integers(2**32)),
        )
        for row in range(count)
    ]


def fresh(toy: Toy, wishes: Sequence[Wish], drafter: Drafter) -> DecodeState:
    sampling = Sampling.create(len(wishes), temperature=[wish.temperature for wish in wishes])
    seed = np.array([wish.seed for wish in wishes], np.uint32)
    limit = np.array([wish.limit for wish in wishes], np.int32)
    sizes = {"max_len": MAX_LEN, "max_new": MAX_NEW, "margins": True}
    return init_state(toy.cfg, sampling, seed, limit, drafter=drafter, **sizes)


def begin(toy: Toy, wishes, drafter, *, chunk: int = 4) -> DecodeState:
    """The state after the prompts."""
    token = np.zeros((len(wishes), LONGEST), np.int32)
    for row, wish in enumerate(wishes):
        token[row, : len(wish.prompt)] = wish.prompt
    valid = np.array([len(wish.prompt) for wish in wishes], np.int32)
    state = fresh(toy, wishes, drafter)
    return prefill(toy.params, toy.cfg, state, token, valid, drafter=drafter, chunk=chunk)


def check_streams(toy: Toy, wishes: Sequence[Wish], state: DecodeState) -> None:
    """All sequences are done, with the tokens of plain decoding and nothing behind them."""
    state = jax.device_get(state)
    assert state.done.all()
    for row, wish in enumerate(wishes):
        want, _ = plain_stream(toy, wish)
        assert state.output.token[row].tolist() == want + [0] * (MAX_NEW - len(want))
        assert state.count[row] == len(want)
        assert state.root[row] == want[-1]
        assert state.cache.length[row] == len(wish.prompt) + len(want) - 1
        assert not state.output.rank[row, len(want) :].any()
        assert not state.output.offered[row, len(want) :].any()
    check_margins(toy, wishes, state)


def check_diary(toy: Toy, wishes: Sequence[Wish], state: DecodeState) -> None:
    """The drafter was told every committed position once, as the target has verified it."""
    state, embed = jax.device_get((state, toy.params.embed))
    diary = state.draft
    for row, wish in enumerate(wishes):
        count = int(state.count[row])
        stream = [*wish.prompt, *state.output.token[row, :count].tolist()]
        rest = [-1] * (MAX_LEN - len(stream) + 1)
        assert diary.token[row].tolist() == stream[:-1] + rest
        assert diary.following[row].tolist() == stream[1:] + rest
        np.testing.assert_array_equal(diary.feature[row], [*embed[stream[:-1], 0], *rest])


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (7, 3)])
def test_every_drafter_gives_the_stream_of_plain_decoding(toy, nodes, depth):
    drafter = dice_drafter(toy, nodes=nodes, depth=depth, seed=nodes)
    for seed in range(3):
        wishes = wishes_of(np.random.default_rng(seed))
        state = begin(toy, wishes, drafter)
        state = generate(toy.params, toy.cfg, state, steps=100, drafter=drafter)
        check_streams(toy, wishes, state)
        check_diary(toy, wishes, state)


def test_plain_decoding_is_the_loop_on_the_host(toy):
    wishes = wishes_of(np.random.default_rng(0))
    state = begin(toy, wishes, PLAIN)
    state = generate(toy.params, toy.cfg, state, steps=100, drafter=PLAIN)
    check_streams(toy, wishes, state)
    assert not np.any(state.output.rank)
    assert not np.any(state.output.offered)


def test_a_limit_is_no_more_than_the_output_has_places(toy):
    wish = Wish(prompt=(1,), limit=MAX_NEW + 3, temperature=0.0, seed=0)
    assert fresh(toy, [wish, wish._replace(limit=2)], PLAIN).limit.tolist() == [MAX_NEW, 2]


def check_margins(toy: Toy, wishes: Sequence[Wish], state: DecodeState) -> None:
    """The gap between the two best of log p + g at every token."""
    margin = np.asarray(state.output.margin)
    for row, wish in enumerate(wishes):
        _, want = plain_stream(toy, wish)
        want += [0] * (MAX_NEW - len(want))
        np.testing.assert_allclose(margin[row], want, atol=2e-5)


propose = jax.jit(step.propose, static_argnames=("cfg", "drafter"))


def test_a_step_emits_the_path_that_plain_decoding_takes(toy, drafter):
    """Step by step against a walk on the host: tokens, ranks, offers, ends; the rest is frozen."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        wishes = wishes_of(rng)
        state = begin(toy, wishes, drafter)
        streams = [plain_stream(toy, wish, MAX_NEW + 8)[0] for wish in wishes]
        while not np.all(state.done):
            tree, _ = jax.device_get(propose(toy.params, toy.cfg, state, drafter=drafter))
            before = jax.device_get(state)
            state = speculative_step(toy.params, toy.cfg, state, drafter=drafter)
            after = jax.device_get(state)
            for row, wish in enumerate(wishes):
                if before.done[row]:
                    seen["frozen"] += 1
                    assert same_bits([*rows_of(after, row)], [*rows_of(before, row)])
                else:
                    steps = before, after
                    check_step(toy, wish, streams[row], tree, steps, row, seen)
        check_streams(toy, wishes, state)
        check_diary(toy, wishes, state)
        idle = jax.device_get(state)
        state = speculative_step(toy.params, toy.cfg, state, drafter=drafter)
        assert same_bits(state, idle)
    lengths = {f"accepted {n}" for n in range(drafter.depth + 1)}
    assert {*seen} >= lengths | {"frozen", "end within", "limit within", "later child"}, seen


def check_step(toy, wish, stream, tree, steps, row, seen) -> None:
    """One sequence's step; what happened is counted in `seen`."""
    before, after = steps
    start = int(before.count[row])
    parent, live, token = tree.parent[row], tree.live[row], tree.token[row]
    node, rank, offered = 0, [], []
    while True:
        children = [i for i in range(1, len(parent)) if parent[i] == node and live[i]]
        offered.append(len(children))
        wanted = stream[start + len(rank)]
        match = [k for k, child in enumerate(children) if token[child] == wanted]
        if not match:
            break
        rank.append(match[0] + 1)
        node = children[match[0]]
    emitted = stream[start : start + len(rank) + 1]
    rank.append(0)
    seen[f"accepted {len(rank) - 1}"] += 1
    seen["later child"] += max(rank) > 1
    kept = min(len(emitted), wish.limit - start)
    seen["limit within"] += kept < len(emitted)
    if toy.cfg.eos_token_id in emitted[:kept]:
        end = emitted.index(toy.cfg.eos_token_id) + 1
        seen["end within"] += end < kept
        kept = end
    new = slice(start, start + kept)
    assert int(after.count[row]) == start + kept
    assert after.output.token[row, new].tolist() == emitted[:kept]
    assert after.output.rank[row, new].tolist() == rank[:kept]
    assert after.output.offered[row, new].tolist() == offered[:kept]
    assert int(after.cache.length[row]) == int(before.cache.length[row]) + kept
    ended = start + kept == wish.limit or emitted[kept - 1] == toy.cfg.eos_token_id
    assert bool(after.done[row]) == ended
    rest = jax.tree.map(lambda x: np.delete(x[row], new), after.output)
    assert same_bits(rest, jax.tree.map(lambda x: np.delete(x[row], new), before.output))


def test_the_loop_is_so_many_steps_and_a_refill_ends_it(toy, drafter):
    wishes = wishes_of(np.random.default_rng(5))
    states = [jax.device_get(begin(toy, wishes, drafter))]
    while not states[-1].done.all():
        state = speculative_step(toy.params, toy.cfg, put(states[-1]), drafter=drafter)
        states.append(jax.device_get(state))
    loop = partial(generate, toy.params, toy.cfg, drafter=drafter)
    for first in range(0, len(states), 3):
        for steps in (0, 1, 3, 100):
            last = min(first + steps, len(states) - 1)
            assert same_bits(loop(put(states[first]), steps=steps), states[last])
            freed = [
                at for at in range(first, last) if (states[at].done & ~states[first].done).any()
            ]
            last = min([*freed, last])
            assert same_bits(loop(put(states[first]), steps=steps, refill=True), states[last])
    assert any(state.done.any() and not state.done.all() for state in states)


def put(state: DecodeState) -> DecodeState:
    """On the device, in buffers of its own that may be donated."""
    return jax.tree.map(jnp.array, state)


def test_prefill_in_chunks_of_any_size(toy, drafter):
    """A prompt of length 0 leaves its sequence as it was, bit for bit."""
    wishes = wishes_of(np.random.default_rng(6))
    wishes[2] = wishes[2]._replace(prompt=())
    wishes[3] = wishes[3]._replace(limit=1)
    ends = [row for row in range(BATCH) if row != 2 and len(plain_stream(toy, wishes[row])[0]) == 1]
    untouched = [*rows_of(fresh(toy, wishes, drafter), 2)]
    sizes = (1, 4, LONGEST, 512)
    states = [jax.device_get(begin(toy, wishes, drafter, chunk=size)) for size in sizes]
    for state in states:
        assert same_bits(state, states[0])
        assert same_bits([*rows_of(state, 2)], untouched)
    state = states[0]
    assert np.flatnonzero(state.done).tolist() == sorted([2, *ends])
    assert 3 in ends
    begun = [row for row in range(BATCH) if row != 2]
    assert state.count[np.array(begun)].tolist() == [1] * len(begun)
    for row in begun:
        assert state.root[row] == state.output.token[row, 0] == plain_stream(toy, wishes[row])[0][0]
        assert state.cache.length[row] == len(wishes[row].prompt)
        assert state.draft.token[row, : len(wishes[row].prompt)].tolist() == [*wishes[row].prompt]


def test_an_inserted_sequence_goes_on_as_alone(toy, drafter):
    wishes = wishes_of(np.random.default_rng(7))
    state = begin(toy, wishes, drafter)
    state = generate(toy.params, toy.cfg, state, steps=2, drafter=drafter)
    new = wishes_of(np.random.default_rng(8), 3)[1]._replace(limit=MAX_NEW)
    row = begin(toy, [new], drafter)
    before = jax.device_get(state)
    state = insert(state, row, 5)
    wishes[5] = new
    for slot in range(BATCH):
        want = rows_of(row, 0) if slot == 5 else rows_of(before, slot)
        assert same_bits([*rows_of(state, slot)], [*want])
    state = generate(toy.params, toy.cfg, state, steps=100, drafter=drafter)
    check_streams(toy, wishes, state)
    check_diary(toy, wishes, state)


def test_states_are_donated(toy, drafter):
    wishes = wishes_of(np.random.default_rng(9))
    states = [fresh(toy, wishes, drafter)]
    token, valid = np.ones((BATCH, LONGEST), np.int32), np.full(BATCH, 3, np.int32)
    for run in (partial(prefill, token=token, valid=valid), speculative_step, generate):
        more = {"steps": 2} if run is generate else {}
        states.append(run(toy.params, toy.cfg, state=states[-1], drafter=drafter, **more))
    states.append(insert(states[-1], begin(toy, wishes[:1], drafter), 0))
    for state in states[:-1]:
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(states[-1]))


def test_content_compiles_nothing_and_nothing_leaves_the_device(toy, drafter, caplog):
    def run(seed: int, steps: int, refill: bool) -> None:
        rng = np.random.default_rng(seed)
        wishes = [
            wish._replace(temperature=float(rng.choice(TEMPERATURES))) for wish in wishes_of(rng)
        ]
        state = begin(toy, wishes, drafter)
        how = jax.device_put({"steps": np.int32(steps), "refill": np.bool_(refill)})
        with jax.transfer_guard("disallow"):
            state = generate(toy.params, toy.cfg, state, **how, drafter=drafter)
            state = speculative_step(toy.params, toy.cfg, state, drafter=drafter)
        jax.block_until_ready(insert(state, begin(toy, wishes[:1], drafter), steps % BATCH))

    run(0, 3, True)
    before = dict(TRACES)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for seed in range(1, 5):
            run(seed, seed, seed % 2 == 0)
        assert not [record for record in caplog.records if "ompil" in record.getMessage()]
        jax.jit(lambda x: x + 1)(jnp.float32(0))
        assert [record for record in caplog.records if "ompil" in record.getMessage()]
    assert dict(TRACES) == before


def test_the_trees_of_the_double_are_as_deep_as_it_says(drafter):
    """The double itself: its trees are trees, as deep as it says and some less."""
    guess = drafter.propose
    deepest = [
        max(len(ancestry(parent, node)) - 1 for node in np.flatnonzero(live))
        for parent, live in zip(guess.parent, guess.live, strict=True)
    ]
    assert max(deepest) == drafter.depth > min(deepest)
