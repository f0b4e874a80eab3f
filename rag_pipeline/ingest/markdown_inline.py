"""Find what to leave out of running text: the edits that make the visible text of one inline run or HTML block.

markdown-it-py's inline tokens carry no positions, so its rules are wrapped here and note where they matched. What they
match is cut out by these rules:

- emphasis and strikethrough markers, backslash escapes, angle brackets of autolinks, link and image brackets with the
  target: only the text, the address of an autolink or the image's description stays;
- character references become the character, a white space one becomes a space;
- HTML comments go; an HTML or MDX tag goes, its content stays, script and style go with their text;
- ``<words>`` is a tag only if it is ``br``, ``hr``, ``img``, ``wbr``, ``div``, ``span``, may lack its end tag, has an
  attribute with a value, ends in ``/>``, or has its end tag somewhere in the document. Everything else is a
  placeholder for the reader and stays;
- a Hugo shortcode goes but for the value of its ``text``, ``title``, ``name``, ``caption``, ``alt`` or ``heading``;
  an escaped one (``{{</* x */>}}``) only loses the escape.

Code spans are left as they are.
"""

import html
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.common.html_re import HTML_TAG_RE
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token


class Edit(NamedTuple):
    """Replace ``[start, end)`` by ``replacement`` (short: at most a few characters)."""

    start: int
    end: int
    replacement: str


_Rule = Callable[[StateInline, bool], bool]

_ACTIVE = re.compile(r"[*_~\[<&\\{]")
_TAG_NAME = re.compile(r"</?([A-Za-z][A-Za-z0-9-]*)")
_CLOSED = re.compile(r"</([A-Za-z][A-Za-z0-9-]*)\s*>")
_IMAGE_TEXT = re.compile(r"""\salt\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)
_SHORTCODE_VALUE = re.compile(
    r"""(?:\b(?:text|title|name|caption|alt)\s*=|\bheading\s)\s*(?:"([^"]+)"|'([^']+)'|`([^`]+)`)"""
)
_MAX_SHORTCODE = 4096
_HTML_ACTIVE = re.compile(r"[ \t\u00a0]*\n[\s\u00a0]*|[ \t\u00a0]{2,}|<|&|\{\{")
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
# Their tags part words; those of other elements do not.
_PARTING = re.compile(
    "address|article|aside|blockquote|br|caption|center|dd|details|div|dl|dt|fieldset|figcaption|figure|footer|form|"
    "h[1-6]|header|hr|li|main|nav|ol|option|p|pre|section|select|summary|table|tbody|td|tfoot|th|thead|tr|ul|video"
)
_ALWAYS_TAGS = re.compile(
    "body|br|colgroup|dd|div|dt|head|hr|html|img|li|optgroup|option|p|rp|rt|span|tbody|td|tfoot|th|thead|tr|wbr"
)
_DECLARATIONS = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<?", "?>"))
_HIDDEN = ("script", "style")


class InlineEditor:
    """Makes the edits for one document.

    Args:
        body: The document's Markdown body; says which elements are closed somewhere.
        references: Link reference definitions that markdown-it found in the body.
    """

    def __init__(self, body: str, references: dict[str, object]) -> None:
        self._closed = {name.lower() for name in _CLOSED.findall(body)}
        self._references = references
        self._edits: list[Edit] = []
        self._markers: list[tuple[Token, int, int]] = []
        self._codes: list[Edit] = []
        self._base = 0
        self._links_possible = True
        self._parser = self._build()

    def edits(self, content: str) -> list[Edit]:
        """Edits of an inline run, sorted and disjoint, in positions of ``content``."""
        if not _ACTIVE.search(content):
            return []
        self._edits, self._markers, self._codes, self._base = [], [], [], 0
        # Without this, a run of opening brackets costs seconds.
        self._links_possible = "](" in content or bool(self._references)
        self._parser.inline.parse(content, self._parser, {"references": self._references}, [])
        for token, start, end in self._markers:
            if token.type != "text" or not token.content:
                self._edits.append(Edit(start, end, ""))
        return sorted(self._edits)

    def plain(self, content: str) -> str:
        """The visible text of an inline run on one line, without the backticks of code spans."""
        edits = self.edits(content)
        if "`" in content:
            self._codes = []
            self._parser.inline.parse(content, self._parser, {"references": self._references}, [])
            edits = sorted(edits + self._codes)
        return " ".join(apply_edits(content, edits).split())

    def html_edits(self, content: str) -> list[Edit]:
        """Edits of an HTML block, sorted and disjoint: no tags, comments or indentation, at most one line end a gap."""
        raw = list(self._html_edits(content))
        merged: list[Edit] = []
        for edit in raw:
            between = content[merged[-1].end : edit.start] if merged and edit.start - merged[-1].end < 2 else "x"
            if not between.strip():
                gap = merged[-1].replacement + between + edit.replacement
                merged[-1] = Edit(merged[-1].start, edit.end, _one_gap(gap))
            else:
                merged.append(edit)
        if merged and merged[0].start == 0 and not merged[0].replacement.strip():
            merged[0] = merged[0]._replace(replacement="")
        if merged and merged[-1].end == len(content) and content.endswith("\n"):
            merged[-1] = merged[-1]._replace(replacement=merged[-1].replacement.rstrip() + "\n")
        return merged

    def _html_edits(self, content: str) -> Iterator[Edit]:
        position = 0
        preformatted = False
        while match := _HTML_ACTIVE.search(content, position):
            start = match.start()
            position = match.end()
            found = match[0]
            if found == "<":
                end = self._markup_end(content, start)
                if end is None:
                    continue
                name = _name(content, start)
                if name == "pre":
                    preformatted = content[start + 1] != "/"
                position = end
                yield from self._tag(content, start, end)
            elif found == "&":
                if reference := _ENTITY.match(content, start):
                    position = reference.end()
                    yield Edit(start, position, _character(reference[0]))
            elif found == "{{":
                if shortcode := _shortcode(content, start, len(content)):
                    position = shortcode[-1].end
                    yield from shortcode
            elif not preformatted:
                yield Edit(start, position, "\n" if "\n" in found else " ")

    def _markup_end(self, content: str, start: int) -> int | None:
        """End of the comment, hidden element or tag that begins at ``start``; None when it is a bare ``<``."""
        for opening, ending in _DECLARATIONS:
            if content.startswith(opening, start):
                end = content.find(ending, start + 2)
                return len(content) if end < 0 else end + len(ending)
        match = HTML_TAG_RE.match(content, start)
        if not match:
            return None
        name = _name(content, start)
        if name in _HIDDEN and content[start + 1] != "/":
            closing = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(content, match.end())
            return closing.end() if closing else len(content)
        return match.end()

    def _tag(self, content: str, start: int, end: int) -> Iterator[Edit]:
        """Edits for the markup ``content[start:end]``; none when it is a placeholder."""
        name = _name(content, start)
        if name and not self._is_tag(content, start, end, name):
            return
        if name == "img" and (text := _IMAGE_TEXT.search(content, start, end)):
            first, last = text.span(text.lastindex or 1)
            yield Edit(start, first, "")
            yield Edit(last, end, "")
        else:
            yield Edit(start, end, " " if _PARTING.fullmatch(name) else "")

    def _is_tag(self, content: str, start: int, end: int, name: str) -> bool:
        if content[start + 1] == "/" or content[end - 2] == "/" or name in self._closed:
            return True
        return "=" in content[start:end] or name in _HIDDEN or _ALWAYS_TAGS.fullmatch(name) is not None

    def _note(self, start: int, end: int, replacement: str = "") -> None:
        if start < end:
            self._edits.append(Edit(self._base + start, self._base + end, replacement))

    def _build(self) -> MarkdownIt:
        parser = MarkdownIt("commonmark").enable("strikethrough")
        # Joining tokens would hide which markers were used.
        parser.inline.ruler2.disable("fragments_join")
        ruler = parser.inline.ruler
        rules = {rule.name: rule.fn for rule in ruler.__rules__}
        for name, note in {
            "escape": self._escape,
            "entity": self._entity,
            "emphasis": self._marker,
            "strikethrough": self._marker,
            "backticks": self._backticks,
            "autolink": self._autolink,
            "html_inline": self._html_inline,
        }.items():
            ruler.at(name, self._noting(rules[name], note))
        ruler.at("link", self._if_links(self._noting(rules["link"], self._link)))
        ruler.at("image", self._if_links(self._image(rules["image"])))
        ruler.before("escape", "shortcode", self._shortcode)
        return parser

    def _noting(self, rule: _Rule, note: Callable[[StateInline, int], None]) -> _Rule:
        """``rule``, with ``note`` called after each match with the position where it began."""

        def noted(state: StateInline, silent: bool) -> bool:  # noqa: FBT001 - markdown-it calls it so
            start = state.pos
            if not rule(state, silent):
                return False
            if not silent:
                note(state, start)
            return True

        return noted

    def _escape(self, state: StateInline, start: int) -> None:
        # A backslash before a letter is a backslash.
        if state.tokens[-1].content != state.tokens[-1].markup:
            self._note(start, start + 1)

    def _entity(self, state: StateInline, start: int) -> None:
        self._note(start, state.pos, _character(state.src[start : state.pos]))

    def _marker(self, state: StateInline, start: int) -> None:
        """Remember the tokens of a run of markers; only the end of the parse tells which of them are used."""
        end = state.pos
        for token in reversed(state.tokens):
            if end == start:
                break
            self._markers.append((token, self._base + end - len(token.content), self._base + end))
            end -= len(token.content)

    def _backticks(self, state: StateInline, start: int) -> None:
        if not state.pending and state.tokens[-1].type == "code_inline":
            width = len(state.tokens[-1].markup)
            self._codes.append(Edit(self._base + start, self._base + start + width, ""))
            self._codes.append(Edit(self._base + state.pos - width, self._base + state.pos, ""))

    def _link(self, state: StateInline, start: int) -> None:
        label_end = state.md.helpers.parseLinkLabel(state, start, disableNested=True)
        self._note(start, start + 1)
        self._note(label_end, state.pos)

    def _autolink(self, state: StateInline, start: int) -> None:
        self._note(start, start + 1)
        self._note(state.pos - 1, state.pos)

    def _html_inline(self, state: StateInline, start: int) -> None:
        for edit in self._tag(state.src, start, state.pos):
            self._note(*edit)

    def _if_links(self, rule: _Rule) -> _Rule:
        def guarded(state: StateInline, silent: bool) -> bool:  # noqa: FBT001
            return self._links_possible and rule(state, silent)

        return guarded

    def _image(self, rule: _Rule) -> _Rule:
        def noted(state: StateInline, silent: bool) -> bool:  # noqa: FBT001
            start, base = state.pos, self._base
            # The description is parsed as a text of its own, whose positions begin at 0.
            self._base = base + start + 2
            matched = rule(state, silent)
            self._base = base
            if matched and not silent:
                label_end = state.md.helpers.parseLinkLabel(state, start + 1)
                self._note(start, start + 2)
                self._note(label_end, state.pos)
            return matched

        return noted

    def _shortcode(self, state: StateInline, silent: bool) -> bool:  # noqa: FBT001
        edits = _shortcode(state.src, state.pos, state.posMax)
        if not edits:
            return False
        if not silent:
            for edit in edits:
                self._note(*edit)
        state.pos = edits[-1].end
        return True


def apply_edits(text: str, edits: list[Edit]) -> str:
    """``text`` with sorted, disjoint edits carried out."""
    parts = []
    position = 0
    for start, end, replacement in edits:
        if start >= position:
            parts += [text[position:start], replacement]
            position = end
    parts.append(text[position:])
    return "".join(parts)


def _name(content: str, start: int) -> str:
    match = _TAG_NAME.match(content, start)
    return match[1].lower() if match else ""


def _character(reference: str) -> str:
    character = html.unescape(reference)
    return " " if character.isspace() else character


def _one_gap(gap: str) -> str:
    if not gap or not gap.isspace():
        return gap
    return "\n" if "\n" in gap else " "


def _shortcode(content: str, start: int, end: int) -> list[Edit]:
    """Edits for the Hugo shortcode at ``start``, the last one ending where it ends; empty when there is none."""
    if not content.startswith(("{{<", "{{%"), start):
        return []
    closing = ">}}" if content[start + 2] == "<" else "%}}"
    body_end = content.find(closing, start + 3, min(end, start + _MAX_SHORTCODE))
    if body_end < 0:
        return []
    end = body_end + 3
    if content.startswith("/*", start + 3):
        escape_end = body_end - 2 if content.startswith("*/", body_end - 2) else body_end
        return [Edit(start + 3, start + 5, ""), Edit(escape_end, body_end, ""), Edit(end, end, "")]
    value = _SHORTCODE_VALUE.search(content, start + 3, body_end)
    if value:
        first, last = value.span(value.lastindex or 1)
        return [Edit(start, first, ""), Edit(last, end, "")]
    return [Edit(start, end, "")]
