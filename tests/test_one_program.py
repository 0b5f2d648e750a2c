"""One program for each phase: nothing in it calls the host, and content compiles nothing anew.

Of a model with layers and its MTP drafter, as an engine runs them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxspec.draft.grow import TreeShape
from jaxspec.draft.mtp import make_drafter
from jaxspec.engine import Engine
from jaxspec.requests import Request
from jaxspec.sample import Sampling
from jaxspec.settings import RunConfig
from jaxspec.state import init_state, insert
from jaxspec.step import generate, prefill
from tests.conftest import TINY
from tests.doubles import Letters
from tests.serial import Model, random_model

pytestmark = pytest.mark.xdist_group("one program")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    """A CSA layer, which has all that a layer can have, and an MTP block."""
    sizes = {"compress_ratios": [4, 0], "num_nextn_predict_layers": 1}
    return random_model(tmp_path_factory.mktemp("model"), TINY | sizes)


# ------------------------------------------------------------------------------- no host within

HOST = ("callback", "debug", "infeed", "outfeed", "device_put", "send", "recv")
"""In the names of what would leave the device, or come to it, in the midst of a program."""


def primitives(program: Any) -> Iterator[str]:
    """Names of a program's operations, those of inner programs too."""
    for equation in program.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def host_calls(program: Any) -> set[str]:
    return {name for name in primitives(program.jaxpr) if any(word in name for word in HOST)}


def test_no_phase_calls_the_host(model):
    drafter = make_drafter(model.cfg, TreeShape.tree(6))

    def start(batch: int):
        sampling = Sampling.create(batch, temperature=0.7, top_k=5, top_p=0.9)
        seed, limit = np.zeros(batch, np.uint32), np.full(batch, 8, np.int32)
        sizes = {"max_len": 48, "max_new": 8, "margins": True}
        return init_state(model.cfg, sampling, seed, limit, drafter=drafter, **sizes)

    token, valid = np.zeros((2, 32), np.int32), np.full(2, 20, np.int32)
    how = {"drafter": drafter, "impl": "auto"}
    phases = {
        "prefill": partial(prefill, model.params, model.cfg, token=token, valid=valid, **how),
        "generate": partial(generate, model.params, model.cfg, steps=4, refill=True, **how),
        "insert": lambda state: insert(state, start(1), 1),
    }
    for name, phase in phases.items():
        program = jax.make_jaxpr(lambda state, phase=phase: phase(state=state))(start(2))
        seen = {*primitives(program.jaxpr)}
        assert {"prefill": "dot_general", "generate": "while"}.get(name, "jit") in seen
        assert not host_calls(program), name


CALLS = {
    "debug": lambda x: jax.debug.print("{}", x) or x,
    "pure": lambda x: jax.pure_callback(np.sin, x, x),
    "ordered": lambda x: io_callback(np.sin, x, x, ordered=True),
    "put": lambda x: jax.device_put(x),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_the_host_is_recognised(call):
    """The control: within a loop within a branch."""

    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: CALLS[call](x), x)

    program = jax.make_jaxpr(lambda x: jax.lax.cond(x.sum() > 0, jax.jit(loop), jnp.cos, x))
    assert host_calls(program(jnp.ones(3)))
    assert not host_calls(jax.make_jaxpr(lambda x: x + 1)(jnp.ones(3)))


# --------------------------------------------------------------------------- one compilation each

RUN = RunConfig(method="tree", budget=6, batch_size=3, max_new_tokens=14, temperature=0.9, seed=3)


@pytest.fixture
def compiled() -> Iterator[Counter[str]]:
    """How often each program has been compiled, by its name, in all threads."""
    count: Counter[str] = Counter()

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event.endswith("/backend_compile_duration"):
            count[about["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def requests_of(rng: np.random.Generator, count: int, longest: int) -> list[Request]:
    lengths = [longest, *rng.integers(1, longest + 1, size=count - 1)]
    return [
        Request(
            id=int(rng.integers(10**6)),
            prompt=tuple(rng.integers(64, size=length).tolist()),
            max_new_tokens=int(rng.integers(1, 15)),
            seed=int(rng.integers(2**32)),
        )
        for length in lengths
    ]


def test_a_run_compiles_each_phase_once_and_the_next_runs_nothing(model, compiled):
    """Whatever they ask for, while batch, capacity, limit and chunk fall into the same bucket."""
    rng = np.random.default_rng(0)

    def decode(count: int, longest: int, **changes: Any) -> list[tuple[int, ...]]:
        engine = Engine(model.params, model.cfg, dataclasses.replace(RUN, **changes), Letters())
        requests = requests_of(rng, count, longest)
        return [answer.token_ids for answer in engine.generate(requests)]

    decode(4, 30)
    phases = {f"jit({name})": 1 for name in ("prefill", "generate", "insert")}
    assert {name: compiled[name] for name in phases} == phases
    compiled.clear()
    others = [
        (3, 1, {}),
        (9, 33, {"seed": 4}),
        (5, 50, {"temperature": 0.0}),
        (4, 17, {"temperature": 1.3, "top_k": 5}),
        (4, 29, {"temperature": 0.4, "top_p": 0.5}),
        (6, 31, {"stop": ("a", "bc")}),
    ]
    for count, longest, changes in others:
        assert all(1 <= len(answer) <= 14 for answer in decode(count, longest, **changes))
        assert not compiled, (longest, changes, compiled)
    decode(3, 20, budget=2)  # the control: another tree is another loop, and no other prefill
    assert {name: compiled[name] for name in phases} == phases | {
        "jit(prefill)": 0,
        "jit(insert)": 0,
    }
