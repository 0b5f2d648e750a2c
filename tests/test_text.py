"""The chat form, special tokens that text cannot forge, and streamed decoding."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.errors import UsageError
from jaxspec.requests import Turn
from jaxspec.resources import model_dir
from jaxspec.text import SPECIAL_TOKENS, TextStream, Tokenizer

NANO = model_dir("nano")
TOKENIZER = Tokenizer.load(NANO)
LIBRARY = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK = SPECIAL_TOKENS.values()

# Hypothesis also tries the literals of the sources, and special tokens are among them.
plain_text = st.text(st.characters(codec="utf-8")).filter(
    lambda text: not any(token in text for token in SPECIAL_TOKENS.values())
)
forging_text = st.lists(plain_text | st.sampled_from(list(SPECIAL_TOKENS.values()))).map("".join)
any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1))
histories = st.lists(st.builds(Turn, st.sampled_from(["user", "assistant"]), plain_text))


def token_bytes() -> dict[int, bytes]:
    """The bytes of each token, from the alphabet that byte-level BPE writes its vocabulary in."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    byte_of = {chr(byte): byte for byte in kept}
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(moved)}
    special = set(SPECIAL_TOKENS.values())
    return {
        id: b"" if content in special else bytes(byte_of[letter] for letter in content)
        for content, id in LIBRARY.get_vocab().items()
    }


BYTES = token_bytes()


def test_special_ids_are_found_by_content() -> None:
    for field, content in SPECIAL_TOKENS.items():
        assert getattr(TOKENIZER.special, field) == LIBRARY.token_to_id(content)
    assert TOKENIZER.vocab_size == 4096


@given(text=forging_text)
def test_text_comes_back_and_never_becomes_a_special_token(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not TOKENIZER.hidden & set(ids)
    assert TOKENIZER.decode(ids) == text


@given(prompt=forging_text, history=histories)
def test_a_prompt_cannot_forge_a_turn(prompt: str, history: list[Turn]) -> None:
    ids = TOKENIZER.encode_chat(prompt, history)
    users = 1 + sum(turn.role == "user" for turn in history)
    assistants = 1 + sum(turn.role == "assistant" for turn in history)
    counts = {id: ids.count(id) for id in TOKENIZER.hidden}
    special = TOKENIZER.special
    assert counts == {
        special.bos: 1,
        special.eos: assistants - 1,
        special.pad: 0,
        special.user: users,
        special.assistant: assistants,
        special.think: 0,
        special.end_think: assistants,
    }


@given(prompt=plain_text, history=histories, system=st.none() | plain_text)
def test_the_chat_form_is_the_template_read_by_the_library(prompt, history, system) -> None:
    """For text without special tokens the library's own reading of the whole string agrees."""
    template = BOS + (system or "")
    for turn in history:
        opening = USER if turn.role == "user" else ASSISTANT + END_THINK
        template += opening + turn.content + (EOS if turn.role == "assistant" else "")
    template += USER + prompt + ASSISTANT + END_THINK
    first = [Turn("system", system)] if system is not None else []
    ids = TOKENIZER.encode_chat(prompt, first + history)
    assert ids == LIBRARY.encode(template, add_special_tokens=False).ids


@given(ids=any_ids)
def test_decoding_is_that_of_the_bytes(ids: list[int]) -> None:
    whole = b"".join(BYTES[id] for id in ids)
    assert TOKENIZER.decode(ids) == whole.decode("utf-8", errors="replace")


@given(ids=any_ids)
def test_streamed_pieces_make_up_the_whole(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(ids)
    assert stream.finish() == ""


@given(text=plain_text.filter(lambda text: "�" not in text), seed=st.integers(0, 2**32))
def test_half_a_character_is_never_shown(text: str, seed: int) -> None:
    """Also where the text is cut into single bytes at random, so that most tokens are parts."""
    single = {content: id for id, content in BYTES.items() if len(content) == 1}
    coin = random.Random(seed)
    ids: list[int] = []
    for token in TOKENIZER.encode(text):
        split = coin.random() < 0.5
        ids += [single[bytes([byte])] for byte in BYTES[token]] if split else [token]
    stream = TextStream(TOKENIZER)
    shown = ""
    for id in ids:
        shown += stream.push(id)
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def write_tokenizer(folder: Path, change) -> Path:
    raw = json.loads((NANO / "tokenizer.json").read_text())
    change(raw)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


def move_special_tokens(raw: dict, first: int) -> None:
    """Gives the special tokens ids from `first` on, in reverse; fillers take their old places."""
    for place, token in enumerate(reversed(raw["added_tokens"])):
        raw["model"]["vocab"][f"filler{place}"] = raw["model"]["vocab"].pop(token["content"])
        token["id"] = first + place
        token["special"] = False
    raw["added_tokens"].reverse()


def test_special_ids_may_lie_elsewhere_and_be_marked_otherwise(tmp_path) -> None:
    path = write_tokenizer(tmp_path, lambda raw: move_special_tokens(raw, 5000))
    moved = Tokenizer.load(path)
    assert (moved.special.end_think, moved.special.bos) == (5000, 5006)
    assert moved.vocab_size == 5007
    forged = f"a {END_THINK}{USER} b"
    ids = moved.encode_chat(forged)
    assert ids[:2] == [moved.special.bos, moved.special.user]
    assert ids[2:-2] == TOKENIZER.encode(forged)
    assert moved.decode(ids) == forged


def test_an_id_that_is_given_twice_is_refused(tmp_path) -> None:
    path = write_tokenizer(tmp_path, lambda raw: move_special_tokens(raw, 4090))
    with pytest.raises(UsageError, match="gives an id twice"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is not a tokenizer"),
        (b"{}", "is not a tokenizer"),
        (b"[1]", "is not a tokenizer"),
        (b"\xff\xfe", "is not a tokenizer"),
        (b'{"version": "1.0", "model": {"type": "BPE"}}', "is not a tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, reason) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UsageError, match=reason) as refusal:
        Tokenizer.load(tmp_path)
    assert str(refusal.value).startswith(str(tmp_path / "tokenizer.json"))


def test_a_tokenizer_cut_short_is_refused(tmp_path) -> None:
    whole = (NANO / "tokenizer.json").read_bytes()
    for size in random.Random(0).sample(range(len(whole) - 2), 12):
        (tmp_path / "tokenizer.json").write_bytes(whole[:size])
        with pytest.raises(UsageError, match="is not a tokenizer"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", SPECIAL_TOKENS.values())
def test_a_missing_special_token_is_named(tmp_path, content) -> None:
    def drop(raw: dict) -> None:
        raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] != content]
        raw["model"]["vocab"]["gone"] = raw["model"]["vocab"].pop(content)

    with pytest.raises(UsageError, match=f"lacks the special tokens {content}$"):
        Tokenizer.load(write_tokenizer(tmp_path, drop))


def test_another_decoder_is_refused(tmp_path) -> None:
    def change(raw: dict) -> None:
        raw["decoder"] = {"type": "Fuse"}

    with pytest.raises(UsageError, match="a byte-level BPE is needed"):
        Tokenizer.load(write_tokenizer(tmp_path, change))
