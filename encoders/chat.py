"""A model's own chat template, with exact knowledge of which of its output is whose.

The template is rendered with marks in place of all contents, so what it writes itself, special tokens included, and
what users wrote never meet: the former is read with special tokens, the latter without, and nothing that a user writes
can become one. Each piece is encoded on its own. A conversation is refused when marks do not tell all: when the
template drops, repeats or changes a content (trimming is found out and followed), or writes other text for other
contents: the render with marks and the true render are compared letter by letter.

Templates are programs of strangers: they run in jinja2's immutable sandbox, without files, imports or clock.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmcp.interleave import Piece

PADDING = "\n \n"  # around a mark: a template that trims contents takes it away
Turns = Sequence[tuple[str, Sequence[str | None]]]
"""Role and items of each turn: text, or None for a medium."""


@dataclass(frozen=True)
class Span:
    """A stretch of a rendered conversation."""

    text: str
    role: str = ""
    """Whose content it is; empty: the template's own."""
    item: int = -1
    """Number of the medium that stands here; -1: text."""


class ChatTemplate:
    """Renders conversations and tells contents from template.

    source: the template
    pads: what it writes for a medium where contents are lists of parts; empty: contents are text
    variables: what else the template may read, such as bos_token
    """

    def __init__(self, source: str, *, pads: tuple[str, ...], variables: dict[str, Any]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        self.pads, self.variables = pads, variables
        self.splitter = re.compile("|".join(map(re.escape, sorted(pads, key=len, reverse=True))) or r"(?!)")
        try:
            self.template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(
                f"the chat template cannot be read ({error}); give the one of the model's folder"
            ) from None

    @staticmethod
    def read(path: str, *, pads: tuple[str, ...]) -> "ChatTemplate":
        """Read a template: a .jinja file, or a tokenizer_config.json, whose special tokens it may read too.

        Raises ValueError for a file without one.
        """
        file, variables, source = Path(path), {}, None
        try:
            text = file.read_text(encoding="utf-8")
            beside = file if file.suffix == ".json" else file.with_name("tokenizer_config.json")
            settings = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        except (OSError, ValueError) as error:
            raise ValueError(f"chat template '{path}' cannot be read ({error}); give a file of the model's") from None
        source = settings.get("chat_template") if file.suffix == ".json" else text
        if not isinstance(source, str):
            raise ValueError(f"'{path}' holds no chat_template; give the model's chat_template.jinja")
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = settings.get(name)
            variables[name] = value["content"] if isinstance(value, dict) else value or ""
        return ChatTemplate(source, pads=pads, variables=variables)

    def spans(self, turns: Turns, *, prompt: bool) -> list[Span]:
        """Return a conversation in the template's order, every letter once.

        prompt: end with the opening of an assistant's turn
        Raises ValueError when the template does not let contents be told apart.
        """
        letter = _unused_letter(turns)
        bare = self._render(turns, prompt, lambda i, text: f"{letter}{i}{letter}")
        padded = self._render(turns, prompt, lambda i, text: f"{PADDING}{letter}{i}{letter}{PADDING}")
        owners = [(role, text) for role, items in turns for text in items]
        mark = re.compile(f"{letter}([0-9]+){letter}")
        trims = _trims(padded, mark)
        spans, seen = [], []
        for number, piece in enumerate(mark.split(bare)):
            if number % 2 == 0:
                spans += self._own(piece)
                continue
            item = int(piece)
            seen.append(item)
            role, text = owners[item]
            spans.append(Span("", role, item) if text is None else Span(_trimmed(text, *trims[item]), role))
        media = [i for i, (_, text) in enumerate(owners) if text is None]
        expected = [i for i in range(len(owners)) if not (self.pads and i in media)]
        if sorted(seen) != expected:
            wrong = sorted(set(expected) ^ set(seen)) or [i for i in seen if seen.count(i) > 1]
            raise ValueError(
                f"the chat template drops or repeats the content of a turn of '{owners[wrong[0]][0]}', so what is "
                "trained cannot be told; use a template that writes each content once"
            )
        spans = _number_media(spans, media) if self.pads else spans
        self._compare(turns, prompt, spans)
        return spans

    def _own(self, text: str) -> list[Span]:
        """Cut the template's own text at its pads, which stand for media not yet numbered."""
        spans, start = [], 0
        for pad in self.splitter.finditer(text):
            spans += [Span(text[start : pad.start()]), Span(pad.group(), item=0)]
            start = pad.end()
        return [span for span in (*spans, Span(text[start:])) if span.text]

    def _compare(self, turns: Turns, prompt: bool, spans: list[Span]) -> None:
        """Raise ValueError unless the true render is the spans put together."""
        true = self._render(turns, prompt, lambda i, text: "" if text is None else text)
        if true != "".join(span.text for span in spans):
            raise ValueError(
                "the chat template writes other text for this conversation than for any other of its roles (it reads "
                "or changes a content), so what is trained cannot be told; change the content or the template"
            )

    def _render(self, turns: Turns, prompt: bool, content: Callable[[int, str | None], str]) -> str:
        messages, number = [], 0
        for role, items in turns:
            parts = []
            for text in items:
                is_part = text is None and self.pads
                parts.append({"type": "video"} if is_part else {"type": "text", "text": content(number, text)})
                number += 1
            joined = parts if self.pads else "".join(part["text"] for part in parts)
            messages.append({"role": role, "content": joined})
        try:
            return self.template.render(messages=messages, add_generation_prompt=prompt, **self.variables)
        except Exception as error:  # the program of a stranger may raise anything
            raise ValueError(
                f"the chat template refuses this conversation ({error}); change the one or the other"
            ) from None


class _Generation(Extension):
    """The tag by which templates of transformers mark what an assistant says; here it only lets its inside through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        parser.stream.expect("name:generation")
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _unused_letter(turns: Turns) -> str:
    """Return a letter for marks that no content holds."""
    used = set("".join(text or "" for _, items in turns for text in items))
    return next(letter for letter in map(chr, range(0xE000, 0xF8FF)) if letter not in used)


def _trims(padded: str, mark: re.Pattern) -> dict[int, tuple[bool, bool]]:
    """Say of each marked content whether the template takes blanks off its start and its end.

    Raises ValueError when it takes off some of them.
    """
    found = {}
    for match in mark.finditer(padded):
        before, after = padded[: match.start()], padded[match.end() :]
        found[int(match.group(1))] = (not before.endswith(PADDING), not after.startswith(PADDING))
    return found


def _trimmed(text: str, start: bool, end: bool) -> str:
    text = text.lstrip() if start else text
    return text.rstrip() if end else text


def _number_media(spans: list[Span], media: list[int]) -> list[Span]:
    """Give the pads the numbers of the media, in order. Raises ValueError when there are not as many."""
    places = [i for i, span in enumerate(spans) if span.item >= 0]
    if len(places) != len(media):
        raise ValueError(
            f"the chat template writes {len(places)} of tokenizer.pads for {len(media)} media; name its own marks there"
        )
    numbered = list(spans)
    for place, item in zip(places, media, strict=True):
        numbered[place] = Span(spans[place].text, spans[place].role, item)
    return numbered


def to_pieces(
    spans: Sequence[Span],
    *,
    encode: Callable[[str], list[int]],
    encode_own: Callable[[str], list[int]],
    is_end: Callable[[int], bool],
) -> list[Piece]:
    """Turn spans into ids; an assistant's content trains, and so does what the template writes to end it.

    encode, encode_own: text without and with special tokens      is_end: whether an id is a special token
    Raises ValueError when no special token ends an assistant's turn.
    """
    pieces: list[Piece] = []
    ends = False
    for number, span in enumerate(spans):
        if span.item >= 0:
            pieces.append(Piece(item=span.item))
        elif span.role:
            pieces.append(Piece(ids=tuple(encode(span.text)), trained=span.role == "assistant"))
        else:
            ids = encode_own(span.text)
            stop = next((i + 1 for i, id in enumerate(ids) if is_end(id)), 0) if ends else 0
            if ends and not stop:
                raise ValueError(
                    "the chat template ends an assistant's turn without a special token; use one that has it"
                )
            pieces += [Piece(ids=tuple(ids[:stop]), trained=True), Piece(ids=tuple(ids[stop:]))]
        following = spans[number + 1].role if number + 1 < len(spans) else ""
        ends = span.role == "assistant" and following != "assistant"
    if ends:
        raise ValueError("the chat template ends an assistant's turn without a special token; use one that has it")
    return [piece for piece in pieces if piece.ids or piece.item >= 0]
