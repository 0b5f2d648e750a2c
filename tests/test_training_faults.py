"""Training against what comes from outside: kills, full disks, damaged files, a second process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load_checkpoint
from jaxspec.errors import UsageError
from jaxspec.resources import model_dir, packaged_config
from jaxspec.text import Tokenizer
from jaxspec.train import __main__ as command
from jaxspec.train.data import read_documents
from jaxspec.train.folder import RunFolder, open_folder
from jaxspec.train.recipe import Recipe, read_recipe
from tests.test_train import write_data
from tests.training_process import FULL, MOMENTS, SECOND

SCRIPT = Path(__file__).with_name("training_process.py")
STATE = {"matrix": jnp.arange(10_000, dtype=jnp.float32).reshape(100, 100), "best": jnp.float32(2)}


# A state is whole or refused.


def save_two(path: Path) -> dict[str, Any]:
    """States of step 2 and 4, the second all one larger; returns it."""
    newer = jax.tree.map(lambda leaf: leaf + 1, STATE)
    with open_folder(path) as folder:
        folder.save_state(2, STATE)
        folder.save_state(4, newer)
    return newer


def read(path: Path, like: Any = STATE) -> tuple[int, Any]:
    with open_folder(path) as folder:
        return folder.read_state(like)


def test_the_newest_state_is_read(tmp_path: Path) -> None:
    newer = save_two(tmp_path)
    step, state = read(tmp_path)
    assert step == 4
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), state, newer)))


def refusal(path: Path, newer: dict[str, Any]) -> str | None:
    """What the newest state is refused with, or None if it is read and right."""
    try:
        step, state = read(path)
    except UsageError as error:
        return str(error)
    assert step == 4
    assert bool((state["matrix"] == newer["matrix"]).all())
    return None


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_truncated_state_is_refused_in_one_line(tmp_path: Path, capfd, keep: float) -> None:
    """Whichever file is cut, unless nothing in it is needed."""
    newer = save_two(tmp_path)
    refused = set()
    for file in sorted((tmp_path / "state" / "4").rglob("*")):
        if not file.is_file():
            continue
        content = file.read_bytes()
        file.write_bytes(content[: int(keep * len(content))])
        said = refusal(tmp_path, newer)
        if said is not None:
            assert f"{tmp_path / 'state' / '4'} is damaged" in said
            assert "\n" not in said
            refused.add(file.parent.name)
        file.write_bytes(content)
    assert "d" in refused  # the shards themselves
    assert "Traceback" not in capfd.readouterr().err
    assert read(tmp_path)[0] == 4


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save_two(tmp_path)
    for other in (
        STATE | {"matrix": jnp.zeros((100, 99))},
        {"matrix": STATE["matrix"]},
        STATE | {"more": jnp.zeros(3)},
    ):
        with pytest.raises(UsageError, match="damaged or of another model"):
            read(tmp_path, other)


def test_removing_a_damaged_state_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """As the line says."""
    save_two(tmp_path)
    (tmp_path / "state" / "4").rename(tmp_path / "aside")
    step, state = read(tmp_path)
    assert (step, float(state["best"])) == (2, 2.0)


# The log tells of steps that count.


@pytest.mark.parametrize(
    "tail", ["", '{"step": 3, "lm": 1.', "{}\n", "\0\0\0\n", '{"step": "x"}\n']
)
def test_the_log_is_cut_back_to_the_state_that_a_run_goes_on_from(tmp_path: Path, tail) -> None:
    newer = save_two(tmp_path)
    lines = [json.dumps({"step": step, "lm": step / 7}) for step in (1, 2, 3, 4, 4, 5, 6)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{line}\n" for line in lines) + tail)
    with open_folder(tmp_path) as folder:
        folder.read_state(newer)
        folder.log({"step": 5, "lm": 0.5})
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 4, 5]
    before = log.stat()
    read(tmp_path)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4, 4]
    read(tmp_path)
    assert log.stat().st_ino != before.st_ino


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    left = [tmp_path / ".log.jsonl.1.partial", tmp_path / "model" / ".model.safetensors.2.partial"]
    kept = [tmp_path / "model" / "model.safetensors", tmp_path / "model" / ".hidden"]
    for file in left + kept:
        file.write_text("half")
    with open_folder(tmp_path):
        pass
    assert [file.exists() for file in left + kept] == [False, False, True, True]


# One process at a time.


def command_line(folder: Path) -> list[str]:
    """A recipe that suits the small texts, as flags without --out."""
    small = {"sequence": 24, "batch": 1, "micro": 1, "draft_depths": 3, "draft_anchors": 1}
    text = packaged_config("train/nano.toml").read_text()
    for name, value in (small | {"repeat": "{ set = 1 }"}).items():
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
    recipe = folder / "recipe.toml"
    recipe.write_text(text)
    return ["--config", str(recipe), "--data", str(write_data(folder / "data"))]


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import sys; from pathlib import Path; from jaxspec.files import sole_writer\n"
        "with sole_writer(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        (out / "log.jsonl").write_text("of the first\n")
        assert command.main([*command_line(tmp_path), "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert printed.err == (
            f"jaxspec.train: another process is writing {out}; wait until it ends or name another "
            "folder\n"
        )
        assert (out / "log.jsonl").read_text() == "of the first\n"
        assert not (out / "state").exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with open_folder(out):
            pass
    finally:
        holder.kill()
        holder.communicate()


def test_a_run_that_cannot_have_its_folder_says_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out")
    assert command.main([*command_line(tmp_path), "--out", out]) == 2
    printed = capsys.readouterr().err
    assert "cannot be a run's folder: Not a directory" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(("micro", "documents"), [(5, 4), (33, 40)])
def test_dev_texts_that_fill_no_micro_batch_are_refused_at_the_start(
    tmp_path: Path, capsys, micro: int, documents: int
) -> None:
    """An evaluation would have nothing to take a mean of, after all steps before it."""
    argv = command_line(tmp_path)
    recipe, dev = tmp_path / "recipe.toml", tmp_path / "data" / "set" / "dev.jsonl"
    text = recipe.read_text().replace("batch = 1\n", f"batch = {micro}\n")
    recipe.write_text(text.replace("micro = 1\n", f"micro = {micro}\n"))
    dev.write_text((dev.read_text().splitlines()[0] + "\n") * documents)
    train = dev.with_name("train.jsonl")
    train.write_text((train.read_text() + "\n") * 50)
    assert command.main([*argv, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"than micro, {micro}; add some or lower micro" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv", [["--steps", "many"], [], ["--surprise"], ["--dat", "x"]])
def test_a_wrong_command_line_is_one_line(argv: list[str], capsys) -> None:
    assert command.main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_state_that_does_not_fit_the_disk_is_told_and_the_older_one_stays(
    tmp_path: Path, capfd
) -> None:
    """The limit of a file's size stands for the full disk; one process for both."""
    save_two(tmp_path)
    big = STATE | {"matrix": jax.random.normal(jax.random.key(0), (300, 300))}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = RunFolder(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="state was not written") as error:
            folder.save_state(6, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert read(tmp_path)[0] == 4
    assert "Traceback" not in capfd.readouterr().err


# Real processes.


class Finished(NamedTuple):
    status: int
    err: str


class Site(NamedTuple):
    """Where the runs of this file are, and the compilations that they share."""

    folder: Path
    environment: dict[str, str]

    def run(self, name: str, moment: str = "", steps: int = 6) -> Finished:
        """A run to its end in the folder of that name."""
        with self.begin(name, moment, steps) as process:
            _, err = process.communicate(timeout=280)
        return Finished(process.returncode, err)

    def begin(self, name: str, moment: str, steps: int = 6) -> subprocess.Popen[str]:
        folder = self.folder / name
        if not (folder / "data").exists():
            write_data(folder / "data")
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(steps), moment],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def result(self, name: str) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """The log without its times, and the model's leaves."""
        out = self.folder / name / "out"
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("tokens_per_s", None)
        leaves = jax.tree.leaves(load_checkpoint(out / "model")[0])
        return lines, [np.asarray(leaf, np.float32) for leaf in leaves]

    def check(self, name: str) -> None:
        """That run and model are those that nothing came between."""
        (log, model), (want_log, want_model) = self.result(name), self.result("whole")
        assert log == want_log
        assert all(map(np.array_equal, model, want_model))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    site = Site(folder, {**os.environ, **cache})
    assert site.run("whole").status == 0
    return site


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_and_nothing_is_lost(site: Site, moment: str) -> None:
    """The log and the last model are bit for bit those of the run that was not killed."""
    assert site.run(moment, moment).status == -signal.SIGKILL
    log = (site.folder / moment / "out" / "log.jsonl").read_text()
    assert f'"step": {SECOND + 1}' not in log
    again = site.run(moment)
    assert again.status == 0, again.err
    site.check(moment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", FULL)
def test_a_full_disk_is_one_line_and_what_was_written_stays(site: Site, moment: str) -> None:
    ended = site.run(moment, moment)
    assert ended.status == 1, ended.err
    lines = ended.err.splitlines()
    assert lines[-1].startswith("jaxspec.train: ")
    # Besides the steps' own lines.
    assert [x for x in lines[:-1] if not x.lstrip().startswith(("step", "loss", "training"))] == []
    model, _ = load_checkpoint(site.folder / moment / "out" / "model")
    assert bool(jnp.isfinite(model.embed.astype(jnp.float32)).all())
    again = site.run(moment)
    assert again.status == 0, again.err
    site.check(moment)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_is_followed_and_a_second_run_is_refused(site: Site, number) -> None:
    name = f"stopped by {int(number)}"
    with site.begin(name, "hold") as process:
        try:
            assert process.stdout.readline() == "holding\n"
            second = site.run(name)
            assert second.status == 2
            assert "another process is writing" in second.err
            assert second.err.count("\n") == 1
            process.send_signal(number)
            _, err = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert err.splitlines()[-1].endswith("interrupted; the same command goes on from the last save")
    assert "Traceback" not in err
    assert site.run(name).status == 0
    site.check(name)


RECIPE = packaged_config("train/nano.toml")
FIELDS = [field.name for field in dataclasses.fields(Recipe)]


@pytest.mark.parametrize("name", FIELDS)
def test_a_recipe_with_a_value_of_another_type_is_refused(tmp_path: Path, name: str) -> None:
    raw = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    for wrong in ([], -1.5j, {}, None, 10**400, float("nan"), True):
        with pytest.raises(UsageError, match=name) as error:
            Recipe(**raw | {"repeat": tuple(raw["repeat"].items())} | {name: _frozen(wrong, name)})
        assert "\n" not in str(error.value)


def _frozen(value, name: str):
    """What a recipe would be given: pairs in the place of a table."""
    return (("gsm8k", value),) if name == "repeat" else value


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63])
def test_a_seed_that_no_key_can_be_made_of_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=r"seed is .*it must be from 0 to"):
        read_recipe(RECIPE, seed=seed)


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "\xff", "response": "x"}',
        b'{"prompt": 5, "response": "x"}',
        b'{"prompt": "x", "response": null}',
        b'{"prompt": "x", "response": "\\ud800"}',
        b'{"prompt": "x", "response": "y", "history": [5]}',
        b'{"prompt": "x", "response": "y", "history": 5}',
        b'{"prompt": ' + b"[" * 100_000,
        b"",
    ],
    ids=range(8),
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "x", "response": "y"}\n' + line + b"\n")
    with pytest.raises(UsageError, match=r"train.jsonl:2 must be a JSON object") as error:
        read_documents(path, Tokenizer.load(model_dir("nano")))
    assert "\n" not in str(error.value)
