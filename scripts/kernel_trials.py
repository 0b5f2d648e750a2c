"""Calls of the kernels with random operands, for the scripts that run them on hardware."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.errors import UsageError
from jaxspec.plan import traffic
from jaxspec.plan.program import Traffic
from jaxspec.plan.programs import flash
from pallas_kernels import grouped_matmul, hyper_mixing, index_topk, tree_attention
from tests.pallas_kernels import cases_hyper_mixing, cases_index_topk, cases_tree_attention

OPS: dict[str, ModuleType] = {
    "tree_attention": tree_attention,
    "index_topk": index_topk,
    "grouped_matmul": grouped_matmul,
    "hyper_mixing": hyper_mixing,
}
CONTEXTS = {"8k": 1 << 13, "64k": 1 << 16, "1M": 1 << 20}
RUN_SECONDS, RUNS = 0.2, 5


class Trial(NamedTuple):
    """One call of an op.

    `bind` makes a function of `arrays` alone of an implementation; `check` holds its result to the
    definition and raises AssertionError.
    """

    op: str
    name: str
    sizes: dict[str, int]  # by which tuned choices are told apart
    arrays: tuple[Any, ...]
    bind: Callable[[Callable[..., Any]], Callable[..., Any]]
    check: Callable[[Any], None]

    def traffic(self, impl: str) -> Traffic | None:
        """Bytes that the kernel moves, by its own count."""
        counted = functools.partial(traffic.count, self.op, impl, self.sizes)
        found: Traffic | None = self.bind(counted)(*self.arrays)
        return found

    def compile(self, impl: str, choices: Mapping[str, int] | None = None) -> Callable[[], Any]:
        """The call by one implementation, with tuned choices instead of its defaults.

        Raises:
            ValueError: the implementation does not exist, with the reason in words.
        """
        kernel = OPS[self.op].op.BACKENDS[impl]
        if isinstance(kernel, str):
            raise ValueError(kernel)
        run = self.bind(functools.partial(kernel, **(choices or {})))
        compiled = jax.jit(run).lower(*self.arrays).compile()
        return functools.partial(compiled, *self.arrays)


def accelerator() -> str:
    """`tpu` or `gpu`.

    Raises:
        UsageError: JAX runs on neither.
    """
    platform = jax.default_backend()
    if platform not in ("tpu", "gpu"):
        raise UsageError(
            f"this needs a TPU or a GPU and JAX runs on {platform} here; nothing was run "
            "(`python -m jaxspec.plan kernels` compiles for hardware that is not here)"
        )
    return platform


def seconds_a_call(call: Callable[[], Any]) -> float:
    """Median over runs of back-to-back calls; operands stay where they are between the calls."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    count = max(1, round(RUN_SECONDS / (time.perf_counter() - start)))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(count):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def attention_trial(case: cases_tree_attention.Case) -> Trial:
    """A case of the conformance table, or one of the released sizes."""
    arguments = cases_tree_attention.draw(case)
    _, arrays = cases_tree_attention.bound(lambda *_, **__: None, arguments)

    def check(got: Any) -> None:
        cases_tree_attention.compare(case, got, cases_tree_attention.expected(arguments))

    def bind(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return cases_tree_attention.bound(kernel, arguments)[0]

    sizes = {"batch": len(case.lengths), "nodes": case.nodes, "entries": case.capacity}
    return Trial("tree_attention", str(case), sizes, tuple(arrays), bind, check)


def index_trial(case: cases_index_topk.Case, dtype: str) -> Trial:
    """A case of the conformance table, or one of the released sizes."""
    operands = cases_index_topk.make(case, dtype)

    def bind(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(kernel, topk=case.topk)

    def check(got: Any) -> None:
        cases_index_topk.check(case, operands, got)

    sizes = {"batch": len(case.committed), "nodes": case.nodes, "entries": case.capacity}
    return Trial("index_topk", f"{case.name}-{dtype}", sizes, tuple(operands), bind, check)


def expert_trial(rows: int, sizes: tuple[int, int, int, int], limit: float) -> Trial:
    """Random routing of `rows` rows; `sizes` are width, inner width, experts and choices."""
    width, inner, experts, choices = sizes
    keys = jax.random.split(jax.random.key(rows), 6)

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        scale = jnp.asarray(shape[-1] ** -0.5, jnp.bfloat16)
        return jax.random.normal(key, shape, jnp.bfloat16) * scale

    up, down = (experts, inner, width), (experts, width, inner)
    x = draw(keys[0], rows, width) * 30
    weights = draw(keys[1], *up), draw(keys[2], *up), draw(keys[3], *down)
    _, expert = jax.lax.top_k(jax.random.normal(keys[4], (rows, experts)), choices)
    weight = jax.nn.softmax(jax.random.normal(keys[5], (rows, choices)))
    routing = expert.astype(jnp.int32), weight, jnp.ones(rows, bool)

    def bind(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(kernel, limit=limit)

    def check(got: Any) -> None:
        want = grouped_matmul.op.BACKENDS["ref"](x, weights, routing, limit=limit)
        worst = jnp.abs(got - want).max() / jnp.abs(want).max()
        assert worst < 1e-2, f"off by {worst:.2e} of the largest value"

    arrays = x, weights, routing
    return Trial("grouped_matmul", f"rows-{rows}", {"rows": rows}, arrays, bind, check)


def mixing_trial(case: cases_hyper_mixing.Case) -> Trial:
    """A case of the conformance table, or one of the released sizes."""
    operands = cases_hyper_mixing.make(case)

    def bind(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(kernel, **cases_hyper_mixing.static(case))

    def check(got: Any) -> None:
        cases_hyper_mixing.check(case, operands, got)

    sizes = {"rows": math.prod(case.outer)}
    return Trial("hyper_mixing", case.name, sizes, tuple(operands), bind, check)


def small_trials(limit: int | None = None) -> Iterator[Trial]:
    """The conformance tables, or the first `limit` of each."""
    for case in cases_tree_attention.CASES[:limit]:
        yield attention_trial(case)
    for index_case in cases_index_topk.CASES[:limit]:
        for dtype in cases_index_topk.DTYPES:
            yield index_trial(index_case, dtype)
    for rows in (1, 13, 100)[:limit]:
        yield expert_trial(rows, (256, 128, 8, 2), limit=2.0)
    for mixing_case in cases_hyper_mixing.CASES[:limit]:
        yield mixing_trial(mixing_case)


def released_trials(op: str) -> Iterator[Trial]:
    """V4-Flash's sizes, trees of 8 nodes: what is worth timing and fits into one device."""
    cfg = flash()
    if op == "grouped_matmul":
        sizes = cfg.hidden_size, cfg.moe_intermediate_size, cfg.n_routed_experts
        for rows in (8, 64):
            yield expert_trial(rows, (*sizes, cfg.num_experts_per_tok), cfg.swiglu_limit)
        return
    if op == "hyper_mixing":
        for rows in (8, 64, 512):
            statics = cfg.hc_mult, cfg.hc_sinkhorn_iters, cfg.hc_eps
            yield mixing_trial(cases_hyper_mixing.Case(f"flash-{rows}", (1, rows), *statics))
        return
    for label, context in CONTEXTS.items():
        for batch in (1, 8) if label != "1M" else (1,):
            if op == "index_topk":
                count = context // 4
                sizes = 8, cfg.index_n_heads, cfg.index_head_dim, count, (count - 3,) * batch, 8
                name = f"flash-{label}-b{batch}"
                for dtype in ("bfloat16", "fp8"):
                    index_case = cases_index_topk.Case(name, *sizes, cfg.index_topk)
                    yield index_trial(index_case, dtype)
            else:
                names = {f"flash-{kind}-{label}-b{batch}" for kind in ("csa", "hca")}
                for case in cases_tree_attention.RELEASED:
                    if case.name in names:
                        yield attention_trial(case)
