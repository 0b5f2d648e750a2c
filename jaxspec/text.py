"""Text and tokens: the chat form of DeepSeek-V4 around a byte-level BPE tokenizer, and streaming.

The chat form, with an earlier turn and a system message:

    <bos>SYSTEM<User>PROMPT<Assistant></think>ANSWER<eos><User>PROMPT<Assistant></think>

The special tokens are looked up by their content in the tokenizer's file. Text from a user never
becomes one: it is encoded by a second tokenizer that knows none of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.errors import UsageError
from jaxspec.requests import Turn

SPECIAL_TOKENS = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "pad": "<｜▁pad▁｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "think": "<think>",
    "end_think": "</think>",
}
"""Field of `SpecialIds` to content, as all DeepSeek-V4 tokenizers have it."""


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens of the chat form."""

    bos: int
    eos: int
    pad: int
    user: int
    assistant: int
    think: int
    end_think: int


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encodes the chat form and decodes what the model says.

    `full` knows the special tokens; `plain` is the same tokenizer without them.
    """

    full: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    special: SpecialIds
    hidden: frozenset[int]

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Reads `tokenizer.json` of a model directory.

        Raises:
            UsageError: the file is missing, damaged, not byte-level BPE, or lacks a special token.
        """
        path = Path(directory) / "tokenizer.json"
        raw, full, plain = _read(path)
        if not isinstance(full.decoder, tokenizers.decoders.ByteLevel):
            raise UsageError(f"{path} has no byte-level decoder; a byte-level BPE is needed")
        vocab = full.get_vocab(with_added_tokens=True)
        for content, id in ((token["content"], token["id"]) for token in raw["added_tokens"]):
            if vocab[content] != id:  # the library numbers added tokens itself
                raise UsageError(
                    f"{path} gives {content} the id {id}, but it is read as {vocab[content]}; "
                    "added tokens must follow the vocabulary without a gap"
                )
        if missing := [content for content in SPECIAL_TOKENS.values() if content not in vocab]:
            raise UsageError(f"{path} lacks the special tokens {', '.join(missing)}")
        ids = {field: vocab[content] for field, content in SPECIAL_TOKENS.items()}
        return cls(full, plain, SpecialIds(**ids), frozenset(ids.values()))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.full.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; what looks like a special token in it is text too."""
        return list(self.plain.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, prompt: str, history: Sequence[Turn] = ()) -> list[int]:
        """Ids of a conversation whose next words are the assistant's, thinking switched off."""
        ids = [self.special.bos]
        for turn in (*history, Turn("user", prompt)):
            words = self.encode(turn.content)
            if turn.role == "system":
                ids += words
            elif turn.role == "user":
                ids += [self.special.user, *words]
            else:
                ids += [self.special.assistant, self.special.end_think, *words, self.special.eos]
        return [*ids, self.special.assistant, self.special.end_think]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without the chat form's special tokens; bytes that are no UTF-8 become �."""
        shown = [id for id in ids if id not in self.hidden]
        return str(self.full.decode(shown, skip_special_tokens=True))


def _read(path: Path) -> tuple[dict[str, Any], tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The file, the tokenizer in it, and the same one without any added token."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        full = tokenizers.Tokenizer.from_str(json.dumps(raw))
        plain = tokenizers.Tokenizer.from_str(json.dumps({**raw, "added_tokens": []}))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises the base class itself
        raise UsageError(f"{path} is not a tokenizer of the tokenizers library: {error}") from None
    return raw, full, plain


class TextStream:
    """Decodes a completion as its tokens come; the pieces together are `decode` of all tokens.

    A token may end inside a character of several bytes. Then it is held back, with the tokens
    after it, up to the one that ends with a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that has become certain with this token, possibly none."""
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        if text.endswith("�"):
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """What is still held back at the end."""
        text = self._tokenizer.decode(self._held)
        self._held.clear()
        return text
