"""How programs are compiled: options that measurements call for, and interpretation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax


def compiler_options() -> dict[str, str] | None:
    """Options for `jax.jit` on the default backend; None where its own are right.

    On CPUs XLA hands fusions of dots and reductions to YNNPACK, whose kernels are slower here than
    XLA's own loops: a training step took 2.3 times as long with them (jax 0.10.2).
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_cpu_experimental_ynn_fusion_type": ""}


def inference_options() -> dict[str, str] | None:
    """The same for programs that reduce rows alone: a norm, a softmax, logits.

    On CPUs XLA cuts long reductions into windows of 32, in a kernel that nothing else is fused
    with: a prefill of 512 tokens took 1.13 times as long (batch 1; 1.22 times at batch 8; jax
    0.12). Without them sums and softmaxes of up to 262,144 values, the entries of a million tokens,
    are within 4e-7, as a row is summed in many lanes. A matrix as a whole is not (64 million
    squares: 1 % off), so training, which takes the norm of its gradients, keeps them.
    """
    options = compiler_options()
    if options is None:
        return None
    return options | {"xla_disable_hlo_passes": "tree_reduction_rewriter"}


@functools.cache
def jit(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """`jax.jit` with the options of inference, for a program that is the outermost one.

    Args:
        function: what to compile; functions that are compiled already may be in it.
        keywords: of `jax.jit`; hashable.
    """
    return jax.jit(function, compiler_options=inference_options(), **keywords)


def interpretation(on: bool) -> AbstractContextManager[None]:
    """Where `on`, TPU kernels that this thread compiles are interpreted on the CPU.

    Slow, and strict: memory starts as NaN, and a read out of bounds is an error.
    """
    if not on:
        return contextlib.nullcontext()
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    )
