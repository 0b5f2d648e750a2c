"""Static choices of the kernels by device and shape, read from `tuned.toml` once."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SIZES = {
    "tree_attention": ("batch", "nodes", "entries"),
    "index_topk": ("batch", "nodes", "entries"),
    "grouped_matmul": ("rows",),
    "hyper_mixing": ("rows",),
}
"""Sizes by which an op's buckets are told apart."""


class Bucket(NamedTuple):
    """Choices for shapes up to some sizes on one kind of device."""

    device: str  # as JAX names its kind
    up_to: Mapping[str, int]  # a size that is not named may be anything
    choose: Mapping[str, int | str]  # keyword arguments of the kernel
    source: str  # what the choice rests on, in words

    def holds(self, device: str, sizes: Mapping[str, int]) -> bool:
        """Whether a call belongs to this bucket."""
        fits = all(sizes[name] <= most for name, most in self.up_to.items())
        return device == self.device and fits


def select(op_name: str, device: str, sizes: Mapping[str, int]) -> dict[str, int | str]:
    """The choices of the first bucket that holds the call; none means the kernel's defaults."""
    for bucket in _shipped()[op_name]:
        if bucket.holds(device, sizes):
            return dict(bucket.choose)
    return {}


@functools.cache
def _shipped() -> dict[str, tuple[Bucket, ...]]:
    text = importlib.resources.files("pallas_kernels").joinpath("tuned.toml").read_text("utf-8")
    return read_tuned(text)


def read_tuned(text: str) -> dict[str, tuple[Bucket, ...]]:
    """Buckets of every op, in the order of the file.

    Raises:
        ValueError: no TOML, an unknown op, key or size, or a value that cannot be.
    """
    tables = tomllib.loads(text)
    _check_names("op", tables, SIZES)
    return {
        op_name: tuple(_bucket(op_name, row) for row in _rows(op_name, tables.get(op_name, [])))
        for op_name in SIZES
    }


def _rows(op_name: str, rows: Any) -> list[dict[str, Any]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{op_name} must be a list of tables: [[{op_name}]]")
    return rows


def _bucket(op_name: str, row: dict[str, Any]) -> Bucket:
    _check_names(f"key of {op_name}", row, Bucket._fields)
    if lacking := [key for key in Bucket._fields if key not in row]:
        raise ValueError(f"a bucket of {op_name} lacks {', '.join(lacking)}")
    for key in ("device", "source"):
        if not isinstance(row[key], str) or not row[key]:
            raise ValueError(f"{key} of {op_name} must be text, not {row[key]!r}")
    if not _is_table_of(_is_count, row["up_to"]):
        raise ValueError(f"up_to of {op_name} must be a table of whole numbers above 0")
    if not _is_table_of(lambda value: _is_count(value) or isinstance(value, str), row["choose"]):
        raise ValueError(f"choose of {op_name} must be a table of whole numbers above 0 and words")
    _check_names(f"size of {op_name}", row["up_to"], SIZES[op_name])
    return Bucket(**row)


def _is_table_of(is_right: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_right, value.values()))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_names(what: str, names: Any, known: Any) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what}: {name!r}; known are {', '.join(known)}")
