"""A small training run in a process of its own, which can be made to die at a chosen moment.

    python tests/training_process.py FOLDER STEPS [MOMENT]

FOLDER/data holds the texts, FOLDER/out is the run's folder. It goes through the command line's own
`main`; the model is small. MOMENT is one of `MOMENTS`; at the second save the process kills itself
there, as `kill -9` does, or a file of the state becomes too large for the disk. "hold" stops after
the first step until it is killed.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

MOMENTS = ("step", "model half written", "before the state", "state half written", "log")
FULL = ("model too large", "state too large", "log too large")
EVERY, SECOND = 2, 4
"""Steps between two saves, and the step of the second."""

LEAST = {"compress_ratios": [0, 0]}
"""One sliding layer and an MTP block."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_writing(state: Path) -> None:
    """As soon as orbax has begun to write the second state."""
    while not [*state.glob(f"*{SECOND}*tmp*")]:
        time.sleep(0.0005)
    die()


def arm(moment: str, folder: Path) -> None:
    """Puts the fault in its place."""
    from jaxspec import checkpoint
    from jaxspec.train import folder as module

    saves = {"model": 0, "state": 0}
    save_file, save_state, log = (
        checkpoint.save_file,
        module.RunFolder.save_state,
        module.RunFolder.log,
    )
    most = 1 << 13  # bytes of a file

    def write_model(tensors, path):
        saves["model"] += 1
        if saves["model"] == 2 and moment == "model half written":
            save_file(tensors, path)
            os.truncate(path, os.path.getsize(path) // 2)
            die()
        if saves["model"] == 2 and moment == "model too large":
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        save_file(tensors, path)

    def write_state(self, step, state):
        if step == SECOND and moment == "before the state":
            die()
        if step == SECOND and moment == "state half written":
            threading.Thread(target=die_when_writing, args=[folder / "state"], daemon=True).start()
        if step == SECOND and moment == "state too large":
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        save_state(self, step, state)

    def write_log(self, record):
        if record["step"] == SECOND - 1 and moment in ("step", "log"):
            if moment == "log":  # a part of the line has reached the disk
                with (folder / "log.jsonl").open("a") as file:
                    file.write('{"step": 3, "lm": 1.')
            die()
        if record["step"] == SECOND - 1 and moment == "log too large":
            size = (folder / "log.jsonl").stat().st_size + 10
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        log(self, record)
        if moment == "hold":
            print("holding", flush=True)
            while True:  # not signal.pause: a signal just before it would be lost
                time.sleep(0.02)

    checkpoint.save_file = write_model
    module.RunFolder.save_state, module.RunFolder.log = write_state, write_log


def main() -> int:
    folder, steps, moment = Path(sys.argv[1]), int(sys.argv[2]), (*sys.argv[3:], "")[0]
    # What a job in the background starts ignores interrupts from the beginning.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from jaxspec.config import config_from_released
    from jaxspec.train import __main__ as command
    from tests.oracle.random import TINY
    from tests.test_train import SMALL, recipe

    # What is trained is no matter, so it is what compiles soonest.
    cfg = config_from_released(TINY | SMALL | {"vocab_size": 4096, "num_hidden_layers": 1} | LEAST)
    chosen = recipe(
        steps=steps,
        evaluate_every=EVERY,
        repeat=(("set", 1),),
        decay=0.0,
        warmup=1,
        batch=1,
        draft_depths=1,
    )
    command.read_model_toml = lambda path: cfg
    command.read_recipe = lambda path, **changes: dataclasses.replace(chosen)
    arm(moment, folder / "out")
    return command.main(["--data", str(folder / "data"), "--out", str(folder / "out")])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
