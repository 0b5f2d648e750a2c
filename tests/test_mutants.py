"""The tests find faults: each of `mutants.py` is planted in a copy of the sources and found."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
COPIED = ("jaxspec", "pallas_kernels", "configs", "tests", "pyproject.toml")
SECONDS = 1200  # for the tests of one fault
FAILED = 1  # pytest's status if tests ran and some failed

FILES = sorted({test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests.split()})


def slug(mutant: Mutant) -> str:
    return re.sub(r"\W+", "-", mutant.name)


def plant(mutant: Mutant) -> str:
    """The text of the mutant's file with the fault in it."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.file} has {mutant.old!r} not once"
    return text.replace(mutant.old, mutant.new)


def test_names_are_unique():
    assert len({slug(mutant) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=slug)
def test_faults_can_be_planted_and_their_tests_exist(mutant):
    text = plant(mutant)
    compile(text, mutant.file, "exec")
    assert ast.dump(ast.parse(text)) != ast.dump(
        ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    )
    assert mutant.tests
    for test in mutant.tests.split():
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def killed_by(tests: set[str], mutants: Iterable[Mutant]) -> str:
    """Names of the faults that one of these tests has to find, in the order of the list."""
    return "; ".join(mutant.name for mutant in mutants if tests & set(mutant.tests.split()))


def test_the_readme_says_which_faults_each_law_kills():
    """Its first column is a law of the table of laws, or a file of tests for what is left."""
    readme = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    laws = {}
    for line in readme.partition("## The eight laws")[2].partition("\n## ")[0].splitlines():
        if found := re.match(r"\| (\d) \|", line):
            laws[found[1]] = set(re.findall(r"`([\w/]+\.py::\w+)`", line))
    assert len(laws) == 8
    want = {law: killed_by(tests, MUTANTS) for law, tests in laws.items()}
    named = set().union(*laws.values())
    rest = [mutant for mutant in MUTANTS if not named & set(mutant.tests.split())]
    for file in sorted({mutant.tests.partition("::")[0] for mutant in rest}):
        want[f"`{file}`"] = "; ".join(m.name for m in rest if m.tests.startswith(f"{file}::"))
    assert all(want.values())
    table = readme.partition("## Planted faults")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([`\d].*?) \| (.*) \|$", table, re.M) == list(want.items())


def run_copy(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests of the sources that were copied to `folder / "copy"`."""
    copy = folder / "copy"
    # Beside the copy as beside the checkout, or the tests that read fixtures would be skipped.
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the sources."""
    for name in COPIED:
        source, target = ROOT / name, tmp_path / "copy" / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("mutant", MUTANTS, ids=slug)
def test_a_fault_is_found(mutant, copied):
    (copied / "copy" / mutant.file).write_text(plant(mutant), encoding="utf-8")
    done = run_copy(copied, mutant.tests.split())
    assert done.returncode == FAILED, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("file", FILES)
def test_the_same_tests_pass_without_a_fault(file, copied):
    tests = {test for mutant in MUTANTS for test in mutant.tests.split()}
    done = run_copy(copied, sorted(test for test in tests if test.partition("::")[0] == file))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
