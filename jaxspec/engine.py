"""The host side of decoding: requests in, tokens out, as many side by side as there are slots.

Each prompt is prefilled alone and inserted into a free slot; all slots step together on the device,
and the host looks at the outcome every few steps: it hands tokens out, looks for stop strings and
gives free slots to waiting requests. What a request gets depends on itself alone, never on its
slot, its neighbours or the order of the input.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.answer import Answer, News, tally
from jaxspec.compiler import interpretation, jit
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter
from jaxspec.draft.grow import TreeShape
from jaxspec.draft.mtp import make_drafter
from jaxspec.draft.plain import PLAIN
from jaxspec.errors import UsageError
from jaxspec.limits import UINT32_MAX
from jaxspec.model.backends import check_impl
from jaxspec.model.params import ModelParams
from jaxspec.phases import measure_shares
from jaxspec.requests import Request, check_token_ids, with_integers
from jaxspec.results import Completion, Emission, Statistics
from jaxspec.sample import Sampling
from jaxspec.settings import RunConfig
from jaxspec.shapes import Shapes, plan, round_up
from jaxspec.state import DecodeState, init_state, insert
from jaxspec.step import generate, observer, prefill
from jaxspec.text import StopScan, Tokenizer

STEPS_A_LOOK = 8
"""Steps on the device between two looks of the host, each of which costs a round trip."""


def select_drafter(cfg: ModelConfig, run: RunConfig) -> Drafter:
    """The drafter that the run's method and budget ask for.

    Raises:
        UsageError: the model has none.
    """
    if run.method == "none" or run.budget == 1:
        return PLAIN
    grow = TreeShape.tree if run.method == "tree" else TreeShape.chain
    return make_drafter(cfg, grow(int(run.budget)), impl=run.impl)


class Engine:
    """Decodes requests with one model and one set of choices."""

    def __init__(
        self,
        params: ModelParams,
        cfg: ModelConfig,
        run: RunConfig,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Takes a model as `load_checkpoint` gives it.

        Raises:
            UsageError: the model cannot draft as asked, its kernels cannot run as asked, or stop
                strings lack a tokenizer.
        """
        if run.stop and tokenizer is None:
            raise UsageError("stop strings need a tokenizer; leave stop out")
        if run.max_len is not None and run.max_len > cfg.max_position_embeddings:
            raise UsageError(
                f"max_len {run.max_len} is above the {cfg.max_position_embeddings} positions of "
                "the model; lower it or leave it out"
            )
        check_impl(run.impl, interpret=run.interpret)
        self.params, self.cfg, self.run, self.tokenizer = params, cfg, run, tokenizer
        self.drafter = select_drafter(cfg, run)
        self.answers: list[Answer] = []
        self._decoding = threading.Lock()
        self._started = self._stopped = self._looping = 0.0
        self._sample: DecodeState | None = None  # a state in the midst of decoding
        self._phases: tuple[float, float, float] | None = None

    def generate(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[Emission], None] | None = None,
    ) -> list[Completion]:
        """Decodes all requests; completions come in their order.

        Args:
            requests: prompts as text, if there is a tokenizer, or as token ids.
            on_tokens: is called with the tokens of each step of each request as they come.

        Raises:
            UsageError: a prompt has token ids that the model does not have, or does not fit into
                the capacity; nothing was decoded.
            RuntimeError: it is called from `on_tokens` or another thread while it decodes.
        """
        if not self._decoding.acquire(blocking=False):
            raise RuntimeError("this engine is decoding already; another of the same model can")
        try:
            return self._generate(requests, on_tokens)
        finally:
            self._decoding.release()

    def _generate(
        self, requests: Sequence[Request], on_tokens: Callable[[Emission], None] | None
    ) -> list[Completion]:
        self.answers = [self._admit(index, request) for index, request in enumerate(requests)]
        self._started = self._stopped = self._looping = 0.0
        self._sample = self._phases = None
        if not self.answers:
            return []
        shapes = plan(self.answers, self.run)
        state = self._compile(shapes)
        self._started = self._stopped = time.perf_counter()
        for emission in self._serve(state, shapes):
            if on_tokens is not None:
                on_tokens(emission)
        if self._sample is not None:
            self._measure_phases(self._sample)
        return [answer.completion for answer in self.answers if answer.completion is not None]

    @property
    def statistics(self) -> Statistics:
        """Counts and seconds of the last `generate`, so far if it was interrupted."""
        counts = tally(self.answers, self.drafter.depth, self._stopped - self._started)
        if self._phases is None:
            return counts
        draft, verify, commit = self._phases
        return dataclasses.replace(counts, draft_s=draft, verify_s=verify, commit_s=commit)

    def _admit(self, index: int, request: Request) -> Answer:
        """Checks one request and makes token ids of it."""
        request = with_integers(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError(f"prompt {request.id!r} is text; without a tokenizer give ids")
            prompt = tuple(self.tokenizer.encode_chat(prompt, request.history))
        elif request.history:
            raise UsageError(f"prompt {request.id!r}: history goes with text, not with token ids")
        if not prompt or min(prompt) < 0:
            raise UsageError(f"prompt {request.id!r} needs at least one token, and ids >= 0")
        check_token_ids([dataclasses.replace(request, prompt=prompt)], self.cfg.vocab_size)
        if request.seed is not None and not 0 <= request.seed <= UINT32_MAX:
            raise UsageError(
                f"prompt {request.id!r} has the seed {request.seed}; it must be from 0 "
                f"to {UINT32_MAX}"
            )
        limit = request.max_new_tokens
        limit = self.run.max_new_tokens if limit is None else limit
        self._check_fit(request.id, len(prompt), limit)
        scan = None
        if self.run.stop and self.tokenizer is not None:
            scan = StopScan(self.tokenizer, self.run.stop)
        return Answer(
            index=index,
            id=request.id,
            prompt=prompt,
            limit=limit,
            seed=request.resolve_seed(self.run.seed),
            eos=self.cfg.eos_token_id,
            tokenizer=self.tokenizer,
            scan=scan,
        )

    def _check_fit(self, name: str | int, length: int, limit: int) -> None:
        """The cache holds the prompt and all emitted tokens but the last."""
        most = self.cfg.max_position_embeddings
        capacity = min(self.run.max_len or most, most)
        advice = "raise max_len" if capacity < most else "the model ends there"
        if length > capacity:
            raise UsageError(
                f"prompt {name!r} has {length} tokens, above the capacity of {capacity}; shorten "
                f"it ({advice})"
            )
        if limit < 1 or length + limit - 1 > capacity:
            raise UsageError(
                f"prompt {name!r} has {length} tokens, so max_new_tokens must be from 1 to "
                f"{capacity - length + 1}, not {limit}, at a capacity of {capacity} ({advice})"
            )

    def _compile(self, shapes: Shapes) -> DecodeState:
        """Compiles every phase, on sequences that have nothing to do; the state to start from."""
        idle: list[Answer | None] = [None] * shapes.batch

        def begin() -> DecodeState:
            return self._prefill(None, shapes)

        def loop() -> DecodeState:
            return self._step(self._start(idle, shapes), steps=0, refill=False)

        with ThreadPoolExecutor() as pool:  # most of a compilation runs outside of Python's lock
            row, state = pool.submit(begin), pool.submit(loop)
        return jax.block_until_ready(insert(state.result(), row.result(), 0))

    def _serve(self, state: DecodeState, shapes: Shapes) -> Iterator[Emission]:
        """Decodes all answers, each in the next slot that is free."""
        waiting = deque(self.answers)
        slots: list[Answer | None] = [None] * shapes.batch
        while waiting or any(slots):
            filled = [slot for slot, held in enumerate(slots) if held is None][: len(waiting)]
            for slot in filled:
                slots[slot] = waiting.popleft()
                state = insert(state, self._prefill(slots[slot], shapes), slot)
            self._keep_sample(state)
            # A slot that is done already has all it asked for by prefill; others wait for it.
            if not (filled and waiting and np.asarray(state.done).any()):
                before = time.perf_counter()
                state = self._step(state, steps=STEPS_A_LOOK, refill=bool(waiting))
                jax.block_until_ready(state)
                self._looping += time.perf_counter() - before
            self._stopped = time.perf_counter()
            for answer, news in look(state, slots):
                yield from answer.take(news)
            slots = [held if held and held.completion is None else None for held in slots]
            # A stop string ends a sequence that goes on as far as the device knows.
            state = state.replace(done=jnp.asarray([held is None for held in slots]))

    def _prefill(self, answer: Answer | None, shapes: Shapes) -> DecodeState:
        """The state of one sequence after its prompt; None is a sequence without one."""
        prompt = answer.prompt if answer is not None else ()
        token = np.zeros((1, round_up(shapes.max_len, shapes.chunk)), np.int32)
        token[0, : len(prompt)] = prompt
        run = jit(
            prefill,
            static_argnames=("cfg", "drafter", "chunk", "impl"),
            donate_argnames="state",
        )
        with interpretation(self.run.interpret):
            return run(
                self.params,
                self.cfg,
                self._start([answer], shapes),
                jnp.asarray(token),
                jnp.asarray([len(prompt)]),
                drafter=observer(self.drafter),
                chunk=shapes.chunk,
                impl=self.run.impl,
            )

    def _start(self, answers: Sequence[Answer | None], shapes: Shapes) -> DecodeState:
        """The state of these sequences before their prompts; None is a place for a later one."""
        run = self.run
        return init_state(
            self.cfg,
            # Empty places are greedy, so that they ask for no noise.
            Sampling.create(
                len(answers),
                temperature=[0.0 if answer is None else run.temperature for answer in answers],
                top_k=run.top_k,
                top_p=run.top_p,
            ),
            np.asarray([0 if answer is None else answer.seed for answer in answers], np.uint32),
            np.asarray([1 if answer is None else answer.limit for answer in answers], np.int32),
            max_len=shapes.max_len,
            max_new=shapes.max_new,
            drafter=self.drafter,
            dtype=self.params.embed.dtype,
            margins=run.compare and self.drafter is PLAIN,
            impl=run.impl,
        )

    def _step(self, state: DecodeState, *, steps: int, refill: bool) -> DecodeState:
        run = jit(generate, static_argnames=("cfg", "drafter", "impl"), donate_argnames="state")
        choices = {"drafter": self.drafter, "impl": self.run.impl}
        with interpretation(self.run.interpret):
            return run(self.params, self.cfg, state, steps=steps, refill=refill, **choices)

    def _keep_sample(self, state: DecodeState) -> None:
        """Copies the first state of a comparison, for the phases; the copying is not timed."""
        if self.run.compare and self._sample is None:
            before = time.perf_counter()
            self._sample = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            self._started += time.perf_counter() - before

    def _measure_phases(self, state: DecodeState) -> None:
        """Divides the time of the step loop by the shares that the phases have apart."""
        with interpretation(self.run.interpret):
            shares = measure_shares(
                self.params, self.cfg, state, drafter=self.drafter, impl=self.run.impl
            )
        if shares is not None:
            draft, verify, commit = (share * self._looping for share in shares)
            self._phases = draft, verify, commit


def look(state: DecodeState, slots: Sequence[Answer | None]) -> list[tuple[Answer, News]]:
    """What each slot's answer has not seen yet."""
    output, count, done = jax.device_get((state.output, state.count, state.done))
    found = []
    for slot, answer in enumerate(slots):
        if answer is not None:
            new = slice(len(answer.tokens), int(count[slot]))
            news = News(
                token=output.token[slot, new].tolist(),
                rank=output.rank[slot, new].tolist(),
                offered=output.offered[slot, new].tolist(),
                margin=None if output.margin is None else output.margin[slot, new].tolist(),
                is_done=bool(done[slot]),
            )
            found.append((answer, news))
    return found
