"""An independent judge of losslessness: the visible characters of a document, found without the chunker's own code."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from itertools import accumulate

from markdown_it import MarkdownIt
from markdown_it.token import Token

from rag_pipeline.records import Chunk, Document

_NOT_COMPARED = re.compile(r"[\s!-/:-@\[-`{-~]+")
_SHORTCODE = re.compile(r"\{\{(?:\x01)?[<%].*?[%>]\}\}", re.DOTALL)
_TAG = re.compile(r"\x01.*?\x02", re.DOTALL)
_ANCHOR = re.compile(r"\s*\{\s*#[^{}]*\}\s*$")
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_WINDOW = 60_000
_FRAME = 300


class _HtmlText(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style") and self._hidden > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def _html_text(source: str) -> str:
    parser = _HtmlText()
    parser.feed(_COMMENT.sub("", _SHORTCODE.sub(" ", source)))
    parser.close()
    return " ".join(parser.parts)


def _running_text(children: Iterable[Token]) -> str:
    parts = []
    for token in children:
        if token.type in ("text", "text_special"):
            parts.append(token.content)
        elif token.type == "code_inline":
            # Braces in code are no shortcode.
            parts.append(token.content.replace("{{", "{ {"))
        elif token.type == "image":
            parts.append(_running_text(token.children or []))
        elif token.type == "html_inline":
            parts.append(f"\x01{token.content}\x02")
        elif token.type in ("softbreak", "hardbreak"):
            parts.append("\n")
    return "".join(parts)


def visible_words(document: Document) -> list[str]:
    """What a reader sees, in order, cut at white space and ASCII punctuation; tags and placeholders left out."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    words: list[str] = []
    previous = ""
    for token in parser.parse(document.text[document.body_start :]):
        text = ""
        if token.type in ("fence", "code_block"):
            text = token.content
        elif token.type == "html_block":
            text = _html_text(token.content)
        elif token.type == "inline":
            text = _running_text(token.children or [])
            text = _TAG.sub("", _SHORTCODE.sub(" ", text))
            if previous == "heading_open":
                text = _ANCHOR.sub("", text)
        words += [word for word in _NOT_COMPARED.split(text) if word]
        previous = token.type
    return words


def lost_words(document: Document, chunks: Sequence[Chunk]) -> list[str]:
    """Visible words that are in no content, in their order; a word may be cut where a chunk ends."""
    contents = [_NOT_COMPARED.sub("", chunk.content) for chunk in chunks]
    content = "".join(contents)
    ends = list(accumulate(map(len, contents)))
    position = 0
    lost = []
    for word in visible_words(document):
        found = _find(content, ends, word, position)
        if found < 0:
            lost.append(word)
        else:
            position = found
    return lost


def _find(content: str, ends: list[int], word: str, position: int) -> int:
    """The first place behind ``position`` where ``word`` ends; -1 when it is not there."""
    whole = content.find(word, position, position + _WINDOW + len(word))
    last = whole if whole >= 0 else position + _WINDOW
    for end in ends[bisect_right(ends, position) :][:20]:
        if end >= last + len(word):
            break
        for size in range(min(len(word), end - position), 0, -1):
            if content.endswith(word[:size], position, end) and (found := _rest(content, ends, word[size:], end)) >= 0:
                return found
    return whole + len(word) if whole >= 0 else -1


def _rest(content: str, ends: list[int], rest: str, position: int) -> int:
    """Where the rest of a cut word ends: near the beginning of the next content, or cut again."""
    while rest:
        found = content.find(rest, position, position + _FRAME + len(rest))
        if found >= 0:
            return found + len(rest)
        end = ends[min(bisect_right(ends, position), len(ends) - 1)]
        head = next((size for size in range(len(rest), 0, -1) if content.endswith(rest[:size], position, end)), 0)
        if not head:
            return -1
        position, rest = end, rest[head:]
    return position


def uncovered(document: Document, chunks: Sequence[Chunk]) -> str:
    """What lies in no span and is neither front matter, comment nor white space."""
    gaps = []
    position = document.body_start
    for chunk in chunks:
        gaps.append(document.text[position : chunk.char_start])
        position = chunk.char_end
    gaps.append(document.text[position:])
    return "".join(_COMMENT.sub("", gap).strip() for gap in gaps)
