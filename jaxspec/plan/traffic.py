"""Bytes that the kernels move, by their own count."""

from __future__ import annotations

import importlib
from typing import Any

from jaxspec.plan.program import Traffic


def count(op_name: str, impl: str, *arguments: Any, **keywords: Any) -> Traffic | None:
    """What a kernel says that a call of it moves, or None where it has no count.

    Args:
        op_name: the op.
        impl: `tpu` or `gpu`.
        arguments: of the kernel; abstract arrays do.
        keywords: of the kernel, tuned choices included.
    """
    try:
        kernel = importlib.import_module(f"pallas_kernels.{op_name}.{impl}")
    except ModuleNotFoundError:
        return None
    counted = getattr(kernel, "traffic", None)
    return None if counted is None else Traffic(*counted(*arguments, **keywords))
