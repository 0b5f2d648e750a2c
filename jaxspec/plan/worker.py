"""The process that compiles: jobs in on standard input, outcomes out, one JSON line each."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.plan import dumps, table
from jaxspec.plan.program import Job, Kernel, Outcome, Program
from jaxspec.plan.targets import TARGETS, Target, devices

KNOWN_KERNELS: dict[str, Kernel] = {}
"""What this process has compiled for a GPU."""


@functools.cache
def mesh(target: Target) -> Any:
    """One of the target's devices. The mesh tells kernels and their dispatch what they are for."""
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(devices(target)[:1]), ("device",))


def compile_program(program: Program) -> Any:
    """Compiles for the device of the mesh that is set."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    place = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    avals = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), program.avals
    )
    return jax.jit(program.function).trace(*avals).lower().compile()


def _too_much(operands: int, target: Target) -> str:
    there = table.size(target.memory)
    return f"its operands take {table.size(operands)}, more than the device's {there}"


@contextlib.contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Sends standard output to a file; what is printed by other languages than Python too."""
    kept = os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)


def run(job: Job, target: Target, dump: Path) -> Outcome:
    """Builds and compiles one job; what Python or the compiler raises becomes words."""
    import jax

    start = time.perf_counter()
    try:
        program = job.build()
        if program.operand_bytes > target.memory:
            return Outcome(job, False, _too_much(program.operand_bytes, target), fits=False)
        with jax.set_mesh(mesh(target)), printed_to(dump / "printed"):
            compiled, moved = compile_program(program), program.traffic()
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(job, False, words, seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    if target.kind == "tpu":
        kernels = dumps.tpu_kernels(hlo, dump, target.vmem)
    else:
        printed = (dump / "printed").read_text(errors="replace")
        kernels = dumps.gpu_kernels(hlo, printed, KNOWN_KERNELS)
    return Outcome(
        job=job,
        compiles=True,
        seconds=seconds,
        kernels=kernels,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        around=dumps.around_kernels(hlo),
        traffic=moved,
    )


def main() -> int:
    """Answers jobs until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m jaxspec.plan.worker")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("dump", type=Path)
    args = parser.parse_args()
    # Answers get standard output for themselves: libraries print there too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    target = TARGETS[args.target]
    for line in sys.stdin:
        shutil.rmtree(args.dump, ignore_errors=True)
        args.dump.mkdir(parents=True)
        outcome = run(Job(**json.loads(line)), target, args.dump)
        print(json.dumps(outcome.to_json()), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
