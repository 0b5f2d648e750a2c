"""The command line: every mistake is one line and status 2, and what a run prints and writes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import demo, run
from jaxspec.resources import model_dir
from jaxspec.settings import RunConfig, read_run_config
from jaxspec.stream import PLAIN_MARKS
from tests import fake_engine

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
PROMPT = ["--prompt", "hello"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> fake_engine.Script:
    """The fake engine in the real one's place; the script tells it what to do."""
    script = fake_engine.Script()
    for name, module in fake_engine.install(script).items():
        monkeypatch.setitem(sys.modules, name, module)
    return script


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with wrong and right files, which becomes the current one."""
    files = {
        "unknown.toml": "temprature = 1.0\n",
        "broken.toml": "temperature =\n",
        "huge.toml": "temperature = 1" + "0" * 400,
        "deep.toml": "seed = " + "[" * 5000,
        "range.toml": "top_p = 1.5\n",
        "broken.jsonl": '{"prompt": "x"}\n{"prompt": \n',
        "keys.jsonl": '{"question": "x", "answer": "y"}\n',
        "type.jsonl": '{"prompt": 7}\n',
        "twice.jsonl": '{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "a"}\n',
        "empty.jsonl": "",
        "ids.jsonl": '{"prompt": [1, 5000]}\n',
        "good.jsonl": '{"prompt": "x", "answer": "y"}\n',
        "bare/config.json": "{}",
        "broken/config.json": "{}",
        "broken/tokenizer.json": "{",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (tmp_path / "nothing").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


BAD_INPUT = [
    (["--budget", "0"], ["budget must be an integer from 1 to 64 or auto, not 0"]),
    (["--budget", "65"], ["budget must be"]),
    (["--budget", "many"], ["budget must be", "'many'"]),
    (["--budget", "auto"], ["budget auto is not built yet"]),
    (["--budget", "9", "--max-len", "8"], ["budget 9 is above the capacity, max_len 8"]),
    (["--temperature", "-1"], ["temperature must be a number >= 0, not -1.0"]),
    (["--temperature", "nan"], ["temperature must be a number >= 0, not nan"]),
    (["--temperature=-inf"], ["temperature must be"]),
    (["--top-p", "0"], ["top_p must be a number above 0 and up to 1, not 0.0"]),
    (["--top-p", "1.01"], ["top_p must be"]),
    (["--top-k", "-1"], ["top_k must be an integer from 0 to 2147483647, not -1"]),
    (["--top-k", "4294967297"], ["top_k must be"]),
    (["--temperature", "1e39"], ["temperature must be a number >= 0, not 1e+39"]),
    (["--config", "huge.toml"], ["huge.toml: temperature must be a number"]),
    (["--config", "deep.toml"], ["deep.toml cannot be read as TOML"]),
    (["--model", "a" * 5000], ["unknown model"]),
    (["--json", "a" * 5000], ["cannot write", "File name too long"]),
    (["--json", "b/" * 3000], ["cannot write", "File name too long"]),
    (["--batch-size", "0"], ["batch_size must be an integer from 1 to 64, not 0"]),
    (["--batch-size", "65"], ["batch_size must be"]),
    (["--max-new-tokens", "0"], ["max_new_tokens must be an integer >= 1, not 0"]),
    (["--seed", "-1"], ["seed must be"]),
    (["--seed", "4294967296"], ["seed must be"]),
    (["--stop", ""], ["stop must be a list of strings, none of them empty"]),
    (["--max-len", "0"], ["max_len must be"]),
    (["--method", "chain"], ["method must be tree or linear or none, not 'chain'"]),
    (["--drafter", "eagle"], ["drafter must be auto or mtp or dspark or ngram"]),
    (["--drafter", "dspark"], ["drafter dspark is not built yet; use auto or mtp"]),
    (["--drafter", "ngram"], ["drafter ngram is not built yet"]),
    (["--impl", "cuda"], ["impl must be auto or ref or cpu or tpu or gpu, not 'cuda'"]),
    (["--interpret"], ["interpret is for the kernels of impl tpu, not auto"]),
    (["--impl", "ref", "--interpret"], ["of impl tpu, not ref"]),
    (["--dtype", "int8"], ["dtype must be float32 or bfloat16"]),
    (["--mesh", "data=2"], ["mesh data=2,expert=1,tensor=1 is not built yet"]),
    (["--mesh", "rows=2"], ["mesh must be like data=1,expert=1,tensor=1"]),
    (["--bugdet", "8"], ["unknown argument '--bugdet' (nearest: --budget"]),
    (["--temprature=1"], ["unknown argument '--temprature' (nearest: --temperature"]),
    (["--bud", "8"], ["unknown argument '--bud'"]),
    (["--budget"], ["argument --budget: expected one argument"]),
    (["--prompts", "good.jsonl", *PROMPT], ["not allowed with argument --prompts"]),
    (["--config", "unknown.toml"], ["unknown key 'temprature' (nearest: temperature)"]),
    (["--config", "broken.toml"], ["broken.toml cannot be read as TOML"]),
    (["--config", "range.toml"], ["range.toml: top_p must be"]),
    (["--config", "missing.toml"], ["missing.toml cannot be read as TOML: No such file"]),
    (["--config", "dmeo"], ["unknown run configuration 'dmeo'", "demo, sample"]),
    (["--config", ""], ["unknown run configuration ''"]),
    (["--prompt", ""], ["prompt 1 is empty"]),
    (["--prompt", "x", "  "], ["prompt 2 is empty"]),
    (["--prompt", "\udcff"], ["prompt 1: prompt is not valid text"]),
    (["--prompts", "missing.jsonl"], ["missing.jsonl cannot be read: No such file"]),
    (["--prompts", "nothing"], ["nothing cannot be read: Is a directory"]),
    (["--prompts", "broken.jsonl"], ["broken.jsonl, line 2 is not JSON"]),
    (["--prompts", "keys.jsonl"], ["line 1 has no prompt (its keys: question, answer)"]),
    (["--prompts", "type.jsonl"], ["line 1: prompt must be text or token ids, not a number"]),
    (["--prompts", "twice.jsonl"], ["lines 1 and 2 have the same id 'a'"]),
    (["--prompts", "empty.jsonl"], ["empty.jsonl holds no prompt"]),
    (["--prompts", "ids.jsonl"], ["prompt 1 holds token id 5000; the vocabulary ends at 4095"]),
    (["--model", "nope"], ["unknown model 'nope'", "give nano or a directory"]),
    (["--model", "nothing"], ["model 'nothing' has no config.json"]),
    (["--model", "good.jsonl"], ["unknown model 'good.jsonl': no such directory"]),
    (["--model", "bare", *PROMPT], ["model 'bare' has no tokenizer.json; give prompts as token"]),
    (["--model", "broken", *PROMPT], ["tokenizer.json is not a tokenizer"]),
    (["--json", "nothing"], ["cannot write 'nothing': it exists and is not a regular file"]),
    (["--prompts", "good.jsonl", "--json", "nothing/../good.jsonl"], ["is the prompts file"]),
    (["--json", "none/out.json"], ["cannot write 'none/out.json'", "No such file"]),
    (["--json", "good.jsonl/out.json"], ["cannot write"]),
    (["--json", ""], ["cannot write"]),
]


@pytest.mark.parametrize(("argv", "parts"), BAD_INPUT, ids=[" ".join(a)[:60] for a, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_status_2_and_nothing_is_written(
    inputs: Path, script, capsys: pytest.CaptureFixture, argv: list[str], parts: list[str]
) -> None:
    before = {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()}
    if "--json" not in argv:
        argv = [*argv, "--json", "out.json"]
    assert run.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxspec.run: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
    assert script.runs == []
    assert {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("argv", [["--budget", "0"], ["--prompts", "-"], ["--config", "a\nb.toml"]])
def test_bad_input_of_a_real_process(argv: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec.run", *argv],
        input=b'{"prompt": "x"}\n{"text": "x"}\n',
        capture_output=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"jaxspec.run: ")
    assert done.stderr.count(b"\n") == 1


def test_a_refusal_needs_no_jax() -> None:
    """So that a mistake is told at once."""
    code = (
        "import sys; from jaxspec.run import main; status = main(['--prompt', '']); "
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False)
    assert done.returncode == 2


def test_a_tokenizer_larger_than_the_model_is_refused_at_once(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(fake_engine, "VOCAB", 4095)
    assert run.main(PROMPT) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has 4095 token ids, its tokenizer.json 4096" in line
    assert script.runs == []


def test_help_names_every_setting(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        run.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for name in RunConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown
    for flag in ("--model", "--prompt", "--prompts", "--json", "--config"):
        assert flag in shown


def test_text_goes_to_standard_output_and_figures_to_the_json_file(
    script, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "out.json"
    argv = ["--prompt", "one", "two", "--json", str(path), "--seed", "7", "--batch-size", "2"]
    assert run.main(argv) == 0
    out, err = capsys.readouterr()
    value = json.loads(path.read_text(encoding="utf-8"))
    (only,) = value["runs"]
    texts = [each["text"] for each in only["completions"]]
    assert out == f"== 1 ==\n{texts[0]}\n\n== 2 ==\n{texts[1]}\n\n"
    assert err.startswith("tree: ")
    assert [each["id"] for each in only["completions"]] == [1, 2]
    assert (value["config"]["seed"], value["config"]["model"]) == (7, "nano")
    assert value["identical"] is None
    assert only["tokens"] == sum(len(each["token_ids"]) for each in only["completions"])
    assert only["per_depth"]
    assert [each["finish_reason"] for each in only["completions"]] == ["stop", "stop"]
    assert list(tmp_path.iterdir()) == [path]


def test_one_prompt_prints_its_bare_text(script, capsys: pytest.CaptureFixture) -> None:
    assert run.main([*PROMPT]) == 0
    assert capsys.readouterr().out == "Answer 1: 漢字 🙂 to «hello» is def f(x): return x + 1\n\n"


def test_a_data_sets_file_works_as_it_is_and_keeps_its_order(
    script, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    rows = [
        {"id": f"q{i}", "prompt": f"p{i}", "answer": "z", "max_new_tokens": 30 - i}
        for i in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert run.main(["--prompts", str(path), "--json", str(out), "--batch-size", "4"]) == 0
    completions = json.loads(out.read_text())["runs"][0]["completions"]
    assert [each["id"] for each in completions] == [row["id"] for row in rows]
    assert [len(each["token_ids"]) for each in completions] == [30 - i for i in range(9)]
    printed = capsys.readouterr().out
    assert printed == "".join(f"== {each['id']} ==\n{each['text']}\n\n" for each in completions)


def test_token_ids_need_no_tokenizer(script, inputs: Path, capsys: pytest.CaptureFixture) -> None:
    (inputs / "p.jsonl").write_text('{"prompt": [7, 8]}')
    assert run.main(["--model", "bare", "--prompts", "p.jsonl", "--json", "o.json"]) == 0
    (completion,) = json.loads((inputs / "o.json").read_text())["runs"][0]["completions"]
    assert completion["text"] is None
    assert capsys.readouterr().out.split() == [str(id) for id in completion["token_ids"]]


def test_compare_runs_three_methods_on_the_same_prompts(
    script, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "out.json"
    argv = ["--prompt", "a", "b", "--compare", "--json", str(path), "--temperature", "0.7"]
    assert run.main(argv) == 0
    assert [each.method for each in script.runs] == ["none", "linear", "tree"]
    assert {each.temperature for each in script.runs} == {0.7}
    value = json.loads(path.read_text())
    assert [each["method"] for each in value["runs"]] == ["none", "linear", "tree"]
    assert value["identical"] is True
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines() if line.split()[-1:] == ["yes"]] == [
        "linear",
        "tree",
    ]


@pytest.mark.parametrize(
    ("margin", "status", "verdict"), [(0.5, 1, "no"), (1e-5, 0, "near-tie"), (None, 1, "no")]
)
def test_compare_fails_for_a_difference_that_no_near_tie_excuses(
    script, tmp_path: Path, capsys: pytest.CaptureFixture, margin, status, verdict
) -> None:
    script.margin, script.diverge = margin, {"tree": [4]}
    path = tmp_path / "out.json"
    assert run.main(["--prompt", "a", "b", "--compare", "--json", str(path)]) == status
    value = json.loads(path.read_text())
    assert value["identical"] is False
    (found,) = value["divergences"]
    assert (found["id"], found["method"], found["position"]) == (1, "tree", 4)
    assert found["excused"] is (status == 0)
    out = capsys.readouterr().out
    assert "tree differs from none in 1 at token 4" in out
    (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["tree"]][:1]
    assert row[-1] == verdict


def test_without_arguments_the_demonstration_runs(script, capsys: pytest.CaptureFixture) -> None:
    assert run.main([]) == 0
    out, err = capsys.readouterr()
    assert [each.method for each in script.runs] == ["tree", "none", "linear", "tree"]
    assert script.runs[0] == read_run_config(Path("configs/run/demo.toml").resolve(), {})
    assert script.loaded == [(model_dir("nano"), "float32")]
    positions = [out.index(prompt) for prompt in demo.PROMPTS]
    assert positions == sorted(positions)
    assert out.startswith(demo.legend("plain").plain)
    assert out.count(PLAIN_MARKS[0]) > len(demo.PROMPTS)
    assert out.index("tokens/s") > positions[-1]
    assert "comparing: none" in err


def test_flags_without_prompts_apply_to_the_demonstration(script, capsys) -> None:
    assert run.main(["--method", "linear", "--max-new-tokens", "9"]) == 0
    assert [(each.method, each.max_new_tokens) for each in script.runs] == [("linear", 9)]
    assert demo.PROMPTS[0] in capsys.readouterr().out


@pytest.mark.parametrize("compare", [False, True])
def test_ctrl_c_writes_what_had_finished(
    script, tmp_path: Path, capsys: pytest.CaptureFixture, compare: bool
) -> None:
    run.main(["--prompt", "a", "b", "c", "--method", "none", "--json", str(tmp_path / "all.json")])
    whole = json.loads((tmp_path / "all.json").read_text())["runs"][0]["completions"]
    script.interrupt_after = len(whole[0]["token_ids"]) + 5
    path = tmp_path / "part.json"
    argv = ["--prompt", "a", "b", "c", "--method", "none", "--json", str(path)]
    assert run.main(argv + ["--compare"] * compare) == 130
    value = json.loads(path.read_text())
    assert value["runs"][0]["completions"] == whole[:1]
    assert len(value["runs"]) == 1
    assert value["identical"] is None
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_what_had_finished_is_written_in_input_order(script, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.jsonl", tmp_path / "out.json"
    limits = {"long": 20, "short": 2, "longest": 30}
    prompts.write_text(
        "\n".join(
            json.dumps({"id": name, "prompt": "a", "max_new_tokens": limit})
            for name, limit in limits.items()
        )
    )
    script.interrupt_after = 50
    argv = ["--prompts", str(prompts), "--batch-size", "3", "--method", "none"]
    assert run.main([*argv, "--json", str(path)]) == 130
    completions = json.loads(path.read_text())["runs"][0]["completions"]
    assert [each["id"] for each in completions] == ["long", "short"]


def start(*argv: str) -> subprocess.Popen:
    """A real process with both its outputs piped."""
    return subprocess.Popen(
        [sys.executable, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**ENVIRONMENT, "PYTHONUTF8": "1"},
    )


def test_a_real_signal_ends_with_130_and_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    process = start("-m", "tests.fake_engine", "--prompt", "a", "b", "--json", str(path))
    try:
        while "waiting" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    completions = json.loads(path.read_text(encoding="utf-8"))["runs"][0]["completions"]
    assert [each["id"] for each in completions] == [1]
    assert f"== 1 ==\n{completions[0]['text']}\n\n== 2 ==\n" in out


def test_a_full_disk_after_the_run_is_told_and_leaves_no_file(
    script, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run.main([*PROMPT, "--json", str(tmp_path / "out.json")]) == 1
    assert "was not written: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "x" * 2000}) for _ in range(200)))
    code = (
        "import sys; from tests import fake_engine; from jaxspec.run import main; "
        "sys.modules.update(fake_engine.install(fake_engine.Script())); "
        f"sys.exit(main(['--prompts', {str(prompts)!r}, '--max-new-tokens', '5000']))"
    )
    process = start("-c", code)
    try:
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
