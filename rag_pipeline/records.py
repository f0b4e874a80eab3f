"""The records that flow through the pipeline; parsed once at the edge, frozen from then on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

RelevanceLevel = Literal["highly_relevant", "reference", "low", "none"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A Markdown file that was found, before it is decoded.

    Attributes:
        source: POSIX path relative to its root, prefixed with the root's name when there are several roots;
            the identity of the document.
        path: Where the file lies on this machine; never stored.
        digest: SHA-256 of the raw bytes, hex.
        size: Bytes.
        root: Name of the root that ``source`` begins with; blank with a single root, whose name is no part of it.
    """

    source: str
    path: str
    digest: str
    size: int
    root: str = ""


@dataclass(frozen=True, slots=True)
class Issue:
    """Something wrong with one file that a person should mend.

    Attributes:
        source: The document (or the path as found, when it never became one).
        line: 1-based line in the file, 0 where no line applies.
        reason: A full sentence with the next step.
        rejected: True when the document is not in the index because of it; False for a warning.
    """

    source: str
    line: int
    reason: str
    rejected: bool


@dataclass(frozen=True, slots=True)
class Document:
    """A decoded Markdown document.

    Attributes:
        source: See `SourceFile`.
        digest: SHA-256 of the file's raw bytes, hex.
        text: Whole decoded text: BOM removed, newlines are LF, NUL is U+FFFD; front matter included.
        body_start: Offset in code points at which the Markdown body begins (0 without front matter).
        title: Front matter, else first H1, else first heading, else the file name without its ending.
        category: Front matter, else first folder of ``source``, else blank.
        language: Front matter, else ``zh`` or ``en`` by the script of the visible text.
        updated: ISO date as text, blank when unknown.
        encoding: Python codec name with which the file was read.
    """

    source: str
    digest: str
    text: str
    body_start: int = 0
    title: str = ""
    category: str = ""
    keywords: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    service: str = ""
    severity: str = ""
    owner: str = ""
    language: str = ""
    updated: str = ""
    encoding: str = "utf-8"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document under one heading, small enough for the embedding model.

    Attributes:
        id: 32 hex digits from source, breadcrumb, the ordinal of the section among those with an equal breadcrumb, and
            the ordinal of the chunk in its section.
        breadcrumb: Visible document-level headings from outermost to innermost; empty without headings.
        chunk_index: 0-based position in the document.
        content: Text for people and agents, derived from the span by the rules in ``ingest.chunking``.
        embedding_text: ``title``, ``breadcrumb`` and ``content``; what the model sees after its prefix.
        token_count: Tokens of the model's whole input: prefix, embedding_text and special tokens.
        char_start: First code point of the span in ``Document.text``.
        char_end: One past the last code point of the span.
        line_start: 1-based first line of the span in the file.
        line_end: 1-based last line of the span in the file (inclusive).
        prev_id: Id of the chunk before it in the document, blank for the first.
        next_id: Id of the chunk after it in the document, blank for the last.
        section_id: 32 hex digits; equal for all chunks of one section.
        content_digest: SHA-256 of ``content``, hex.
    """

    id: str
    source: str
    title: str
    breadcrumb: tuple[str, ...]
    category: str
    chunk_index: int
    content: str
    embedding_text: str
    token_count: int
    char_start: int
    char_end: int
    line_start: int
    line_end: int
    prev_id: str
    next_id: str
    section_id: str
    language: str
    content_digest: str
    keywords: tuple[str, ...] = ()

    @property
    def breadcrumb_text(self) -> str:
        """The breadcrumb as ``A > B > C``."""
        return " > ".join(self.breadcrumb)


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """How large a chunk may become, in tokens of the model's whole input (see `Chunk.token_count`).

    Attributes:
        soft_tokens: A chunk is closed at the next block once it has reached this size.
        hard_tokens: No chunk is larger; at most the model's maximum.
    """

    soft_tokens: int = 300
    hard_tokens: int = 480


class TokenCounter(Protocol):
    """Counts tokens as the embedding model will see them."""

    @property
    def reserved_tokens(self) -> int:
        """Tokens that prefix and special tokens add to every document."""
        ...

    @property
    def max_tokens(self) -> int:
        """The most tokens the model takes, prefix and special tokens included."""
        ...

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text alone, without prefix and special tokens."""
        ...

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Half-open code point span of every token of ``text``, in order, without special tokens."""
        ...

    def count_inputs(self, embedding_texts: Sequence[str]) -> list[int]:
        """Exact tokens of each whole model input: prefix, text and special tokens, never truncated."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One retrieved chunk, in the same shape whichever path found it.

    Attributes:
        score: Squared L2 distance between unit vectors, 0 (equal) to 4; smaller is nearer.
        raw_score: The value the path itself reports: the distance for ``l2_distance``, the cosine for ``similarity``.
        score_label: ``l2_distance`` or ``similarity``: how to read ``raw_score``.
        metadata: source, title, breadcrumb, chunk_index, line_start, line_end, section, section_part (1-based) of
            section_parts, prev_id, next_id, keywords, language.
    """

    id: str
    content: str
    category: str
    score: float
    raw_score: float
    score_label: str
    metadata: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HintMatch:
    """One L0 term that stands in a query.

    Attributes:
        term: As in the knowledge index, normalised.
        surface: As its documents write it.
        kind: ``title``, ``keyword``, ``alert``, ``heading``, ``category``, ``service`` or ``entity``.
        sources: The documents it names, sorted.
        categories: Their nonblank categories, sorted.
    """

    term: str
    surface: str
    kind: str
    sources: tuple[str, ...]
    categories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hints:
    """What L0 makes of a query: structured hints, never evidence.

    Attributes:
        titles: Titles of the documents whose title, alert name or keyword stands in the query, in order of the match.
        keywords: Matched terms as the documents write them (keywords, alert names, headings), in order of the match.
        domains: Distinct nonblank categories of the matched documents, sorted; exactly one becomes the L1 filter.
        entities: Matched identifiers and services as the documents write them, in order of the match.
        matches: What all of this comes from, in order of the place in the query.
    """

    titles: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    entities: tuple[str, ...] = ()
    matches: tuple[HintMatch, ...] = ()

    @property
    def domain(self) -> str:
        """The one domain, blank when there is none or several."""
        return self.domains[0] if len(self.domains) == 1 else ""
