"""Bytes that the kernels move, by their own count."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from jaxspec.plan.program import Traffic
from pallas_kernels import tuning
from pallas_kernels.dispatch import device_kind


def count(
    op_name: str, impl: str, sizes: Mapping[str, int], *arguments: Any, **keywords: Any
) -> Traffic | None:
    """What a kernel says that a call of it moves, or None where it has no count.

    Args:
        op_name: the op.
        impl: `tpu` or `gpu`.
        sizes: by which the choices for the device at hand are looked up.
        arguments: of the kernel; abstract arrays do.
        keywords: of the kernel.
    """
    try:
        kernel = importlib.import_module(f"pallas_kernels.{op_name}.{impl}")
    except ModuleNotFoundError:
        return None
    counted = getattr(kernel, "traffic", None)
    if counted is None:
        return None
    choices = tuning.select(op_name, device_kind(), sizes)
    return Traffic(*counted(*arguments, **keywords, **choices))
