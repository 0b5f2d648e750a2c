"""Files that ship inside the package: the embedded model and the run configurations."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from jaxspec.errors import UsageError

EMBEDDED_MODEL = "nano"
"""The name that stands for the model inside the package wherever a directory is asked for."""


def model_dir(name: str) -> Path:
    """Directory of a model in the released layout: `nano`, or a path that holds config.json.

    Raises:
        UsageError: there is no such directory, or it holds no config.json.
    """
    if name == EMBEDDED_MODEL:
        return _package() / "models" / EMBEDDED_MODEL
    path = Path(name)
    wanted = f"give {EMBEDDED_MODEL} or a directory that holds config.json"
    if not os.path.isdir(path):
        raise UsageError(f"unknown model {name!r}: no such directory; {wanted}")
    if not (path / "config.json").is_file():
        raise UsageError(f"model {name!r} has no config.json; {wanted}")
    return path


def run_config_file(name: str) -> Path:
    """A run configuration: a path that ends in .toml, or the name of one that ships.

    Raises:
        UsageError: a bare name that does not ship. Whether a path can be read is the reader's task.
    """
    if name.endswith(".toml"):
        return Path(name)
    folder = _package() / "configs" / "run"
    shipped = sorted(file.stem for file in folder.glob("*.toml"))
    if name not in shipped:
        raise UsageError(
            f"unknown run configuration {name!r}; give a file that ends in .toml or one of "
            + ", ".join(shipped)
        )
    return folder / f"{name}.toml"


def packaged_config(name: str) -> Path:
    """A configuration that ships, by its path below `configs/`, such as `model/nano.toml`."""
    return _package() / "configs" / name


def _package() -> Path:
    return Path(str(importlib.resources.files("jaxspec")))
