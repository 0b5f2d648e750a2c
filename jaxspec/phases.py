"""How the time of a step divides into drafting, verification and commit."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import step
from jaxspec.compiler import jit
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter
from jaxspec.draft.plain import PLAIN
from jaxspec.model.params import ModelParams
from jaxspec.state import DecodeState


class Shares(NamedTuple):
    """Parts of a step's time, of 1: drafting includes what the drafter makes of the outcome.

    Plain decoding drafts nothing; the bookkeeping in place of it counts as part of the commit.
    """

    draft: float
    verify: float
    commit: float


def measure_shares(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    *,
    drafter: Drafter,
    impl: str = "auto",
    steps: int = 16,
) -> Shares | None:
    """Decodes on from `state`, which is donated, with each phase compiled and timed on its own.

    In the step loop the phases are one program and cannot be timed apart. Each costs a call here,
    some tens of microseconds, which weighs on short phases.

    Args:
        params: of the model.
        cfg: of the model.
        state: sequences in the midst of decoding.
        drafter: of the state.
        impl: of the kernels.
        steps: to measure at most, after a first one that compiles.

    Returns:
        The shares, or None if the sequences were done before a step was measured.
    """
    run_propose = jit(step.propose, static_argnames=("cfg", "drafter"))
    run_verify = jit(step.verify, static_argnames=("cfg", "drafter", "impl"))
    run_observe = jit(step.observe, static_argnames="drafter")
    run_commit = jit(step.commit, static_argnames="cfg", donate_argnames="state")
    spent = np.zeros(3)
    timed = 0
    for index in range(steps + 1):
        if bool(state.done.all()):
            break
        started = time.perf_counter()
        tree, noise = jax.block_until_ready(run_propose(params, cfg, state, drafter=drafter))
        proposed = time.perf_counter()
        verified = jax.block_until_ready(
            run_verify(params, cfg, state, tree, noise, drafter=drafter, impl=impl)
        )
        checked = time.perf_counter()
        draft: Any = jax.block_until_ready(run_observe(params, state, verified, drafter=drafter))
        observed = time.perf_counter()
        state = jax.block_until_ready(run_commit(cfg, state.replace(draft=draft), verified))
        committed = time.perf_counter()
        if index:
            aside = proposed - started + observed - checked
            drafting, bookkeeping = (0.0, aside) if drafter is PLAIN else (aside, 0.0)
            spent += drafting, checked - proposed, committed - observed + bookkeeping
            timed += 1
    return Shares(*(spent / spent.sum()).tolist()) if timed else None
