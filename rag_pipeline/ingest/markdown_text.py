"""Render any span of a Markdown body as visible text, with the way back from a rendered position to the source."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from rag_pipeline.ingest.markdown_blocks import ANCHOR, Block, ParsedBody
from rag_pipeline.ingest.markdown_inline import Edit, InlineEditor

_BLANK_LINE = re.compile(r"[ \t]*\n")
_MAX_COLUMNS = 100


class VisibleText:
    """The body with its edits (see `ingest.markdown_blocks` for the rules).

    Args:
        parsed: The parsed body.
    """

    def __init__(self, parsed: ParsedBody) -> None:
        self._parsed = parsed
        self._text = parsed.text
        self.editor = InlineEditor(parsed.text, parsed.references)
        edits = [*self._running_edits(), *self._block_edits()]
        edits.sort()
        self._edits = self._without_blank_lines(edits)
        self._starts = [edit.start for edit in self._edits]

    def render(self, start: int, end: int) -> str:
        """Visible text of ``[start, end)``, without blank lines at its ends; indentation is kept."""
        return "".join(part[0] for part in self._parts(start, end)).rstrip().lstrip("\n")

    def render_mapped(self, start: int, end: int) -> "MappedText":
        """Visible text of ``[start, end)`` as it is, with the way back to the source."""
        return MappedText(list(self._parts(start, end)), end)

    def is_comment(self, start: int, end: int) -> bool:
        """Whether ``[start, end)`` holds nothing but HTML comments and white space."""
        position = start
        text = self._text
        while position < end:
            if text[position].isspace():
                position += 1
            elif text.startswith("<!--", position):
                closing = text.find("-->", position + 2, end)
                position = end if closing < 0 else closing + 3
            else:
                return False
        return True

    def _parts(self, start: int, end: int) -> Iterator["_Part"]:
        """Literal text and replacements, each with its source position."""
        position = start
        index = bisect_left(self._starts, start)
        if index and self._edits[index - 1].end > start:
            position = min(end, self._edits[index - 1].end)
        while index < len(self._edits):
            edit = self._edits[index]
            if edit.start >= end:
                break
            if edit.start > position:
                yield _Part(self._text[position : edit.start], position, literal=True)
            if edit.replacement:
                yield _Part(edit.replacement, edit.start, literal=False)
            position = max(position, edit.end)
            index += 1
        if position < end:
            yield _Part(self._text[position:end], position, literal=True)

    def _running_edits(self) -> Iterator[Edit]:
        """Edits inside paragraphs, headings, table cells and HTML blocks, in positions of the body."""
        cursor = 0
        row = -1
        previous = ""
        offset = self._parsed.offset
        for token in self._parsed.tokens:
            if token.type == "inline" and token.map and token.content:
                content = token.content
                edits = self.editor.edits(content)
                places: _Places | None = None
                if previous in ("th_open", "td_open"):
                    if token.map[0] != row:
                        row = token.map[0]
                        cursor = offset(row)
                    places, cursor = self._cell_places(content, cursor, offset(row + 1))
                elif previous == "heading_open":
                    if anchor := ANCHOR.search(content):
                        edits = [edit for edit in edits if edit.end <= anchor.start()]
                        edits.append(Edit(anchor.start(), anchor.end(), ""))
                    places = self._heading_places(content, token.map[0]) if edits else None
                elif edits:
                    places = self._run_places(content, token.map[0])
                if places:
                    yield from (
                        Edit(places.of(edit.start), places.of(edit.end - 1) + 1, edit.replacement)
                        for edit in edits
                        if edit.end > edit.start
                    )
            elif token.type == "html_block" and token.map:
                start = offset(token.map[0])
                for edit in self.editor.html_edits(self._text[start : offset(token.map[1])]):
                    yield Edit(start + edit.start, start + edit.end, edit.replacement)
            previous = token.type

    def _heading_places(self, content: str, line: int) -> "_Places | None":
        """ATX headings have marks on both sides of their text, setext headings are runs of lines."""
        start, end = self._parsed.offset(line), self._parsed.offset(line + 1)
        if "\n" in content:
            return self._run_places(content, line)
        found = self._text.rfind(content, start, end)
        return _Places([0], [found]) if found >= 0 else None

    def _run_places(self, content: str, line: int) -> "_Places | None":
        """Each line of an inline run is the end of a source line, whose beginning (quote marks, indentation) is cut."""
        begins, shifts = [], []
        position = 0
        for piece in content.split("\n"):
            bare = piece.rstrip()
            source_start, source_end = self._parsed.offset(line), self._parsed.offset(line + 1)
            source = self._text[source_start:source_end].rstrip()
            if not source.endswith(bare.lstrip()):
                return None
            begins.append(position)
            shifts.append(source_start + len(source) - len(bare) - position)
            position += len(piece) + 1
            line += 1
        return _Places(begins, shifts)

    def _cell_places(self, content: str, cursor: int, row_end: int) -> "tuple[_Places | None, int]":
        """A cell is found behind the one before it; each bar in it has a backslash in the source."""
        source = content.replace("|", "\\|")
        found = self._text.find(source, cursor, row_end)
        if found < 0:
            return None, cursor
        begins, shifts = [0], [found]
        for count, match in enumerate(re.finditer(r"\|", content), start=1):
            begins.append(match.start())
            shifts.append(found + count)
        return _Places(begins, shifts), found + len(source)

    def _block_edits(self) -> Iterator[Edit]:
        """Edits of whole lines."""
        pending = list(self._parsed.blocks)
        while pending:
            block = pending.pop()
            pending += block.children
            start, end = self._parsed.offset(block.start_line), self._parsed.offset(block.end_line)
            empty = block.kind in ("heading", "fence") and not block.content.strip()
            if block.kind == "definition" or ((empty or block.kind == "hr") and block.depth == 0):
                yield Edit(start, end, "")
            elif block.kind == "table":
                yield from self._delimiter_edit(block)

    def _delimiter_edit(self, table: Block) -> Iterator[Edit]:
        start = self._parsed.offset(table.start_line + 1)
        line = self._text[start : self._parsed.offset(table.start_line + 2)].rstrip()
        tail = line[len(line.rstrip("|: \t-")) :]
        columns = len(tail.strip(" \t|").split("|"))
        if tail.strip() and columns <= _MAX_COLUMNS:
            lead = len(line) - len(tail.lstrip())
            yield Edit(start + lead, start + len(line), "|" + "---|" * columns)

    def _without_blank_lines(self, edits: list[Edit]) -> list[Edit]:
        """Where edits leave nothing of a line, cut the whole line, and the blank lines behind it."""
        result: list[Edit] = []
        group: list[Edit] = []
        group_end = -1
        text = self._text
        for edit in edits:
            if group and edit.start < group[-1].end:
                continue
            if edit.start >= group_end:
                result += self._close(group)
                group = []
            group.append(edit)
            line_end = text.find("\n", edit.end - 1 if text[edit.end - 1 : edit.end] == "\n" else edit.end)
            group_end = len(text) if line_end < 0 else line_end + 1
        return result + self._close(group)

    def _close(self, group: list[Edit]) -> list[Edit]:
        if not group:
            return group
        text = self._text
        start = text.rfind("\n", 0, group[0].start) + 1
        position = start
        for edit in group:
            if edit.replacement.strip() or text[position : edit.start].strip():
                return group
            position = edit.end
        line_end = position
        if position == start or text[position - 1] != "\n":
            line_end = text.find("\n", position)
            line_end = len(text) if line_end < 0 else line_end + 1
            if text[position:line_end].strip():
                return group
        above = text.rfind("\n", 0, max(start - 1, 0)) + 1
        while not text[above:start].strip() and (blank := _BLANK_LINE.match(text, line_end)):
            line_end = blank.end()
        return [Edit(start, line_end, "")]


class _Places:
    """Where each position of an inline run lies in the body: a shift for each stretch of it."""

    def __init__(self, begins: list[int], shifts: list[int]) -> None:
        self._begins = begins
        self._shifts = shifts

    def of(self, position: int) -> int:
        return position + self._shifts[bisect_right(self._begins, position) - 1]


class _Part(NamedTuple):
    """A stretch of rendered text."""

    text: str
    source: int
    literal: bool


class MappedText:
    """Rendered text and where it comes from.

    Args:
        parts: Its stretches in order.
        end: Where the source span ends.
    """

    def __init__(self, parts: list[_Part], end: int) -> None:
        self.text = "".join(part.text for part in parts)
        self._parts = parts
        self._end = end
        self._begins = list(accumulate((len(part.text) for part in parts), initial=0))

    def source(self, position: int) -> int:
        """The body position from which a cut before rendered ``position`` continues; a replacement is never cut."""
        index = bisect_right(self._begins, position) - 1
        if index >= len(self._parts):
            return self._end
        part = self._parts[index]
        if part.literal or position == self._begins[index]:
            return part.source + position - self._begins[index]
        return self._parts[index + 1].source if index + 1 < len(self._parts) else self._end
