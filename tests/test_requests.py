"""Prompts: what is read, what is refused and how, and a seed that depends on nothing else."""

import io
import json
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.errors import UsageError
from jaxspec.requests import (
    Request,
    Turn,
    check_token_ids,
    read_requests,
    requests_from_prompts,
)

text = st.text(st.characters(codec="utf-8"))
prompt_text = text.filter(str.strip)
token_ids = st.lists(st.integers(0, 2**31), min_size=1)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": text})
)
seeds = st.integers(0, 2**32 - 1)
text_rows = st.fixed_dictionaries(
    {"prompt": prompt_text, "response": text, "tests": st.lists(text)},
    optional={
        "id": text.map("q{}".format) | st.integers(1000) | st.none(),
        "history": turns,
        "max_new_tokens": st.integers(1, 10**9) | st.none(),
        "seed": seeds | st.none(),
    },
)
token_rows = st.fixed_dictionaries({"prompt": token_ids, "history": st.just([])})


@given(
    rows=st.lists(
        text_rows | token_rows, min_size=1, unique_by=lambda row: str(row.get("id") or row)
    ),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]),
)
def test_rows_come_back_as_written(rows, ascii_only, end, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    path.write_bytes(end.join(lines).encode())
    stride = end.count("\n")
    for place, (request, row) in enumerate(zip(read_requests(str(path)), rows, strict=True)):
        prompt = row["prompt"]
        assert request.prompt == (prompt if isinstance(prompt, str) else tuple(prompt))
        assert request.id == (row.get("id") or 1 + place * stride)
        assert [dict(vars(turn)) for turn in request.history] == row.get("history", [])
        assert request.max_new_tokens == row.get("max_new_tokens")
        assert request.seed == row.get("seed")


def test_standard_input_and_a_byte_order_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = types.SimpleNamespace(buffer=io.BytesIO(b'\xef\xbb\xbf{"prompt": "hello"}'))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_requests("-") == [Request(1, "hello")]


REFUSED_LINES = [
    ("hello", ["is not JSON", "line 2"]),
    ('{"prompt": "x"', ["is not JSON"]),
    ('{"prompt": "x"} {"prompt": "y"}', ["is not JSON"]),
    ("[" * 100_000, ["is not JSON"]),
    ("1" * 5000, ["is not JSON"]),
    ('"x"', ["is text; an object with a prompt is needed"]),
    ("[]", ["is a list"]),
    ("null", ["is null"]),
    ('{"question": "x", "answer": "y"}', ["has no prompt (its keys: question, answer)"]),
    ("{}", ["has no prompt (its keys: none)"]),
    ('{"prompt": null}', ["prompt must be text or token ids, not null"]),
    ('{"prompt": 3}', ["not a number"]),
    ('{"prompt": {"a": 1}}', ["not an object"]),
    ('{"prompt": true}', ["not true or false"]),
    ('{"prompt": ""}', ["is empty"]),
    ('{"prompt": " \\n\\t"}', ["is empty"]),
    ('{"prompt": []}', ["is empty"]),
    ('{"prompt": [1, "2"]}', ["prompt holds '2'; token ids are integers >= 0"]),
    ('{"prompt": [1, -2]}', ["prompt holds -2"]),
    ('{"prompt": [true]}', ["prompt holds True"]),
    ('{"prompt": [1.0]}', ["prompt holds 1.0"]),
    ('{"prompt": "\\ud83d"}', ["prompt is not valid text", "surrogate"]),
    ('{"prompt": "x", "id": [1]}', ["id must be text or an integer, not a list"]),
    ('{"prompt": "x", "id": 1.5}', ["id must be text or an integer, not a number"]),
    ('{"prompt": "x", "id": "\\udc00"}', ["id is not valid text"]),
    ('{"prompt": "x", "seed": -1}', ["seed must be an integer from 0 to 4294967295, not -1"]),
    ('{"prompt": "x", "seed": 4294967296}', ["seed must be"]),
    ('{"prompt": "x", "seed": 1.0}', ["seed must be", "not 1.0"]),
    ('{"prompt": "x", "seed": "1"}', ["seed must be", "not '1'"]),
    ('{"prompt": "x", "max_new_tokens": 0}', ["max_new_tokens must be an integer >= 1, not 0"]),
    ('{"prompt": "x", "max_new_tokens": true}', ["max_new_tokens must be"]),
    ('{"prompt": "x", "history": "hello"}', ["history must be a list of {role, content}"]),
    ('{"prompt": "x", "history": ["hello"]}', ["item 1 is not"]),
    ('{"prompt": "x", "history": [{"role": "user"}]}', ["item 1 is not, or its content"]),
    (
        '{"prompt": "x", "history": [{"role": "human", "content": "x"}]}',
        ["role of history item 1 must be system or user or assistant, not 'human'"],
    ),
    (
        '{"prompt": "x", "history": [{"role": "user", "content": ""}, '
        '{"role": "system", "content": ""}]}',
        ["history item 2 is a system turn; it must come first"],
    ),
    ('{"prompt": [1], "history": [{"role": "user", "content": "x"}]}', ["history goes with"]),
]


@pytest.mark.parametrize(("line", "parts"), REFUSED_LINES, ids=range(len(REFUSED_LINES)))
def test_a_wrong_line_is_named_with_what_is_wrong(tmp_path, line, parts) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "right"}\n' + line + '\n{"prompt": "right"}\n')
    with pytest.raises(UsageError) as refusal:
        read_requests(str(path))
    message = str(refusal.value)
    assert message.startswith(f"{path}, line 2")
    assert "\n" not in message
    assert len(message) < 250
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (['{"prompt": "x", "id": "a"}', '{"prompt": "y"}', '{"prompt": "z", "id": "a"}'], (1, 3)),
        (['{"prompt": "x", "id": 2}', '{"prompt": "y"}'], (1, 2)),
        (['{"prompt": "x", "id": "2"}', '{"prompt": "y", "id": 2}'], (1, 2)),
    ],
)
def test_an_id_that_comes_twice_is_refused_with_both_lines(tmp_path, lines, named) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=f"lines {named[0]} and {named[1]} have the same id"):
        read_requests(str(path))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_prompts_is_refused(tmp_path, content) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="holds no prompt"):
        read_requests(str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}')
    with pytest.raises(UsageError, match="line 2 is not UTF-8"):
        read_requests(str(path))


def test_a_missing_file_and_a_directory_are_refused(tmp_path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_requests(str(path))


def test_prompts_given_one_by_one() -> None:
    assert requests_from_prompts(["a", "b"]) == [Request(1, "a"), Request(2, "b")]
    for wrong, reason in (("", "prompt 2 is empty"), ("\udcff", "prompt 2: prompt is not valid")):
        with pytest.raises(UsageError, match=reason):
            requests_from_prompts(["a", wrong])


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    check_token_ids([Request(1, (0, 99)), Request(2, "text")], 100)
    with pytest.raises(
        UsageError, match="prompt 'q' holds token id 100; the vocabulary ends at 99"
    ):
        check_token_ids([Request(1, (0,)), Request("q", (3, 100))], 100)


def test_derived_seeds_never_change() -> None:
    """Recorded once: a stream of a given run seed and id must be the same in every release."""
    assert Request("gsm8k-7", "x").resolve_seed(0) == 3585933286
    assert Request(1, "x").resolve_seed(12345) == 3253602780


@given(seed=seeds, own=seeds, name=text | st.integers(), prompt=prompt_text)
def test_a_seed_depends_on_the_run_and_the_id_alone(seed, own, name, prompt) -> None:
    derived = Request(name, "x").resolve_seed(seed)
    assert 0 <= derived < 2**32
    other = Request(str(name), prompt, (Turn("user", "x"),), 5)
    assert other.resolve_seed(seed) == derived
    assert Request(name, prompt, seed=own).resolve_seed(seed) == own


def test_derived_seeds_differ() -> None:
    ids, runs = range(300), range(30)
    derived = {Request(name, "x").resolve_seed(run) for name in ids for run in runs}
    assert len(derived) >= 300 * 30 - 2
