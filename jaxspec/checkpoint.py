"""Checkpoints in the released layout: read strictly, written whole."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.config import ModelConfig, read_config
from jaxspec.errors import UsageError
from jaxspec.files import replacing
from jaxspec.model.params import Leaf, ModelParams, abstract
from jaxspec.resources import model_dir

_FLOATS = {"F32", "BF16"}
_INTEGERS = {"I64", "I32"}
_TENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_RELEASED_NAME = re.compile(r"(embed|head|norm)\.weight$|hc_head_|layers\.\d+\.|mtp\.\d+\.")


def load_checkpoint(
    dir_or_name: str | os.PathLike[str], *, dtype: Any = None, mesh: Any = None
) -> tuple[ModelParams, ModelConfig]:
    """Reads a checkpoint in the released layout, every tensor accounted for.

    Args:
        dir_or_name: a directory with `config.json` and safetensors, or an embedded model's name.
        dtype: of the tensors that the release keeps in bf16 or narrower, also as a string
            ("float32"); None: float32 if any of them is stored so, else bfloat16.
        mesh: not built yet; must be None.

    Returns:
        The parameters and the model's configuration.

    Raises:
        UsageError: a file is missing or damaged, or tensors are missing, extra or misshapen; all of
            them are named.
    """
    if mesh is not None:
        raise UsageError("loading onto a mesh is not built yet; leave mesh out")
    directory = model_dir(os.fspath(dir_or_name))
    with ExitStack() as stack:
        stored = _open(directory, stack)
        if not any(map(_RELEASED_NAME.match, stored)):
            raise UsageError(
                f"{directory} holds no tensor of DeepSeek-V4's released layout, such as "
                f"embed.weight; it holds {', '.join(sorted(stored)[:3]) or 'none at all'}"
            )
        blocks = {int(m[1]) for name in stored if (m := re.match(r"mtp\.(\d+)\.", name))}
        cfg = read_config(directory / "config.json", mtp_blocks=len(blocks))
        if dtype is None:
            dtype = _stored_dtype(cfg, stored)
        table = abstract(cfg, jnp.dtype(dtype))
        _check(table, stored, directory)
        _check_experts(cfg, table, stored)
        params = jax.tree.map(lambda leaf: _read(leaf, stored), table)
    return params, cfg


class _Stored:
    """One tensor on disk, not read yet."""

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name = file, name
        view = file.get_slice(name)
        self.shape, self.dtype = tuple(view.get_shape()), view.get_dtype()

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


def _open(directory: Path, stack: ExitStack) -> dict[str, _Stored]:
    """Every tensor of the directory by name."""
    index = directory / _INDEX
    files = [directory / _TENSORS]
    if index.exists() and not files[0].exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = [directory / name for name in sorted(set(weight_map.values()))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UsageError(f"{index} is not a safetensors index with a weight_map") from None
    stored: dict[str, _Stored] = {}
    for file in files:
        if not os.path.exists(file):
            named = f"it is named by {_INDEX}" if len(files) > 1 else "a model directory holds it"
            raise UsageError(f"{file} does not exist; {named}")
        try:
            opened = stack.enter_context(safe_open(file, framework="numpy"))
            names = opened.keys()
            tensors = {name: _Stored(opened, name) for name in names}
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} is truncated or not a safetensors file ({error})") from None
        if twice := sorted(stored.keys() & tensors.keys()):
            raise UsageError(f"{file} repeats tensors of another shard: {', '.join(twice)}")
        stored |= tensors
    return stored


def _stored_dtype(cfg: ModelConfig, stored: Mapping[str, _Stored]) -> Any:
    """The narrowest dtype that holds every tensor which the release keeps in bf16."""
    leaves = [leaf for leaf in jax.tree.leaves(abstract(cfg)) if leaf.dtype == jnp.bfloat16]
    names = {name for leaf in leaves for name in released_tensors(leaf)} & stored.keys()
    is_narrow = all(stored[name].dtype != "F32" for name in names)
    return jnp.bfloat16 if is_narrow else jnp.float32


def released_tensors(leaf: Leaf) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors on disk that make up a leaf."""
    match leaf.layout:
        case "same":
            return {leaf.name: leaf.shape}
        case "transpose":
            return {leaf.name: leaf.shape[::-1]}
        case "groups":
            groups, rows, cols = leaf.shape
            return {leaf.name: (groups * cols, rows)}
        case "experts":
            return {leaf.name.format(x): leaf.shape[1:] for x in range(leaf.shape[0])}


def _check(table: ModelParams, stored: Mapping[str, _Stored], directory: Path) -> None:
    """Compares the disk with the table; names every difference in one error."""
    expected: dict[str, tuple[tuple[int, ...], bool]] = {}
    for leaf in jax.tree.leaves(table):
        integer = bool(jnp.issubdtype(leaf.dtype, jnp.integer))
        for name, shape in released_tensors(leaf).items():
            expected[name] = shape, integer
    faults = list(_differences(expected, stored))
    if faults:
        raise UsageError(f"{directory} does not match its config.json: {'; '.join(faults)}")


def _check_experts(cfg: ModelConfig, table: ModelParams, stored: Mapping[str, _Stored]) -> None:
    """Refuses a hash table with an expert that is not there: a gather would clip it silently."""
    for leaf in jax.tree.leaves(table):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            expert = stored[leaf.name].read()
            wrong = expert[(expert < 0) | (expert >= cfg.n_routed_experts)]
            if wrong.size:
                last = cfg.n_routed_experts - 1
                raise UsageError(f"{leaf.name} names expert {wrong[0]}; they are 0 to {last}")


def _differences(
    expected: Mapping[str, tuple[tuple[int, ...], bool]], stored: Mapping[str, _Stored]
) -> Iterator[str]:
    if missing := sorted(expected.keys() - stored.keys()):
        yield f"missing {', '.join(missing)}"
    if extra := sorted(stored.keys() - expected.keys()):
        yield f"extra {', '.join(extra)}"
    for name in sorted(expected.keys() & stored.keys()):
        (shape, integer), found = expected[name], stored[name]
        if found.shape != shape:
            yield f"{name} has shape {list(found.shape)}, not {list(shape)}"
        if found.dtype not in (_INTEGERS if integer else _FLOATS):
            wanted = "I64 or I32" if integer else "F32 or BF16 (FP8 and FP4 are not built yet)"
            yield f"{name} is {found.dtype}, not {wanted}"


def _read(leaf: Leaf, stored: Mapping[str, _Stored]) -> jax.Array:
    parts = [stored[name].read() for name in released_tensors(leaf)]
    for name, part in zip(released_tensors(leaf), parts, strict=True):
        if not np.isfinite(part).all():
            raise UsageError(f"{name} holds NaN or infinity; every weight has to be finite")
    match leaf.layout:
        case "same":
            value = parts[0]
        case "transpose":
            value = parts[0].T
        case "groups":
            groups, rows, cols = leaf.shape
            value = parts[0].reshape(groups, cols, rows).transpose(0, 2, 1)
        case "experts":
            value = np.stack(parts)
    return jnp.asarray(np.ascontiguousarray(value), leaf.dtype)


def to_released(params: ModelParams, cfg: ModelConfig, dtype: Any = None) -> dict[str, np.ndarray]:
    """The inverse of loading: released names and shapes."""
    table = abstract(cfg, dtype or params.embed.dtype)
    tensors: dict[str, np.ndarray] = {}
    for leaf, value in zip(jax.tree.leaves(table), jax.tree.leaves(params), strict=True):
        array = np.asarray(value.astype(leaf.dtype))
        if leaf.layout == "groups":
            array = array.transpose(0, 2, 1)
        for index, (name, shape) in enumerate(released_tensors(leaf).items()):
            part = array[index] if leaf.layout == "experts" else array
            part = part.T if leaf.layout == "transpose" else part
            tensors[name] = np.ascontiguousarray(part).reshape(shape)
            if jnp.issubdtype(leaf.dtype, jnp.integer):
                tensors[name] = tensors[name].astype(np.int64)
    return tensors


def save_checkpoint(
    directory: Path, params: ModelParams, cfg: ModelConfig, *, dtype: Any = None
) -> None:
    """Writes `config.json` and `model.safetensors` in the released layout, each whole or not.

    Raises:
        OSError: the disk is full, or the directory cannot be written; what was there stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Both are written before either takes its place.
    with replacing(directory / _TENSORS) as tensors, replacing(directory / "config.json") as config:
        try:
            save_file(to_released(params, cfg, dtype), tensors)
        except SafetensorError as error:
            raise OSError(f"{directory / _TENSORS} was not written: {error}") from None
        config.write_text(json.dumps(cfg.to_released(), indent=1) + "\n")


def checkpoint_bytes(cfg: ModelConfig, dtype: Any = jnp.bfloat16) -> int:
    """Bytes of the tensors on disk, hash tables as int64."""
    total = 0
    for leaf in jax.tree.leaves(abstract(cfg, dtype)):
        size = 8 if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.dtype(leaf.dtype).itemsize
        total += size * math.prod(leaf.shape)
    return total
