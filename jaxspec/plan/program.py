"""What is compiled, and what its compiler said."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Traffic(NamedTuple):
    """Bytes between a device's memory and a kernel, by the kernel's own schedule."""

    read: int
    written: int
    fewest: int  # every operand read once and every result written once, at the least

    @property
    def ratio(self) -> float:
        """Bytes moved to the fewest possible."""
        return (self.read + self.written) / self.fewest


class Program(NamedTuple):
    """A function and the abstract arrays to compile it for.

    `traffic` is asked where it is known for which device.
    """

    function: Callable[..., Any]
    avals: tuple[Any, ...]
    traffic: Callable[[], Traffic | None] = lambda: None

    @property
    def operand_bytes(self) -> int:
        """Bytes of all operands."""
        from pallas_kernels.memory import nbytes

        return nbytes(self.avals)


@dataclasses.dataclass(frozen=True)
class Job:
    """A program by its maker: another process imports `module:function` and calls it."""

    name: str
    builder: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_memory_bound: bool = False  # its time is that of the bytes it moves

    def build(self) -> Program:
        """The program."""
        module, _, function = self.builder.partition(":")
        program = getattr(importlib.import_module(module), function)(**self.arguments)
        assert isinstance(program, Program)
        return program


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas kernel of a compiled program; what its target does not have is None."""

    name: str
    vmem: int | None = None  # bytes
    vmem_limit: int | None = None  # bytes that the kernel asks for; None: the target's default
    smem: int | None = None  # bytes of a GPU's shared memory
    registers: int | None = None  # a thread
    spilled: int | None = None  # bytes that a GPU spills; VLIW slots that spill on a TPU
    bundles: int | None = None  # static VLIW bundles, a loop's body counted once
    slots: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Class of a bundle's slots to those filled and those there were."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job. Where it does not compile, `words` are its compiler's."""

    job: Job
    compiles: bool
    words: str = ""
    fits: bool = True  # the operands into the device's memory; if not, nothing was compiled
    seconds: float = 0.0
    kernels: tuple[Kernel, ...] = ()
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    around: dict[str, int] = dataclasses.field(default_factory=dict)
    """XLA's own operations around the kernels to the bytes of their results."""
    traffic: Traffic | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """The inverse of `to_json`, after a way through text."""
        kernels = tuple(
            Kernel(**each | {"slots": {name: tuple(n) for name, n in each["slots"].items()}})
            for each in data["kernels"]
        )
        traffic = None if data["traffic"] is None else Traffic(*data["traffic"])
        job = Job(**data["job"])
        return cls(**data | {"job": job, "kernels": kernels, "traffic": traffic})
