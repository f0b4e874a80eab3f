"""Whether a Markdown body surely shows a word, and where its first heading is: the chunker's work seen from outside.

Written apart from the chunker on purpose: a check by the chunker's own rules would share its faults. When in doubt, as
with the description of an image, a lone tag or a zero-width space, nothing is said to be visible.
"""

import re
from html.parser import HTMLParser
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

_SHORTCODE = re.compile(r"\{\{[<%].{0,4096}?[%>]\}\}", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)


def _parse(body: str) -> list[Token]:
    # Hugo shortcodes are tags; their lines stay, so that line numbers do.
    text = _SHORTCODE.sub(lambda found: "\n" * found.group().count("\n"), body)
    return MarkdownIt("commonmark").enable("table").parse(text)


def has_visible_text(text: str, *, body_start: int = 0) -> bool:
    """Whether the Markdown body surely shows a word."""
    return any(_visible(token) for token in _parse(text[body_start:]))


def first_heading_line(text: str, *, body_start: int = 0) -> int | None:
    """1-based line, in the whole text, of the first heading at document level that surely shows a word."""
    for token, inline in pairwise(_parse(text[body_start:])):
        if token.type == "heading_open" and token.level == 0 and token.map and _visible(inline):
            return text.count("\n", 0, body_start) + token.map[0] + 1
    return None


def _visible(token: Token) -> bool:
    if token.children:
        return any(_visible(child) for child in token.children)
    if token.type == "html_block":
        parser = _VisibleText()
        parser.feed(_COMMENT.sub("", token.content))
        parser.close()
        return parser.found
    # str.strip keeps zero-width spaces and the byte order mark.
    return token.type in {"text", "code_inline", "fence", "code_block"} and bool(
        token.content.strip().strip("\u200b\u200c\u200d\u2060\ufeff")
    )


class _VisibleText(HTMLParser):
    """Looks for text outside of script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self._hidden += tag in {"script", "style"}

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in {"script", "style"} and self._hidden > 0

    def handle_data(self, data: str) -> None:
        self.found = self.found or (not self._hidden and bool(data.strip()))
