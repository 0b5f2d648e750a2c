"""The shape of the code: files and functions small enough to be read at once."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for package in ("jaxspec", "pallas_kernels") for path in (ROOT / package).rglob("*.py")
)
FILE_LINES, FUNCTION_LINES = 330, 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert _code_lines(node) <= FUNCTION_LINES, node.name


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, those of its docstring left out."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return lines - (first.end_lineno - first.lineno + 1) * is_docstring


def test_the_tests_that_the_readme_names_exist() -> None:
    """And so no line of its tables outlives its test."""
    folder = ROOT / "tests"
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", (folder / "README.md").read_text()))
    assert len(named) > 50
    defined = {
        (file, node.name)
        for file in {file for file, _ in named}
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert named - defined == set()
