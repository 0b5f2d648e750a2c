"""Text and tokens: the chat form of DeepSeek-V4 around a byte-level BPE tokenizer, and streaming.

The chat form, with an earlier turn and a system message:

    <bos>SYSTEM<User>PROMPT<Assistant></think>ANSWER<eos><User>PROMPT<Assistant></think>

The special tokens are looked up by their content in the tokenizer's file. Text from a user never
becomes one: it is encoded without the tokenizer's added tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

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

    `plain` knows none of the added tokens; `vocab` maps all of them and all others to their ids.
    """

    plain: tokenizers.Tokenizer
    vocab: Mapping[str, int]
    special: SpecialIds

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Reads `tokenizer.json` of a model directory.

        Raises:
            UsageError: the file is missing, damaged, not byte-level BPE, has an id twice or lacks
                a special token.
        """
        path = Path(directory) / "tokenizer.json"
        plain, vocab = _read(path)
        if not isinstance(plain.decoder, tokenizers.decoders.ByteLevel):
            raise UsageError(f"{path} has no byte-level decoder; a byte-level BPE is needed")
        if len(set(vocab.values())) < len(vocab):
            raise UsageError(f"{path} gives an id twice; each token needs its own")
        if missing := [content for content in SPECIAL_TOKENS.values() if content not in vocab]:
            raise UsageError(f"{path} lacks the special tokens {', '.join(missing)}")
        ids = {field: vocab[content] for field, content in SPECIAL_TOKENS.items()}
        return cls(plain, vocab, SpecialIds(**ids))

    @functools.cached_property
    def hidden(self) -> frozenset[int]:
        """Ids that are never shown as text: the special tokens of the chat form."""
        return frozenset(dataclasses.asdict(self.special).values())

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.vocab.values()) + 1

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
        """Text of ids, added tokens left out; bytes that are no UTF-8 become �."""
        return str(self.plain.decode([id for id in ids if id not in self.hidden]))


def _read(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """The file's tokenizer without its added tokens, and its whole vocabulary."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        plain = tokenizers.Tokenizer.from_str(json.dumps({**raw, "added_tokens": []}))
        added = {token["content"]: int(token["id"]) for token in raw.get("added_tokens", ())}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises the base class itself
        raise UsageError(f"{path} is not a tokenizer of the tokenizers library: {error}") from None
    return plain, plain.get_vocab() | added


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

    @property
    def held(self) -> str:
        """What is held back, as it would read if nothing came after it."""
        return self._tokenizer.decode(self._held)

    def finish(self) -> str:
        """What is still held back at the end."""
        text = self.held
        self._held.clear()
        return text


class StopScan:
    """Looks for stop strings in a completion as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._text = ""

    def push(self, token: int) -> str | None:
        """The text before the stop string that is complete with this token, if one is.

        Of several the one that begins first counts.
        """
        searched = max(len(self._text) - max(map(len, self._stops), default=0), 0)
        self._text += self._stream.push(token)
        text = self._text + self._stream.held
        found = [at for stop in self._stops if (at := text.find(stop, searched)) >= 0]
        return text[: min(found)] if found else None
