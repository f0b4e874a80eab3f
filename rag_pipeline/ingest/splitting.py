"""Cut blocks into units that fit a limit: whole blocks first, then rows, items, lines, sentences, words, characters."""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rag_pipeline.ingest.markdown_blocks import Block, ParsedBody
from rag_pipeline.ingest.markdown_text import VisibleText
from rag_pipeline.records import TokenCounter

_SENTENCE_END = re.compile(r"""[。！？；…]+["'”’）)」』\]]*|[.!?;]+["'”’）)\]]*(?=\s)""")
_LINE_OR_SENTENCE_END = re.compile(rf"{_SENTENCE_END.pattern}|\n+")
_WORD_END = re.compile(r"\s+|[，、,：:]+")
_MAX_LOOK_BACK = 64


@dataclass(frozen=True, slots=True)
class Limit:
    """How much one piece may hold: tokens as counted alone, and characters."""

    tokens: int
    characters: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What a piece of a cut block needs around it to be understood: a table's header, a fence's marks, a lead-in.

    Attributes:
        start: Where the framed block begins; a piece that begins later gets ``opening`` before it.
        end: Where it ends; a piece that ends earlier gets ``closing`` after it.
        tokens: Tokens of both.
    """

    start: int
    end: int
    opening: str
    closing: str
    tokens: int

    @property
    def size(self) -> int:
        """Code points of both."""
        return len(self.opening) + len(self.closing)


@dataclass(frozen=True, slots=True)
class Unit:
    """A stretch of the body that goes into one chunk as a whole.

    Attributes:
        start: First code point in the body.
        end: One past the last.
        tokens: Tokens of its visible text; 0 when it shows nothing, or before it is counted.
        size: Code points of its visible text.
        keep_next: It leads in what follows and should not end a chunk.
        frames: Blocks it was cut out of, outermost first.
        block: The block it is, None for a part of one.
        text: Its visible text, until it is counted.
    """

    start: int
    end: int
    tokens: int
    size: int
    keep_next: bool = False
    frames: tuple[Frame, ...] = ()
    block: Block | None = None
    text: str = field(default="", repr=False)


class Splitter:
    """Measures and cuts the blocks of one body.

    Args:
        parsed: The parsed body.
        visible: Its visible text.
        counter: Tokens of the embedding model.
    """

    def __init__(self, parsed: ParsedBody, visible: VisibleText, counter: TokenCounter) -> None:
        self._parsed = parsed
        self._visible = visible
        self._counter = counter

    def units(self, blocks: Sequence[Block], *, start: int | None = None) -> list[Unit]:
        """One unit for each block, not counted yet; pure comments are left out.

        Args:
            blocks: Neighbouring blocks.
            start: Where the first one begins, when that is not the beginning of its line range.
        """
        units: list[Unit] = []
        for block in blocks:
            first = self._parsed.offset(block.start_line) if start is None or block is not blocks[0] else start
            last = self._parsed.offset(block.end_line)
            text = self._visible.render(first, last)
            if not text and block.kind in ("html", "paragraph") and self._visible.is_comment(first, last):
                continue
            if units and units[-1].block and units[-1].block.kind == "list" and block.kind in ("fence", "code"):
                units[-1] = replace(units[-1], keep_next=True)
            units.append(Unit(first, last, 0, len(text), keep_next=_leads(block, text), block=block, text=text))
        return units

    def counted(self, units: Sequence[Unit], *, most: int) -> list[Unit]:
        """The units of whole blocks with their tokens, counted in one call.

        Args:
            units: Units that carry their text.
            most: A text with more code points than this is cut anyway, so it is not counted but taken by its length:
                otherwise deep nesting would be counted once a level.
        """
        counts = iter(self._counter.count([unit.text for unit in units if unit.size <= most]))
        result = []
        for unit in units:
            tokens = next(counts) if unit.size <= most else unit.size
            result.append(replace(unit, tokens=max(tokens, 1) if unit.size else 0, text=""))
        return result

    def cut(self, units: Sequence[Unit], limit: Limit, frames: tuple[Frame, ...] = ()) -> list[Unit]:
        """Replace each unit that with ``frames`` is over ``limit`` by smaller ones; nothing is lost between them."""
        result: list[Unit] = []
        room = _room(limit, frames)
        for index, unit in enumerate(units):
            if _fits(unit, room) or unit.block is None:
                result.append(replace(unit, frames=frames) if frames else unit)
                continue
            before = units[index - 1] if index else None
            lead = before if before and before.keep_next and before.block and before.block.kind == "paragraph" else None
            result += self._cut_block(unit, unit.block, limit, frames, lead)
        return self._cut_long_steps(result, room)

    def cut_text(
        self, start: int, end: int, limit: Limit, frames: tuple[Frame, ...] = (), *, lines: bool = False
    ) -> list[Unit]:
        """Cut running text at sentence ends (``lines``: at line ends too), else at words, else between characters."""
        mapped = self._visible.render_mapped(start, end)
        text = mapped.text
        offsets = [begin for begin, _ in self._counter.offsets(text)]
        cuts: list[int] = []
        limit = _room(limit, frames)
        position = 0
        ends = _LINE_OR_SENTENCE_END if lines else _SENTENCE_END
        for sentence_end in [*(match.end() for match in ends.finditer(text)), len(text)]:
            if sentence_end <= position:
                continue
            while not _within(offsets, position, sentence_end, limit):
                position = _best_cut(text, offsets, position, sentence_end, limit)
                cuts.append(position)
            position = sentence_end
            cuts.append(position)
        units: list[Unit] = []
        position, source = 0, start
        for cut in cuts:
            source_end = end if cut == len(text) else mapped.source(cut)
            if source_end > source:
                tokens = bisect_left(offsets, cut) - bisect_left(offsets, position)
                shown = bool(text[position:cut].strip())
                units.append(Unit(source, source_end, max(tokens, 1) * shown, cut - position, frames=frames))
                position, source = cut, source_end
        return units

    def frame_for(self, start: int, end: int, opening: str, closing: str = "") -> Frame:
        """A frame with its tokens counted."""
        return Frame(start, end, opening, closing, sum(self._counter.count([opening, closing])))

    def _cut_block(
        self, unit: Unit, block: Block, limit: Limit, frames: tuple[Frame, ...], lead: Unit | None
    ) -> list[Unit]:
        if block.kind == "table" and len(block.children) > 1:
            return self._cut_table(unit, block, limit, frames)
        if block.kind == "fence":
            return self._cut_fence(unit, block, limit, frames)
        if block.kind in ("list", "quote", "item") and block.children:
            frame = None
            if block.kind == "list" and lead and lead.tokens <= limit.tokens // 4:
                frame = self.frame_for(lead.start, unit.end, self._visible.render(lead.start, lead.end) + "\n\n")
            children = self.counted(self.units(block.children, start=unit.start), most=limit.characters)
            if block.kind == "item" and len(children) > 1 and 0 < children[0].tokens <= limit.tokens // 4:
                opening = self._visible.render(children[0].start, children[0].end) + "\n\n"
                frame = self.frame_for(unit.start, unit.end, opening)
            if children:
                inner = _with_frame(frames, frame, limit)
                return self.cut(children, limit, inner)
        if block.kind == "code":
            return self._cut_lines(unit.start, unit.end, limit, frames)
        return self.cut_text(unit.start, unit.end, limit, frames, lines=block.kind != "paragraph")

    def _cut_table(self, unit: Unit, block: Block, limit: Limit, frames: tuple[Frame, ...]) -> list[Unit]:
        rows = self.counted(self.units(block.children, start=unit.start), most=limit.characters)
        header = rows[0]
        if header.tokens <= limit.tokens // 3 and header.size <= limit.characters // 3:
            opening = self._visible.render(header.start, header.end) + "\n"
            frames = _with_frame(frames, self.frame_for(unit.start, unit.end, opening), limit)
            rows[0] = replace(header, keep_next=True)
        return self.cut(rows, limit, frames)

    def _cut_fence(self, unit: Unit, block: Block, limit: Limit, frames: tuple[Frame, ...]) -> list[Unit]:
        first_line_end = self._parsed.offset(block.start_line + 1)
        opening_line = self._parsed.text[unit.start : first_line_end].rstrip()
        mark = opening_line.find(block.markup)
        indentation = re.sub(r"[^\s>]", " ", opening_line[: max(mark, 0)])
        opening = f"{indentation}{block.markup}{block.info.strip()[:100]}\n"
        frame = self.frame_for(unit.start, unit.end, opening, f"\n{indentation}{block.markup}")
        frames = _with_frame(frames, frame, limit)
        return self._cut_lines(unit.start, unit.end, limit, frames)

    def _cut_lines(self, start: int, end: int, limit: Limit, frames: tuple[Frame, ...]) -> list[Unit]:
        text = self._parsed.text
        spans: list[tuple[int, int]] = []
        position = start
        while position < end:
            line_end = text.find("\n", position, end)
            line_end = end if line_end < 0 else line_end + 1
            spans.append((position, line_end))
            position = line_end
        units: list[Unit] = []
        room = _room(limit, frames)
        counts = self._counter.count([text[first:last] for first, last in spans])
        for (first, last), tokens in zip(spans, counts, strict=True):
            unit = Unit(first, last, tokens, last - first, frames=frames)
            units += [unit] if _fits(unit, room) else self.cut_text(first, last, limit, frames)
        return units

    def _cut_long_steps(self, units: list[Unit], limit: Limit) -> list[Unit]:
        """A list that a code block belongs to is cut to its items when both do not fit together."""
        result: list[Unit] = []
        for index, unit in enumerate(units):
            block = unit.block
            following = units[index + 1] if index + 1 < len(units) else None
            if (
                block
                and block.kind == "list"
                and unit.keep_next
                and following
                and unit.tokens + following.tokens > limit.tokens
                and len(block.children) > 1
            ):
                items = self.counted(self.units(block.children, start=unit.start), most=limit.characters)
                items[-1] = replace(items[-1], keep_next=True)
                result += [replace(item, frames=unit.frames) for item in items]
            else:
                result.append(unit)
        return result


def _fits(unit: Unit, limit: Limit) -> bool:
    return unit.tokens <= limit.tokens and unit.size <= limit.characters


def _leads(block: Block, text: str) -> bool:
    return block.kind == "heading" or (block.kind == "paragraph" and text.endswith((":", "：")))


def _with_frame(frames: tuple[Frame, ...], frame: Frame | None, limit: Limit) -> tuple[Frame, ...]:
    """Add a frame inside the others; the outermost go while they take more than half of the limit."""
    if frame is None:
        return frames
    frames = (*frames, frame)
    while frames and (
        sum(each.tokens for each in frames) > limit.tokens // 2
        or sum(each.size for each in frames) > limit.characters // 2
    ):
        frames = frames[1:]
    return frames


def _room(limit: Limit, frames: tuple[Frame, ...]) -> Limit:
    """What the frames leave of the limit; at least a third of it, which `_with_frame` keeps free."""
    return Limit(
        max(1, limit.tokens // 3, limit.tokens - sum(frame.tokens for frame in frames)),
        max(1, limit.characters // 3, limit.characters - sum(frame.size for frame in frames)),
    )


def _within(offsets: list[int], start: int, end: int, limit: Limit) -> bool:
    if end - start > limit.characters:
        return False
    return bisect_left(offsets, end) - bisect_left(offsets, start) <= limit.tokens


def _best_cut(text: str, offsets: list[int], start: int, end: int, limit: Limit) -> int:
    """The last good place in ``(start, end)`` so that the piece before it fits: behind a word, else anywhere."""
    first = bisect_left(offsets, start)
    furthest = min(end, start + limit.characters)
    if first + limit.tokens < len(offsets):
        furthest = min(furthest, offsets[first + limit.tokens])
    furthest = max(furthest, start + 1)
    nearest = start + (furthest - start) // 2
    word_end = max((match.end() for match in _WORD_END.finditer(text, nearest, furthest)), default=start)
    if word_end > start:
        return word_end
    cut = furthest
    while cut > max(start + 1, furthest - _MAX_LOOK_BACK) and cut < len(text) and _joins(text[cut]):
        cut -= 1
    return cut if not (cut < len(text) and _joins(text[cut])) else furthest


def _joins(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Mc", "Me") or character in "\u200d\ufe0f"
