"""Choices of a run, each one a key of a TOML file and a flag of the command line."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxspec.errors import UsageError
from jaxspec.limits import FLOAT32_MAX, INT32_MAX, UINT32_MAX

MAX_BATCH = 64
MAX_BUDGET = 64


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which values a setting takes.

    `wants` completes "must be"; `valid` judges a value from any source; `read` turns a flag's text
    into a value, or raises ValueError; `metavar` stands for the value in the help.
    """

    wants: str
    valid: Callable[[Any], bool]
    read: Callable[[str], Any] = str
    metavar: str = ""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How many devices each kind of parallelism takes: rows of a batch, experts, matrix columns."""

    data: int = 1
    expert: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads `data=2,tensor=4`; what is not named is 1. Raises ValueError."""
        pairs = [part.split("=") for part in text.split(",")]
        sizes = {name.strip(): int(size) for name, size in pairs}
        names = {field.name for field in dataclasses.fields(cls)}
        if len(sizes) < len(pairs) or sizes.keys() - names or min(sizes.values()) < 1:
            raise ValueError(text)
        return cls(**sizes)


def one_of(*names: str) -> Rule:
    """One of a few words."""
    return Rule(" or ".join(names), lambda value: value in names, metavar="|".join(names))


def integer(low: int, high: int | None = None) -> Rule:
    """An integer from `low` to `high`, both included."""
    wants = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    return Rule(wants, lambda value: _is_integer(value, low, high), int, "N")


def number(wants: str, within: Callable[[float], bool]) -> Rule:
    """A finite real number for which `within` holds."""
    return Rule(wants, lambda value: _is_number(value) and within(value), float, "X")


def _is_integer(value: Any, low: int, high: int | None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return low <= value and (high is None or value <= high)


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= FLOAT32_MAX  # false for NaN, and no integer is too large to be compared


_BUDGET = Rule(
    f"an integer from 1 to {MAX_BUDGET} or auto",
    lambda value: value == "auto" or _is_integer(value, 1, MAX_BUDGET),
    lambda text: text if text == "auto" else int(text),
    "D|auto",
)
_STOP = Rule(
    "a list of strings, none of them empty",
    lambda value: isinstance(value, tuple) and all(isinstance(s, str) and s for s in value),
    metavar="TEXT",
)
_MESH = Rule(
    "like data=1,expert=1,tensor=1, each at least 1",
    lambda value: isinstance(value, Mesh),
    Mesh.parse,
    "data=1,expert=1,tensor=1",
)
_SWITCH = Rule("true or false", lambda value: isinstance(value, bool))


def _setting(default: Any, rule: Rule, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule, "help": help})


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How to decode; `None` leaves a choice to the engine.

    Raises:
        UsageError: a value that is not allowed, or one whose feature is not built yet.
    """

    method: Literal["tree", "linear", "none"] = _setting(
        "tree",
        one_of("tree", "linear", "none"),
        "shape of the draft: a tree, a chain of the same budget, or no draft (plain decoding)",
    )
    drafter: Literal["auto", "mtp", "dspark", "ngram"] = _setting(
        "auto", one_of("auto", "mtp", "dspark", "ngram"), "what proposes tokens"
    )
    budget: int | Literal["auto"] = _setting(
        8, _BUDGET, "tokens verified in one step, the root included: 8 is the root and 7 drafts"
    )
    batch_size: int = _setting(1, integer(1, MAX_BATCH), "prompts decoded side by side")
    max_new_tokens: int = _setting(256, integer(1), "limit of a completion, its end token included")
    temperature: float = _setting(
        0.0, number("a number >= 0", lambda value: value >= 0), "0 takes the likeliest token"
    )
    top_p: float = _setting(
        1.0,
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1),
        "sample among the likeliest tokens that together hold this probability",
    )
    top_k: int = _setting(
        0, integer(0, INT32_MAX), "sample among this many likeliest tokens; 0 is all"
    )
    seed: int = _setting(
        0,
        integer(0, UINT32_MAX),
        "of the run; a prompt's own is derived from it and the prompt's id",
    )
    stop: tuple[str, ...] = _setting((), _STOP, "text that ends a completion (may be repeated)")
    max_len: int | None = _setting(
        None, integer(1), "capacity of a row in tokens (default: what prompts and limits need)"
    )
    impl: Literal["auto", "ref", "cpu", "tpu", "gpu"] = _setting(
        "auto", one_of("auto", "ref", "cpu", "tpu", "gpu"), "implementation of the kernels"
    )
    interpret: bool = _setting(
        False, _SWITCH, "interpret the TPU kernels on the CPU: slow, to check them (--impl tpu)"
    )
    dtype: Literal["float32", "bfloat16"] | None = _setting(
        None,
        one_of("float32", "bfloat16"),
        "of parameters and cache (default: float32 on a CPU, else as stored)",
    )
    mesh: Mesh | None = _setting(None, _MESH, "devices by kind of parallelism")  # noqa: RUF009
    compare: bool = _setting(
        False, _SWITCH, "run none, linear and tree on the same prompts and print a table"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, rule = getattr(self, field.name), field.metadata["rule"]
            if not (rule.valid(value) or (value is None and field.default is None)):
                raise UsageError(f"{field.name} must be {rule.wants}, not {reprlib.repr(value)}")
            unbuilt = _UNBUILT.get(field.name)
            if unbuilt and unbuilt.valid(value):
                raise UsageError(f"{field.name} {_text(value)} is not built yet; {unbuilt.wants}")
        if self.max_len is not None and self.budget != "auto" and self.budget > self.max_len:
            raise UsageError(
                f"budget {self.budget} is above the capacity, max_len {self.max_len}; "
                "lower the one or raise the other"
            )
        if self.interpret and self.impl != "tpu":
            raise UsageError(f"interpret is for the kernels of impl tpu, not {self.impl}")


# What a value may be but cannot be yet, and what to do instead. An entry goes when its feature is
# built; the flag and its values stay.
_UNBUILT = {
    "drafter": Rule("use auto or mtp", lambda value: value in ("dspark", "ngram")),
    "budget": Rule("use a number, 8 for example", lambda value: value == "auto"),
    "mesh": Rule("leave it out", lambda value: value not in (None, Mesh())),
}


def _text(value: Any) -> str:
    if isinstance(value, Mesh):
        return ",".join(f"{name}={size}" for name, size in dataclasses.asdict(value).items())
    return str(value)


def read_run_config(path: Path | None, flags: Mapping[str, str | bool | list[str]]) -> RunConfig:
    """Reads a run's settings: defaults, overridden by a TOML file, overridden by flags.

    Args:
        path: the file, or `None`.
        flags: only those given: their text, or lists of text for `stop`, or true.

    Raises:
        UsageError: the file cannot be read, has an unknown key, or a value is not allowed.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_toml(path)
        try:
            RunConfig(**values)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return RunConfig(**values | {name: _read_flag(name, text) for name, text in flags.items()})


def _read_flag(name: str, text: str | bool | list[str]) -> Any:
    if isinstance(text, list):
        return tuple(text)
    return _read_text(name, text) if isinstance(text, str) else text


def _read_text(name: str, text: str) -> Any:
    """The value that `text` stands for, or `text` itself, which the setting's rule then refuses."""
    try:
        return RunConfig.__dataclass_fields__[name].metadata["rule"].read(text)
    except ValueError:
        return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read as TOML: {reason}") from None
    names = [field.name for field in dataclasses.fields(RunConfig)]
    if unknown := [key for key in raw if key not in names]:
        named = [f"unknown key {key!r} (nearest: {nearest(key, names)})" for key in unknown]
        raise UsageError(f"{path} has {', '.join(named)}")
    if isinstance(raw.get("stop"), list):
        raw["stop"] = tuple(raw["stop"])
    if isinstance(raw.get("mesh"), str):
        raw["mesh"] = _read_text("mesh", raw["mesh"])
    return raw


def nearest(name: str, names: list[str]) -> str:
    """The names most like `name`, best first, for an error message."""
    return ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.6) or names)
