"""DeepSeek-V4 decoding with tree-structured speculation.

The public names are imported when they are first used, and JAX with them.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Cache": "cache",
    "DecodeState": "state",
    "DraftTree": "tree",
    "Drafter": "draft",
    "Engine": "engine",
    "PLAIN": "draft.plain",
    "Request": "requests",
    "RunConfig": "settings",
    "Sampling": "sample",
    "TokenBlock": "tree",
    "TreeShape": "draft.grow",
    "UsageError": "errors",
    "choose": "api",
    "extend": "api",
    "forward": "api",
    "generate": "step",
    "init_cache": "cache",
    "init_state": "state",
    "insert": "state",
    "load_checkpoint": "checkpoint",
    "make_drafter": "draft.mtp",
    "mtp_score": "api",
    "prefill": "step",
    "score": "api",
    "speculative_step": "step",
    "walk": "api",
}
"""Public name to the module that defines it."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
