"""The choice of an op's implementation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning

Backends = Mapping[str, Callable[..., Any] | str]
"""Name of an implementation to its function, or to the reason in words why it cannot run."""

_HARDWARE = {"tpu": "a TPU", "gpu": "a GPU"}
_log = logging.getLogger(__name__)


def resolve(
    impl: str,
    op_name: str,
    backends: Backends,
    *,
    sizes: Mapping[str, int] | None = None,
    refusals: Mapping[str, Callable[[], str | None]] | None = None,
) -> Callable[..., Any]:
    """Finds the function that runs an op where the program at hand will run.

    `auto` takes the backend that is named like the platform; if that one cannot run it takes `ref`
    and logs the reason once. A kernel may be named where its hardware is, in a program compiled
    ahead of time for such hardware, and on a CPU that interprets TPU kernels.

    Args:
        impl: `auto` or a name in `backends`.
        op_name: for messages.
        backends: name to function, or to the reason in words why it cannot run. `ref` always can.
        sizes: of the call, by which a kernel's tuned choices are looked up; None: its defaults.
        refusals: name of a kernel to what says why it cannot take the call at hand, or None.

    Raises:
        ValueError: an unknown name, or one that cannot run.
    """
    refusals = refusals or {}
    if impl == "auto":
        platform = target_platform()
        chosen = backends.get(platform, f"there is none for {platform}")
        chosen = _unless(refusals.get(platform), chosen)
        if isinstance(chosen, str):
            _log_fallback(op_name, chosen)
            chosen = backends["ref"]
    elif impl in backends:
        chosen = backends[impl]
        if not isinstance(chosen, str) and (lack := _lack(impl)) is not None:
            chosen = lack
        chosen = _unless(refusals.get(impl), chosen)
    else:
        choices = ", ".join(["auto", *backends])
        raise ValueError(f"unknown impl {impl!r} of {op_name}; choose one of {choices}")
    if isinstance(chosen, str):
        raise ValueError(f"impl {impl!r} of {op_name} cannot run: {chosen}")
    if sizes is not None and any(chosen is backends.get(name) for name in _HARDWARE):
        return functools.partial(chosen, **tuning.select(op_name, device_kind(), sizes))
    return chosen


def _unless(
    refusal: Callable[[], str | None] | None, chosen: Callable[..., Any] | str
) -> Callable[..., Any] | str:
    """What was chosen, or why it cannot take the call."""
    if refusal is None or isinstance(chosen, str):
        return chosen
    return refusal() or chosen


def target_device() -> Any:
    """Kind and platform of the device that the program is compiled for, where a mesh names it.

    That is a mesh of the devices of a topology, or an abstract one with an abstract device; None:
    the program is for what JAX runs on.
    """
    return jax.sharding.get_abstract_mesh().abstract_device


def target_platform() -> str:
    """Platform of the program at hand: `cpu`, `gpu` or `tpu`."""
    device = target_device()
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """Kind of the device that the program at hand is for, as JAX names it."""
    device = target_device()
    return jax.devices()[0].device_kind if device is None else device.device_kind


def is_interpreted() -> bool:
    """Whether TPU kernels are interpreted here (`pltpu.force_tpu_interpret_mode`).

    JAX has no question for it, but only then does a CPU take a kernel.
    """
    from jax.experimental import pallas as pl

    def copy(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    tile = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    program = jax.jit(lambda x: pl.pallas_call(copy, out_shape=tile)(x))
    try:
        program.trace(tile).lower(lowering_platforms=("cpu",))
    except ValueError:
        return False
    return True


def _lack(impl: str) -> str | None:
    """The hardware that a kernel wants and the program does not have, in words, or None."""
    platform = target_platform()
    if impl not in _HARDWARE or impl == platform or (impl == "tpu" and is_interpreted()):
        return None
    advice = ", or have it interpreted" if impl == "tpu" and platform == "cpu" else ""
    return f"it needs {_HARDWARE[impl]} and this is a {platform}; use 'auto' or 'ref'{advice}"


@functools.cache
def _log_fallback(op_name: str, reason: str) -> None:
    _log.warning("%s falls back to its definition: %s", op_name, reason)
