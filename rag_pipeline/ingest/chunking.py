"""Cut a document into chunks that lose no visible word and fit the embedding model's limit exactly.

Rules:

- A section is a document-level heading with what follows it, up to the next such heading; text before the first
  heading is a section without breadcrumb. A chunk never spans two sections, but for one case: a heading without a body
  of its own joins the first chunk of the section below it when that is deeper, else it is a chunk by itself.
- A chunk's content is the visible text of its span by the rules in `ingest.markdown_blocks` and
  `ingest.markdown_inline`: Markdown without comments, emphasis markers, link targets, tags and shortcodes, with its
  heading line. A piece of a cut block gets what it needs around it: a table's header row, a fence's marks with the info
  string, the lead-in of a list (a paragraph that ends in a colon) and the first paragraph of a list item. So these
  words may be in several contents, while spans stay disjoint.
- Blocks are added until a chunk has reached the soft size; a heading, a paragraph that ends in a colon, and a list
  right before a code block stay with what follows while both fit. A block is cut only if it alone is over the hard
  limit (see `ingest.splitting`). A last chunk under a third of the soft size joins the one before it if both fit.
- Title and breadcrumb take at most a third of the hard limit in ``embedding_text``: a title is cut to half of that,
  then the breadcrumb's outermost headings go, then the innermost one is cut. The stored breadcrumb keeps all headings,
  each cut to 200 characters.
- Content has at most 15,000 characters, hence 60,000 bytes of UTF-8, whatever a tokenizer makes of it.
- What shows nothing but is no comment (link definitions, tags on their own, thematic breaks) lies in the span of the
  chunk before it, else after it. Blank lines and comments between chunks lie in no span.
- Ids are made of source, breadcrumb, the ordinal of the section among those with the same breadcrumb, and the ordinal
  of the chunk in its section: an edit in one section leaves the ids of all others alone.
"""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.ingest.markdown_blocks import Block, ParsedBody, heading_text, parse_blocks
from rag_pipeline.ingest.markdown_text import VisibleText
from rag_pipeline.ingest.packing import middle_of, pack, shown_groups
from rag_pipeline.ingest.splitting import Limit, Splitter, Unit
from rag_pipeline.records import Chunk, ChunkBudget, Document, TokenCounter

CHUNKER_VERSION = "1"
MAX_HEADING_CHARACTERS = 200
MAX_CONTENT_CHARACTERS = 15_000
_MIN_CONTENT_TOKENS = 8
_BYTES_PER_TOKEN = 3


@dataclass(slots=True)
class _Section:
    """A heading's own blocks, and the units of body-less headings before it."""

    level: int
    breadcrumb: tuple[str, ...]
    blocks: list[Block]
    units: list[Unit] = field(default_factory=list)
    head: str = ""
    head_tokens: int = 0
    section_id: str = ""


@dataclass(slots=True)
class _Draft:
    """A chunk in the making."""

    section: _Section
    units: list[Unit]
    head: str
    content: str = ""
    tokens: int = 0

    @property
    def embedding_text(self) -> str:
        return f"{self.head}\n{self.content}" if self.head else self.content


def chunk_document(document: Document, *, tokens: TokenCounter, budget: ChunkBudget) -> list[Chunk]:
    """Cut ``document`` into chunks, in the order of the text.

    Args:
        document: A decoded document.
        tokens: Counts in the tokens of the embedding model.
        budget: Soft and hard size of a chunk's whole model input.

    Returns:
        The chunks; none for a document that shows nothing.

    Raises:
        ConfigurationError: The hard limit is over the model's, or leaves no room for content.
    """
    if budget.hard_tokens > tokens.max_tokens:
        raise ConfigurationError(
            f"The hard limit of {budget.hard_tokens} tokens is over the {tokens.max_tokens} that the model takes; "
            "lower it."
        )
    if budget.hard_tokens < tokens.reserved_tokens + _MIN_CONTENT_TOKENS:
        raise ConfigurationError(
            f"The hard limit of {budget.hard_tokens} tokens leaves no room for content beside the "
            f"{tokens.reserved_tokens} tokens of the prefix; raise it."
        )
    return _Chunker(document, tokens, budget).run()


class _Chunker:
    def __init__(self, document: Document, counter: TokenCounter, budget: ChunkBudget) -> None:
        self._document = document
        self._counter = counter
        self._budget = budget
        self._parsed: ParsedBody = parse_blocks(document.text[document.body_start :])
        self._visible = VisibleText(self._parsed)
        self._splitter = Splitter(self._parsed, self._visible, counter)

    def run(self) -> list[Chunk]:
        sections = self._sections()
        for section in sections:
            section.units = self._splitter.units(section.blocks)
            if section.units and section.units[-1].block is not section.blocks[0]:
                section.units[-1] = replace(section.units[-1], keep_next=False)
        sections = self._absorb(sections)
        self._fill_heads(sections)
        small, large = self._small_sections(sections)
        drafts = self._verified(self._pack(large))
        return self._records(sorted([*small, *drafts], key=lambda draft: draft.units[0].start))

    def _sections(self) -> list[_Section]:
        """The sections in order; the first holds what comes before any heading and may be empty."""
        sections = [_Section(0, (), [])]
        path: list[tuple[int, str]] = []
        for block in self._parsed.blocks:
            if block.kind == "heading":
                while path and path[-1][0] >= block.level:
                    path.pop()
                text = heading_text(self._visible.editor, block.content)[:MAX_HEADING_CHARACTERS].rstrip()
                path.append((block.level, text))
                sections.append(_Section(block.level, tuple(text for _, text in path if text), [block]))
            else:
                sections[-1].blocks.append(block)
        return sections

    def _absorb(self, sections: Sequence[_Section]) -> list[_Section]:
        """Hand the units of body-less headings, and of sections that show nothing, to a neighbour."""
        result: list[_Section] = []
        carried: list[Unit] = []
        for index, section in enumerate(sections):
            section.units = carried + section.units
            shown = [unit for unit in section.units if unit.size]
            following = sections[index + 1] if index + 1 < len(sections) else None
            bare = all(unit.block is not None and unit.block.kind == "heading" for unit in shown)
            if following and (not shown or (bare and following.level > section.level)):
                carried = section.units
            elif shown:
                carried = []
                result.append(section)
            elif result:
                result[-1].units += section.units
        return result

    def _fill_heads(self, sections: Sequence[_Section]) -> None:
        """Title and breadcrumb as the model sees them, within a third of the hard limit; ids of the sections."""
        title = " ".join(self._document.title.split())
        breadcrumbs = list(dict.fromkeys(section.breadcrumb for section in sections))
        heads = {crumbs: _head(title, crumbs) for crumbs in breadcrumbs}
        counts = dict(zip(breadcrumbs, self._counter.count([heads[crumbs] for crumbs in breadcrumbs]), strict=True))
        most = self._budget.hard_tokens // 3
        ordinals: Counter[tuple[str, ...]] = Counter()
        for section in sections:
            crumbs = section.breadcrumb
            if counts[crumbs] > most:
                heads[crumbs] = self._short_head(title, crumbs, most)
                counts[crumbs] = self._counter.count([heads[crumbs]])[0]
            section.head, section.head_tokens = heads[crumbs], counts[crumbs]
            section.section_id = _digest("section", self._document.source, crumbs, ordinals[crumbs])
            ordinals[crumbs] += 1

    def _short_head(self, title: str, breadcrumb: tuple[str, ...], most: int) -> str:
        title = self._cut(title, most // 2)
        left = most - self._counter.count([title])[0]
        kept: list[str] = []
        for heading in reversed(breadcrumb):
            candidate = [heading, *kept]
            if self._counter.count([" > ".join(candidate)])[0] > left:
                if not kept:
                    kept = [self._cut(heading, left)]
                break
            kept = candidate
        return _head(title, tuple(part for part in kept if part))

    def _cut(self, text: str, most: int) -> str:
        offsets = self._counter.offsets(text)
        return text if len(offsets) <= most else text[: offsets[most][0]].rstrip()

    def _small_sections(self, sections: Sequence[_Section]) -> tuple[list[_Draft], list[_Section]]:
        """The sections that are one chunk of at most the soft size, counted only once, and the others."""
        guessed: list[_Section] = []
        large: list[_Section] = []
        for section in sections:
            # Hardly any tokenizer makes more tokens than a third of the bytes; the exact count decides below.
            guess = sum(len(unit.text.encode()) for unit in section.units) // _BYTES_PER_TOKEN
            (guessed if self._outside(section) + guess <= self._budget.soft_tokens else large).append(section)
        drafts = [self._draft(section, section.units, section.head) for section in guessed]
        counts = self._counter.count_inputs([draft.embedding_text for draft in drafts])
        small: list[_Draft] = []
        for draft, count in zip(drafts, counts, strict=True):
            draft.tokens = count
            if count <= min(self._budget.soft_tokens, self._budget.hard_tokens) and self._is_short(draft):
                small.append(draft)
            else:
                large.append(draft.section)
        return small, large

    def _pack(self, sections: Sequence[_Section]) -> list[_Draft]:
        """The drafts of sections whose blocks must be counted one by one."""
        units = [unit for section in sections for unit in section.units]
        counted = iter(self._splitter.counted(units, most=MAX_CONTENT_CHARACTERS))
        drafts: list[_Draft] = []
        for section in sections:
            outside = self._outside(section)
            limit = Limit(max(1, self._budget.hard_tokens - outside), MAX_CONTENT_CHARACTERS)
            cut = self._splitter.cut(list(islice(counted, len(section.units))), limit)
            groups = pack(cut, limit, max(1, self._budget.soft_tokens - outside))
            drafts += [self._draft(section, group, section.head) for group in groups]
        return drafts

    def _outside(self, section: _Section) -> int:
        """Tokens of the input that are not content."""
        return self._counter.reserved_tokens + section.head_tokens

    def _is_short(self, draft: _Draft) -> bool:
        return len(draft.content) <= MAX_CONTENT_CHARACTERS

    def _draft(self, section: _Section, units: list[Unit], head: str) -> _Draft:
        start, end = units[0].start, units[-1].end
        opening = "".join(frame.opening for frame in units[0].frames if frame.start < start)
        closing = "".join(frame.closing for frame in reversed(units[-1].frames) if frame.end > end)
        content = opening + self._visible.render(start, end) + closing
        return _Draft(section, units, head, content)

    def _verified(self, drafts: list[_Draft]) -> list[_Draft]:
        """Count every whole input; what exceeds a limit is cut smaller until nothing does."""
        result: list[_Draft] = []
        pending = [draft for draft in drafts if draft.content.strip()]
        while pending:
            counts = self._counter.count_inputs([draft.embedding_text for draft in pending])
            again: list[_Draft] = []
            for draft, count in zip(pending, counts, strict=True):
                draft.tokens = count
                if count <= self._budget.hard_tokens and self._is_short(draft):
                    result.append(draft)
                else:
                    again += [piece for piece in self._smaller(draft) if piece.content.strip()]
            pending = again
        return result

    def _smaller(self, draft: _Draft) -> list[_Draft]:
        """Two or more drafts for one that is too large; the last resorts are to drop frames, then the head."""
        units = draft.units
        shown = [index for index, unit in enumerate(units) if unit.tokens]
        if len(shown) > 1:
            middle = shown[middle_of([units[index] for index in shown])]
            return [self._draft(draft.section, part, draft.head) for part in (units[:middle], units[middle:])]
        place = shown[0]
        unit = units[place]
        rendered = self._visible.render(unit.start, unit.end)
        half = Limit(max(1, unit.tokens // 2), (len(rendered) + 1) // 2)
        parts = self._splitter.cut_text(unit.start, unit.end, half)
        groups = shown_groups(
            [*units[:place], *(replace(part, frames=unit.frames) for part in parts), *units[place + 1 :]]
        )
        if len(groups) > 1:
            return [self._draft(draft.section, group, draft.head) for group in groups]
        if any(each.frames for each in units):
            return [self._draft(draft.section, [replace(each, frames=()) for each in units], draft.head)]
        if draft.head:
            return [self._draft(draft.section, units, "")]
        raise ConfigurationError(
            f"The hard limit of {self._budget.hard_tokens} tokens does not hold the single piece {rendered[:20]!r} "
            f"of {self._document.source}; raise it."
        )

    def _records(self, drafts: Sequence[_Draft]) -> list[Chunk]:
        document = self._document
        shift = document.body_start
        first_line = document.text.count("\n", 0, shift) + 1
        line_starts = self._parsed.line_starts
        ordinals: Counter[str] = Counter()
        ids: list[str] = []
        for draft in drafts:
            section_id = draft.section.section_id
            ids.append(_digest("chunk", section_id, ordinals[section_id]))
            ordinals[section_id] += 1
        chunks: list[Chunk] = []
        for index, draft in enumerate(drafts):
            start, end = self._trimmed(draft)
            chunks.append(
                Chunk(
                    id=ids[index],
                    source=document.source,
                    title=document.title,
                    breadcrumb=draft.section.breadcrumb,
                    category=document.category,
                    chunk_index=index,
                    content=draft.content,
                    embedding_text=draft.embedding_text,
                    token_count=draft.tokens,
                    char_start=shift + start,
                    char_end=shift + end,
                    line_start=first_line + bisect_right(line_starts, start) - 1,
                    line_end=first_line + bisect_right(line_starts, end - 1) - 1,
                    prev_id=ids[index - 1] if index else "",
                    next_id=ids[index + 1] if index + 1 < len(ids) else "",
                    section_id=draft.section.section_id,
                    language=document.language,
                    content_digest=hashlib.sha256(draft.content.encode()).hexdigest(),
                    keywords=document.keywords,
                )
            )
        return chunks

    def _trimmed(self, draft: _Draft) -> tuple[int, int]:
        """The span without blank lines at its ends; the first line keeps its indentation."""
        text = self._parsed.text
        start, end = draft.units[0].start, draft.units[-1].end
        while end > start + 1 and text[end - 1].isspace():
            end -= 1
        position = start
        while position < end - 1 and text[position].isspace():
            position += 1
            if text[position - 1] == "\n":
                start = position
        return start, end


def _head(title: str, breadcrumb: tuple[str, ...]) -> str:
    return "\n".join(part for part in (title, " > ".join(breadcrumb)) if part)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:32]
