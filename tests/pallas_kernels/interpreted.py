"""TPU kernels interpreted on a CPU, as strictly as JAX can."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)


def run_interpreted(function: Callable[..., Any], *operands: Any) -> Any:
    """Compiles and runs a function of arrays; races, reads out of bounds and the like raise."""
    try:
        with pltpu.force_tpu_interpret_mode(STRICT):
            result = jax.block_until_ready(jax.jit(lambda *args: function(*args))(*operands))
        # JAX before 0.11 only notes a race.
        state = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
        assert state.races is None or not state.races.races_found
        return result
    finally:
        pltpu.reset_tpu_interpret_mode_state()
