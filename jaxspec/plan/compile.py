"""Compiles jobs for a target in another process, which may abort or hang without harm.

Compilers abort the whole process on faults of their own, and Mosaic GPU keeps compiled kernels
without asking for which GPU they are: so one process for each target, and a new one after a death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxspec.plan import dumps
from jaxspec.plan.program import Job, Outcome
from jaxspec.plan.targets import Target, environment

TIMEOUT = 300.0
"""Seconds that a job gets, the start of its process included."""


class Compiler:
    """A process that compiles for one target; closed, it and its dumps are gone."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._folder = tempfile.TemporaryDirectory(prefix="jaxspec-plan-")
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()
        self._folder.cleanup()

    def compile(self, job: Job, timeout: float = TIMEOUT) -> Outcome:
        """Compiles one job; a death or a hang of the process is an outcome too."""
        start = time.monotonic()
        process = self._process or self._start()
        assert process.stdin is not None
        # It may have died before it could read; what follows finds out why.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(dataclasses.asdict(job)).encode() + b"\n")
            process.stdin.flush()
        answer = self._read_line(process, start + timeout)
        if answer:
            return Outcome.from_json(json.loads(answer))
        seconds = time.monotonic() - start
        hung = process.poll() is None and answer is None
        words = f"not done within {timeout:g} s" if hung else self._last_words(process)
        self._stop()
        return Outcome(job, False, words, seconds=seconds)

    def _start(self) -> subprocess.Popen[bytes]:
        folder = Path(self._folder.name)
        dump = folder / "dump"
        self._stderr = (folder / "stderr").open("w+b")
        # `env` adds to what the process inherits; the path makes it import what this one does.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        added = environment(self.target, dump) | {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            [
                "env",
                *(f"{name}={value}" for name, value in added.items()),
                *(sys.executable, "-m", "jaxspec.plan.worker", self.target.name, str(dump)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
        )
        return self._process

    @staticmethod
    def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """One line; empty if the process ended first, None if time did."""
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        return line

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        assert self._stderr is not None
        self._stderr.seek(0)
        words = dumps.reason(self._stderr.read().decode(errors="replace"))
        end = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"the compiler ended its process ({end}): {words}"

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self._stderr):
                if pipe is not None:
                    pipe.close()


def compile_all(target: Target, jobs: Iterable[Job], timeout: float = TIMEOUT) -> Iterator[Outcome]:
    """Outcomes of `jobs`, in their order."""
    with Compiler(target) as compiler:
        for job in jobs:
            yield compiler.compile(job, timeout)
