"""The choice of an op's implementation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

Backends = Mapping[str, Callable[..., Any] | str]
"""Name of an implementation to its function, or to the reason in words why it cannot run."""

_log = logging.getLogger(__name__)


def resolve(impl: str, op_name: str, backends: Backends) -> Callable[..., Any]:
    """Finds the function that runs an op.

    `auto` takes the backend that is named like jax's default backend; if that one cannot run it
    takes `ref` and logs the reason once.

    Args:
        impl: `auto` or a name in `backends`.
        op_name: for messages.
        backends: name to function, or to the reason in words why it cannot run. `ref` always can.

    Raises:
        ValueError: an unknown name, or one that cannot run.
    """
    if impl == "auto":
        platform = jax.default_backend()
        chosen = backends.get(platform, f"there is none for {platform}")
        if isinstance(chosen, str):
            _log_fallback(op_name, chosen)
            chosen = backends["ref"]
    elif impl in backends:
        chosen = backends[impl]
    else:
        choices = ", ".join(["auto", *backends])
        raise ValueError(f"unknown impl {impl!r} of {op_name}; choose one of {choices}")
    if isinstance(chosen, str):
        raise ValueError(f"impl {impl!r} of {op_name} cannot run: {chosen}")
    return chosen


@functools.cache
def _log_fallback(op_name: str, reason: str) -> None:
    _log.warning("%s falls back to its definition: %s", op_name, reason)
