"""A stand-in for the engine: made-up answers, dealt out in steps as speculation would.

`install` puts it in the place of `jaxspec.engine` and `jaxspec.checkpoint`.
"""

import dataclasses
import random
import signal
import sys
import types

from jaxspec.results import Completion, Emission, Statistics

VOCAB = 4096


@dataclasses.dataclass
class Script:
    """What the fake is to do; `loaded` and `runs` record what was asked of it.

    `interrupt_after` emissions Ctrl-C comes. `diverge` maps a method to the token positions at
    which its first answers are changed; `margin` is what plain decoding records everywhere.
    """

    interrupt_after: int | None = None
    diverge: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    margin: float | None = 1.0
    loaded: list = dataclasses.field(default_factory=list)
    runs: list = dataclasses.field(default_factory=list)


def install(script: Script) -> dict[str, types.ModuleType]:
    """Modules by name, for `sys.modules`."""

    def load_checkpoint(directory, *, dtype=None, mesh=None):
        script.loaded.append((directory, dtype))
        return {}, types.SimpleNamespace(vocab_size=VOCAB)

    class Engine(FakeEngine):
        def __init__(self, params, cfg, run, tokenizer=None) -> None:
            script.runs.append(run)
            super().__init__(run, tokenizer, script)

    engine, checkpoint = types.ModuleType("jaxspec.engine"), types.ModuleType("jaxspec.checkpoint")
    engine.Engine, checkpoint.load_checkpoint = Engine, load_checkpoint
    return {"jaxspec.engine": engine, "jaxspec.checkpoint": checkpoint}


class FakeEngine:
    """Answers each request with words about it; rows of a batch take turns."""

    def __init__(self, run, tokenizer, script: Script) -> None:
        self.run, self.tokenizer, self.script = run, tokenizer, script
        self.rows = self.tokens = self.steps = self.emissions = 0
        self.reached = [0] * (run.budget - 1)

    @property
    def statistics(self) -> Statistics:
        return Statistics(self.rows, self.tokens, self.steps, tuple(self.reached), 0.5, 0.1, 0.3)

    def generate(self, requests, on_tokens=None):
        done: dict[int, Completion] = {}
        rows = [self._row(index, request) for index, request in enumerate(requests)]
        waiting, active = rows[self.run.batch_size :], rows[: self.run.batch_size]
        while active:
            for row in list(active):
                emission = next(row)
                if self.emissions == self.script.interrupt_after:
                    raise KeyboardInterrupt
                self.emissions += 1
                if emission.completion is not None:
                    done[emission.index] = emission.completion
                    active.remove(row)
                    if waiting:
                        active.append(waiting.pop(0))
                if on_tokens is not None:
                    on_tokens(emission)
        return [done[index] for index in range(len(requests))]

    def _row(self, index, request):
        """Emissions of one request: prefill's token, then steps of random accepted lengths."""
        ids = self._answer(index, request)
        coin = random.Random(f"{self.run.method} {request.id}")
        self.rows += 1
        self.tokens += len(ids)
        yield Emission(index, ids[:1], 0)
        place = 1
        while place < len(ids):
            drafts = 0 if self.run.method == "none" else coin.randrange(self.run.budget)
            taken = ids[place : place + drafts + 1]
            place += len(taken)
            self.steps += 1
            for depth in range(min(drafts, len(taken))):
                self.reached[depth] += 1
            yield Emission(index, taken, min(drafts, len(taken)))
        text = self.tokenizer.decode(ids) if self.tokenizer is not None else None
        stop = self.tokenizer is not None and ids[-1] == self.tokenizer.special.eos
        margins = None
        if self.run.method == "none" and self.script.margin is not None:
            margins = (self.script.margin,) * len(ids)
        reason = "stop" if stop else "length"
        yield Emission(index, (), 0, Completion(request.id, ids, text, reason, margins))

    def _answer(self, index, request) -> tuple[int, ...]:
        if self.tokenizer is None:
            ids = [int(request.prompt[0]) + step for step in range(20)]
        else:
            text = f"Answer {request.id}: 漢字 🙂 to «{request.prompt}» is def f(x): return x + 1\n"
            ids = [*self.tokenizer.encode(text), self.tokenizer.special.eos]
        ids = ids[: request.max_new_tokens or self.run.max_new_tokens]
        positions = self.script.diverge.get(self.run.method, [])
        if index < len(positions):
            ids[positions[index]] += 1
        return tuple(ids)


if __name__ == "__main__":
    # An engine that waits for a signal in the second row, for the test that sends one.
    import time

    from jaxspec.run import main

    def emit_and_wait(self, requests, on_tokens=None, generate=FakeEngine.generate):
        def forward(emission) -> None:
            on_tokens(emission)
            if emission.index == 1:
                print("waiting", file=sys.stderr, flush=True)
                while True:  # not signal.pause: a signal just before it would be lost
                    time.sleep(0.05)

        return generate(self, requests, forward)

    # What a job in the background starts ignores interrupts from the beginning.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    FakeEngine.generate = emit_and_wait
    sys.modules.update(install(Script()))
    sys.exit(main())
