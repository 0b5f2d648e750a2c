"""Run settings: what is refused and how, and that TOML, flags and Python mean the same."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.errors import UsageError
from jaxspec.limits import UINT32_MAX
from jaxspec.resources import run_config_file
from jaxspec.settings import MAX_BATCH, MAX_BUDGET, Mesh, RunConfig, read_run_config

REFUSED = {
    "method": ["branch", "", 3, None],
    "drafter": ["eagle", True],
    "budget": [0, -1, MAX_BUDGET + 1, 2.0, True, "automatic", None],
    "batch_size": [0, MAX_BATCH + 1, "4", 1.5],
    "max_new_tokens": [0, -3, 1.0],
    "temperature": [-0.1, math.nan, math.inf, "hot", True],
    "top_p": [0, -0.5, 1.0001, math.nan],
    "top_k": [-1, 0.5],
    "seed": [-1, UINT32_MAX + 1, "x"],
    "stop": ["###", ("",), (1,), ["a"]],
    "max_len": [0, -1, 3.5],
    "impl": ["cuda"],
    "interpret": [0, "yes"],
    "dtype": ["float16", 32],
    "mesh": ["data=2", 4],
    "compare": [1, "yes"],
}
UNBUILT = {"drafter": ["dspark", "ngram"], "budget": ["auto"]}

valid_settings = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["tree", "linear", "none"]),
        "drafter": st.sampled_from(["auto", "mtp"]),
        "budget": st.integers(1, MAX_BUDGET),
        "batch_size": st.integers(1, MAX_BATCH),
        "max_new_tokens": st.integers(1, 10**6),
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(0, 10**6),
        "seed": st.integers(0, UINT32_MAX),
        "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3).map(tuple),
        "max_len": st.integers(MAX_BUDGET, 10**6),
        "impl": st.sampled_from(["auto", "ref", "cpu", "tpu", "gpu"]),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "compare": st.booleans(),
    },
)


def test_every_setting_has_a_refused_value() -> None:
    assert REFUSED.keys() == {field.name for field in dataclasses.fields(RunConfig)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in REFUSED.items() for v in vs])
def test_refusal_names_setting_and_value_in_one_line(name: str, value: object) -> None:
    with pytest.raises(UsageError) as refusal:
        RunConfig(**{name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name} must be ")
    assert f"not {value!r}" in message
    assert "\n" not in message


def test_refusal_of_a_huge_value_is_short() -> None:
    with pytest.raises(UsageError) as refusal:
        RunConfig(method="x" * 10_000)
    assert len(str(refusal.value)) < 120


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in UNBUILT.items() for v in vs])
def test_what_is_not_built_says_so(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} {value} is not built yet; use "):
        RunConfig(**{name: value})


def test_a_mesh_of_one_device_is_allowed_and_more_are_not_built() -> None:
    assert read_run_config(None, {"mesh": "data=1,expert=1,tensor=1"}).mesh == Mesh()
    with pytest.raises(UsageError, match="mesh data=1,expert=2,tensor=1 is not built yet"):
        read_run_config(None, {"mesh": "expert=2"})


@pytest.mark.parametrize("text", ["data", "data=0", "data=1,data=1", "rows=1", "data=x", "", "="])
def test_a_mesh_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="mesh must be like data=1"):
        read_run_config(None, {"mesh": text})


def test_a_budget_above_the_capacity_is_refused() -> None:
    assert RunConfig(budget=8, max_len=8).max_len == 8
    with pytest.raises(UsageError, match="budget 9 is above the capacity, max_len 8"):
        RunConfig(budget=9, max_len=8)


@given(settings=valid_settings)
def test_toml_flags_and_python_mean_the_same(
    settings: dict, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = RunConfig(**settings)
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(
        encoding="utf-8",
        data="".join(f"{name} = {_toml(value)}\n" for name, value in settings.items()),
    )
    assert read_run_config(path, {}) == expected
    flags = {name: _flag(value) for name, value in settings.items() if value is not False}
    assert read_run_config(None, flags) == expected


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    # A JSON string is a TOML string but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _flag(value: object) -> str | bool | list[str]:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, bool) else str(value)


@given(file=valid_settings, flags=valid_settings)
def test_flags_override_the_file(
    file: dict, flags: dict, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(
        encoding="utf-8", data="".join(f"{name} = {_toml(value)}\n" for name, value in file.items())
    )
    given_flags = {name: _flag(value) for name, value in flags.items() if value is not False}
    read = read_run_config(path, given_flags)
    assert read == RunConfig(**file | {name: flags[name] for name in given_flags})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("temprature = 1.0", ["unknown key 'temprature'", "nearest: temperature"]),
        ("bugdet = 4\nsede = 1", ["'bugdet' (nearest: budget", "'sede' (nearest: seed"]),
        ("[run]\nbudget = 8", ["unknown key 'run'"]),
        ("budget = ", ["cannot be read as TOML"]),
        ("budget = 0", ["budget must be an integer from 1 to 64 or auto, not 0"]),
        ('budget = "8"', ["budget must be", "not '8'"]),
        ('stop = "###"', ["stop must be a list of strings"]),
        ("top_p = nan", ["top_p must be a number above 0 and up to 1, not nan"]),
        ("interpret = true", ["interpret is for the kernels of impl tpu, not auto"]),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, text, parts) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refusal:
        read_run_config(path, {})
    assert str(refusal.value).startswith(str(path))
    for part in parts:
        assert part in str(refusal.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as TOML"):
        read_run_config(path, {})


def test_every_shipped_run_configuration_is_valid() -> None:
    shipped = sorted(run_config_file("demo").parent.glob("*.toml"))
    assert len(shipped) >= 2
    for path in shipped:
        assert read_run_config(run_config_file(path.stem), {}) != RunConfig()


def test_an_unknown_run_configuration_lists_those_that_ship() -> None:
    with pytest.raises(UsageError, match=r"unknown run configuration 'dmeo'.*demo, sample"):
        run_config_file("dmeo")
