"""Text as token ids: a `tokenizers` file when given, else bytes; special tokens that no text can spell.

The special tokens of the chat structure follow the ids of text. A turn is

    <|role|> text and media <|end|>        assistant: text and <|end|> are trained
    <|role|> text and media                the others: nothing is trained
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmcp.config import config
from mmcp.interleave import Piece

Turns = Sequence[tuple[str, Sequence[str | None]]]
ROLES = ("user", "assistant", "system")


@config
class TokenizerConfig:
    """Where the ids of text come from."""

    file: str = ""
    """A JSON file of the `tokenizers` library; empty: one id a byte of UTF-8."""

    template: str = ""
    """The chat template of the file's model: a .jinja file, or a tokenizer_config.json; empty: the marks above."""
    pads: tuple[str, ...] = ()
    """What the template writes for a medium, such as <|video_pad|>, where it takes contents as lists of parts; rows of
    the encoder stand there. Empty: contents are text, media stand where the manifest has them."""

    def __post_init__(self):
        if self.template and not self.file:
            raise ValueError("tokenizer.template needs tokenizer.file, whose special tokens it writes; name both")
        if self.pads and not self.template:
            raise ValueError(f"tokenizer.pads={self.pads} without tokenizer.template; name the template")

    def build(self) -> "Tokenizer":
        """Make the tokenizer; raises ValueError for a file that is none."""
        if self.template:
            return ChatTokenizer(self.file, self.template, self.pads)
        return FileTokenizer(self.file) if self.file else ByteTokenizer()


class Tokenizer(ABC):
    """Ids of text, then of the special tokens: user, assistant, system, end."""

    text_size: int
    """Ids of text are 0 .. text_size - 1."""

    @property
    def vocab_size(self) -> int:
        return self.text_size + len(ROLES) + 1

    @property
    def end(self) -> int:
        """The special token that ends an answer."""
        return self.text_size + len(ROLES)

    def opening(self, role: str) -> list[int]:
        """Ids before a turn of `role`; raises ValueError for an unknown one."""
        if role not in ROLES:
            raise ValueError(f"role '{role}' of a turn is unknown; use one of {', '.join(ROLES)}")
        return [self.text_size + ROLES.index(role)]

    def closing(self, role: str) -> list[int]:
        """Ids after a turn of `role`."""
        return [self.end] if role == "assistant" else []

    def conversation(self, turns: Turns, *, prompt: bool) -> list[Piece]:
        """Lay out a conversation; only the assistant's words, and what ends them, are trained.

        turns: role and items of each; an item is text, or None for a medium
        prompt: end with the opening of an assistant's turn
        """
        pieces, item = [], 0
        for role, items in turns:
            trained = role == "assistant"
            pieces.append(Piece(ids=tuple(self.opening(role))))
            for text in items:
                pieces.append(
                    Piece(item=item) if text is None else Piece(ids=tuple(self.encode(text)), trained=trained)
                )
                item += 1
            pieces.append(Piece(ids=tuple(self.closing(role)), trained=trained))
        if prompt:
            pieces.append(Piece(ids=tuple(self.opening("assistant"))))
        return [piece for piece in pieces if piece.ids or piece.item >= 0]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, all below text_size whatever it spells; lone surrogates count as U+FFFD (see `clean`)."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out; bytes that are no UTF-8 become U+FFFD."""

    @staticmethod
    def clean(text: str) -> tuple[str, int]:
        """Replace lone surrogates, which no encoding can hold, by U+FFFD; returns the text and how many there were."""
        lone = sum("\ud800" <= character <= "\udfff" for character in text)
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text) if lone else text, lone


class ByteTokenizer(Tokenizer):
    """One id a byte of UTF-8."""

    text_size = 256

    def encode(self, text: str) -> list[int]:
        return list(self.clean(text)[0].encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id < self.text_size).decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, its own special tokens switched off.

    Text is normalised as the file says, so decoding gives back the normalised text.
    """

    def __init__(self, path: str):
        from tokenizers import Tokenizer as Model

        if not Path(path).is_file():
            raise ValueError(f"tokenizer file '{path}' does not exist ({Path(path).resolve()}); give a JSON file")
        try:
            self.model = Model.from_file(path)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"tokenizer file '{path}' cannot be read ({error}); save it with `tokenizers`") from None
        self.model.no_truncation()
        self.model.no_padding()
        self.model.encode_special_tokens = True
        unknown = json.loads(self.model.to_str())["model"].get("unk_token")
        added = self.model.get_added_tokens_decoder()
        self.forbidden = {id for id, token in added.items() if token.special and token.content != unknown}
        self.text_size = max(self.model.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._encode(self.clean(text)[0])

    def _encode(self, text: str) -> list[int]:
        encoding = self.model.encode(text, add_special_tokens=False)
        if self.forbidden.isdisjoint(encoding.ids):
            return encoding.ids
        ids: list[int] = []  # a vocabulary of whole words may hold a special token's name as a word
        for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            ids += self._spell(text[start:stop]) if id in self.forbidden else [id]
        return ids

    def _spell(self, word: str) -> list[int]:
        """Encode `word` one character at a time."""
        if len(word) < 2:
            raise ValueError(f"text holds {word!r}, a special token of the tokenizer's file; remove it from the text")
        return [id for character in word for id in self._encode(character)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([id for id in ids if id < self.text_size], skip_special_tokens=True)


class ChatTokenizer(FileTokenizer):
    """A tokenizer file with its model's chat template: special tokens are the file's own, and only the template's."""

    def __init__(self, path: str, template: str, pads: tuple[str, ...]):
        from encoders.chat import ChatTemplate

        super().__init__(path)
        added: dict[int, Any] = self.model.get_added_tokens_decoder()
        self.special = {id for id, token in added.items() if token.special or token.content in pads}
        unknown = [pad for pad in pads if self.model.token_to_id(pad) is None]
        if unknown:
            raise ValueError(f"tokenizer.pads: '{path}' has no token '{unknown[0]}'; name tokens of the file")
        self.forbidden |= self.special
        self.own = type(self.model).from_str(self.model.to_str())
        self.template = ChatTemplate.read(template, pads=pads)
        self._end = self._find_end()

    @property
    def vocab_size(self) -> int:
        return self.text_size

    @property
    def end(self) -> int:
        return self._end

    def conversation(self, turns: Turns, *, prompt: bool) -> list[Piece]:
        from encoders.chat import to_pieces

        cleaned = [(role, [text if text is None else self.clean(text)[0] for text in items]) for role, items in turns]
        spans = self.template.spans(cleaned, prompt=prompt)
        return to_pieces(
            spans, encode=self._encode, encode_own=self._encode_own, is_end=lambda id: id in self.special
        )  # fmt: skip

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([id for id in ids if id not in self.special], skip_special_tokens=True)

    def _encode_own(self, text: str) -> list[int]:
        """Encode what the template writes, special tokens included."""
        return self.own.encode(text, add_special_tokens=False).ids

    def _find_end(self) -> int:
        """Return the special token that ends an assistant's turn."""
        pieces = self.conversation([("user", ["a"]), ("assistant", ["b"])], prompt=False)
        return [id for piece in pieces if piece.trained for id in piece.ids][-1]
