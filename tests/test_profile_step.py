"""`scripts.profile_step`: reading programs, refusals, and the command on all kinds of layers."""

from __future__ import annotations

import re

import pytest

from scripts import profile_step
from tests.oracle import random_checkpoint, save_checkpoint

HLO = """
ENTRY main {
  %dot.1 = f32[8,4]{1,0} dot(%a, %b), op_name="jit(f)/layer0/attention/attention.output/dot"
  %while.2 = (s32[], f32[4]) while(%t), body=%b, op_name="jit(f)/layer0/moe/while"
  ROOT %fusion.3 = f32[4]{0} fusion(%x), op_name="jit(f)/layer1/moe/moe.route/add"
  %add.4 = f32[4]{0} add(%x, %y), op_name="jit(f)/argmax"
  %no_name.5 = f32[4]{0} add(%x, %y)
}
"""


def test_stages_are_the_innermost_scopes_and_loops_are_not_counted() -> None:
    stages = profile_step.op_stages(HLO)
    assert set(stages) == {"dot.1", "fusion.3", "add.4"}
    assert stages["dot.1"] == profile_step.STAGES["attention.output"]
    assert stages["fusion.3"] == profile_step.STAGES["moe.route"]
    assert stages["add.4"] == profile_step.STAGES[""]


@pytest.fixture(params=["small", pytest.param("embedded", marks=pytest.mark.slow)])
def model(request, tmp_path) -> str:
    """A model with all kinds of layers: a drawn one whose bytes show in the digits, or nano."""
    if request.param == "embedded":
        return "nano"
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "vocab_size": 2048}
    save_checkpoint(tmp_path, *random_checkpoint(sizes | {"compress_ratios": [0, 4, 16]}))
    return str(tmp_path)


def test_a_model_is_profiled(model: str, capsys) -> None:
    assert profile_step.main([model, "--steps", "2", "--context", "40"]) == 0
    printed = capsys.readouterr().out
    for scope in ("hyper", "compress", "attention", "moe", "head"):
        assert profile_step.STAGES[scope] in printed
    numbers = [float(n) for n in re.findall(r"\| ([0-9.]+) \|", printed)]
    # A stage may take less than the last digit printed; all together do not.
    assert len(numbers) > 4
    assert sum(numbers) > 0
    floor = re.search(r"Floor ([0-9.]+) ms: ([0-9.]+) MB of weights, ([0-9.]+) MB", printed)
    assert floor is not None
    assert all(float(figure) > 0 for figure in floor.groups())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere"], "unknown model"),
        (["--steps", "0"], "at least 1"),
        (["--batch-size", "x"], "int"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(capsys, argv, said) -> None:
    assert profile_step.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
