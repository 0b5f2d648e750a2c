"""The demonstration: prompts of the three kinds that the embedded model knows, and the legend."""

from __future__ import annotations

from rich.text import Text

from jaxspec.stream import DRAFT_STYLE, PLAIN_MARKS, Marks

CONFIG = "demo"
"""Name of the run configuration that is used when the command line is empty."""

PROMPTS = (
    # Grade-school maths.
    "A baker fills 6 trays with 12 rolls each. She sells 45 rolls in the morning and 18 in the "
    "afternoon. How many rolls are left?",
    "Nora walks 3 km to school and back on each of 5 days. On Saturday she walks 7 km more. How "
    "many kilometers does she walk in total?",
    # Small Python functions.
    "Write a function to count the vowels in a given string.\n"
    'Your code should pass this test:\nassert count_vowels("garden") == 2',
    "Write a python function to find the second largest number of a list.\n"
    "Your code should pass this test:\nassert second_largest([4, 9, 2, 7]) == 7",
    # Chat.
    "What should I think about before I adopt a dog?",
    "Give me three ideas for a rainy weekend at home.",
)


def legend(marks: Marks) -> Text:
    """One line that tells how accepted drafts look."""
    text = Text("Accepted drafts are ")
    if marks == "style":
        return text.append("marked like this", DRAFT_STYLE).append("; the rest the model chose.")
    return text.append(f"in {PLAIN_MARKS[0]} {PLAIN_MARKS[1]}; the rest the model chose.")
