"""Streamed text: input order, nothing lost, and drafts marked exactly where they are."""

import io
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxspec import demo
from jaxspec.resources import model_dir
from jaxspec.results import Completion, Emission
from jaxspec.stream import PLAIN_MARKS, StreamPrinter
from jaxspec.text import Tokenizer

TOKENIZER = Tokenizer.load(model_dir("nano"))
OPEN, CLOSE = PLAIN_MARKS
ANSI = re.compile(r"\x1b\[[0-9;]*m")

# Marks in the text itself would make the test's own reading of them ambiguous.
letters = st.characters(codec="utf-8", exclude_characters=[OPEN, CLOSE, "\r", "�"])
answers = st.lists(st.text(letters), min_size=1, max_size=4)


def emissions_of(index: int, ids: list[int], coin: random.Random) -> list[Emission]:
    """One row's emissions: prefill's token, steps of random length, the completion at the end."""
    steps = [Emission(index, tuple(ids[:1]), 0)]
    place = 1
    while place < len(ids):
        taken = tuple(ids[place : place + coin.randrange(1, 6)])
        place += len(taken)
        steps.append(Emission(index, taken, coin.choice([len(taken) - 1, len(taken)])))
    done = Completion(index, tuple(ids), TOKENIZER.decode(ids), "stop")
    return [*steps, Emission(index, (), 0, done)]


def interleave(rows: list[list[Emission]], coin: random.Random) -> list[Emission]:
    """All emissions, those of a row in order, rows mixed at random."""
    queues, mixed = [list(row) for row in rows], []
    while queues := [queue for queue in queues if queue]:
        mixed.append(coin.choice(queues).pop(0))
    return mixed


def play(texts: list[str], marks: str, seed: int, console: Console | None = None) -> str:
    coin = random.Random(seed)
    console = console or Console(file=io.StringIO(), highlight=False, markup=False)
    ids = [[*TOKENIZER.encode(text), TOKENIZER.special.eos] for text in texts]
    headings = [f"<<{place}>>" for place in range(len(texts))]
    printer = StreamPrinter(console, TOKENIZER, headings, marks=marks)
    for emission in interleave([emissions_of(i, row, coin) for i, row in enumerate(ids)], coin):
        printer(emission)
    return console.file.getvalue()


@given(texts=answers, seed=st.integers(0, 2**32))
def test_text_is_complete_and_in_input_order(texts: list[str], seed: int) -> None:
    end = "\n\n" if len(texts) > 1 else "\n"
    expected = "".join(f"<<{place}>>\n{text}{end}" for place, text in enumerate(texts))
    assert play(texts, "none", seed) == expected


@given(texts=answers, seed=st.integers(0, 2**32))
def test_plain_marks_only_add_brackets(texts: list[str], seed: int) -> None:
    marked = play(texts, "plain", seed)
    assert marked.replace(OPEN, "").replace(CLOSE, "") == play(texts, "none", seed)
    assert marked.count(OPEN) == marked.count(CLOSE)


def test_marks_enclose_the_accepted_drafts() -> None:
    """Also where a draft ends inside a character: the token that completes it decides."""
    console = Console(file=io.StringIO())
    printer = StreamPrinter(console, TOKENIZER, [""], marks="plain")
    words = TOKENIZER.encode("The cat sat")
    face = TOKENIZER.encode("🙂")
    assert len(words) == 3
    assert len(face) >= 2
    printer(Emission(0, (words[0],), 0))
    printer(Emission(0, (words[1], words[2]), 1))
    printer(Emission(0, tuple(face[:-1]), len(face) - 1))
    printer(Emission(0, (face[-1], words[1], words[2]), 2))
    printer(Emission(0, (TOKENIZER.special.eos,), 1, Completion(0, (), "", "stop")))
    assert console.file.getvalue() == "The‹ cat› sat‹🙂 cat› sat\n"


@given(
    text=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"]))).map("\n".join),
    seed=st.integers(0, 2**32),
)
def test_a_terminal_gets_the_same_text_with_styles(text: str, seed: int) -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=20, markup=False
    )
    assert ANSI.sub("", play([text], "style", seed, console)) == f"<<0>>\n{text}\n"


def test_a_terminal_sees_drafts_in_colour_and_underlined() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=10)
    printer = StreamPrinter(console, TOKENIZER, [""], marks="style")
    ids = TOKENIZER.encode("The cat sat\nThe cat sat [bold] :smile:\n")
    printer(Emission(0, tuple(ids[:1]), 0))
    printer(Emission(0, tuple(ids[1:]), len(ids) - 2, Completion(0, (), "", "stop")))
    shown = file.getvalue()
    assert shown.startswith("The\x1b[4;32m cat sat")
    assert ANSI.sub("", shown) == "The cat sat\nThe cat sat [bold] :smile:\n\n"


def test_the_current_row_is_printed_at_once_and_others_wait() -> None:
    file = io.StringIO()
    printer = StreamPrinter(Console(file=file), TOKENIZER, ["", ""], marks="none")
    first, second = TOKENIZER.encode("one cat"), TOKENIZER.encode("two dogs")
    assert file.getvalue() == ""
    printer(Emission(1, tuple(second), 0, Completion(1, (), "", "stop")))
    assert file.getvalue() == ""
    printer(Emission(0, tuple(first), 0))
    assert file.getvalue() == "one cat"
    printer(Emission(0, (), 0, Completion(0, (), "", "length")))
    assert file.getvalue() == "one cat\n\ntwo dogs\n\n"


def test_without_a_tokenizer_the_ids_are_printed() -> None:
    file = io.StringIO()
    printer = StreamPrinter(Console(file=file), None, [""], marks="plain")
    printer(Emission(0, (7,), 0))
    printer(Emission(0, (8, 9), 1, Completion(0, (), None, "length")))
    assert file.getvalue() == "7 ‹8 ›9 \n"


@pytest.mark.parametrize("marks", ["style", "plain"])
def test_the_legend_shows_the_marks_it_explains(marks: str) -> None:
    file = io.StringIO()
    terminal = marks == "style"
    console = Console(
        file=file, force_terminal=terminal, color_system="standard" if terminal else None
    )
    console.print(demo.legend(marks))
    assert ("\x1b[4;32m" in file.getvalue()) is terminal
    assert (OPEN in file.getvalue()) is not terminal
