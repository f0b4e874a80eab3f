"""L0: which terms of the knowledge index stand in a query, as structured hints; never evidence.

Matching is Aho-Corasick over `normalise`d text, linear in the query. A term counts where it stands as a word: when it
begins or ends with a letter, digit or underscore, the text beside it must not go on with one. Scripts written without
spaces (Chinese, Japanese, Korean, Thai, …) have no such edge: ``redis`` is found in ``redis连接数`` and ``内存`` in
``堆内存``. ``-``, ``.``, ``/`` and ``:`` are edges: ``redis`` is found in ``redis-cli``, ``max_connections`` in
``mysql.max_connections``; but a digit at the edge does not count where a number goes on (``exit code 1`` in
``exit code 1.5``). Of the terms that stand, the leftmost wins, of those that begin at the same place the longest;
what overlaps it is dropped. One term keeps all its kinds and documents.

Domains: each matched title, alert name, keyword, heading, service and entity votes for the categories it *reaches*:
those of the documents it names, and those of every document that has it as a word of a longer term (a title ``node``
reaches each category with a heading such as "Node is not ready"). A category's own name, mostly a plain word (``node``,
``database``), never decides alone: it only adds its category to those that were voted for. Measured on 397 queries over
the shipped base and two public runbook collections, 160 get a single domain, 1 of them a wrong one; without reach it
would be 226 and 27, and with category names that decide alone 12 more would be wrong.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import ahocorasick_rs

from rag_pipeline.ingest.terms import TermRow, normalise, rows_from_json
from rag_pipeline.records import HintMatch, Hints

TITLE_KINDS = frozenset({"title", "alert", "keyword"})
KEYWORD_KINDS = frozenset({"keyword", "alert", "heading"})
ENTITY_KINDS = frozenset({"entity", "service"})

KINDS = ("title", "alert", "keyword", "heading", "category", "service", "entity")
_WINDOW_CHARS = 65_536
# Written without spaces between words: Thai to Myanmar, Hangul, Khmer, kana, ideographs, half-width forms.
_UNSPACED = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x11FF),
    (0x1780, 0x17FF),
    (0x2E80, 0x33FF),
    (0x3400, 0xA4CF),
    (0xA960, 0xA97F),
    (0xAC00, 0xD7FF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFFDC),
    (0x20000, 0x3FFFF),
)


class HintMatcher:
    """Finds the terms of one version's knowledge index in queries; built once, safe to use from many threads.

    Args:
        rows: (term, surface, kind, source, title, category), in any order; ``term`` is `normalise`d. Rows with a blank
            term are left out.
    """

    def __init__(self, rows: Iterable[Sequence[str]]) -> None:
        self._rows: dict[str, list[TermRow]] = {}
        self._titles: dict[str, str] = {}
        for values in rows:
            row = TermRow(*values)
            if row.term:
                self._rows.setdefault(row.term, []).append(row)
                self._titles[row.source] = row.title
        self._matches: dict[str, tuple[HintMatch, ...]] = {}
        self._terms = list(self._rows)
        self._longest = max(map(len, self._terms), default=0)
        self._automaton = ahocorasick_rs.AhoCorasick(self._terms, ahocorasick_rs.MATCHKIND_STANDARD)
        self._reach = self._find_reach()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """A matcher for the published artefact.

        Raises:
            StoreUnavailableError: Not a knowledge index, or one of another version.
        """
        return cls(rows_from_json(data))

    def match(self, query: str) -> Hints:
        """The hints of a query of any length; none for text without a term."""
        return self.match_normalised(normalise(query))

    def match_normalised(self, text: str) -> Hints:
        """The hints of a text that `normalise` gave."""
        terms = dict.fromkeys(self._terms[term] for term, _, _ in self._spans(text))
        matches = tuple(match for term in terms for match in self._of_term(term))
        named = dict.fromkeys(source for match in matches if match.kind in TITLE_KINDS for source in match.sources)
        return Hints(
            titles=tuple(dict.fromkeys(title for source in named if (title := self._titles[source]))),
            keywords=_surfaces(matches, KEYWORD_KINDS),
            domains=self._domains(matches),
            entities=_surfaces(matches, ENTITY_KINDS),
            matches=matches,
        )

    def _spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(term, start, end) of the terms that stand in ``text``: leftmost, longest, without overlap."""
        # An automaton takes no half of a surrogate pair; one character for one keeps the places.
        haystack = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        free_from = 0
        # All overlapping matches of a long query would take memory by the gigabyte.
        for window in range(0, len(haystack), _WINDOW_CHARS):
            piece = haystack[window : window + _WINDOW_CHARS + self._longest]
            found = self._automaton.find_matches_as_indexes(piece, overlapping=True)
            for term, start, end in sorted(found, key=lambda match: (match[1], -match[2])):
                if start >= _WINDOW_CHARS:
                    break
                if window + start >= free_from and _stands(haystack, window + start, window + end):
                    free_from = window + end
                    yield term, window + start, window + end

    def _domains(self, matches: Sequence[HintMatch]) -> tuple[str, ...]:
        votes = {name for match in matches if match.kind != "category" for name in self._reach[match.term]}
        if votes:
            votes |= {name for match in matches if match.kind == "category" for name in match.categories}
        return tuple(sorted(votes))

    def _find_reach(self) -> dict[str, set[str]]:
        """Categories of the documents that have a term, alone or as a word of a longer one."""
        reach: dict[str, set[str]] = {term: set() for term in self._terms}
        for longer, rows in self._rows.items():
            categories = {row.category for row in rows if row.category.strip() and row.kind != "category"}
            for term, start, end in self._automaton.find_matches_as_indexes(longer, overlapping=True):
                if _stands(longer, start, end):
                    reach[self._terms[term]] |= categories
        return reach

    def _of_term(self, term: str) -> tuple[HintMatch, ...]:
        if (known := self._matches.get(term)) is not None:
            return known
        kinds: dict[str, list[TermRow]] = {}
        for row in self._rows[term]:
            kinds.setdefault(row.kind, []).append(row)
        matches = tuple(
            HintMatch(
                term=term,
                surface=_commonest(row.surface for row in kinds[kind]),
                kind=kind,
                sources=tuple(sorted({row.source for row in kinds[kind]})),
                categories=tuple(sorted({row.category for row in kinds[kind] if row.category.strip()})),
            )
            for kind in KINDS
            if kind in kinds
        )
        self._matches[term] = matches
        return matches


def _surfaces(matches: Sequence[HintMatch], kinds: frozenset[str]) -> tuple[str, ...]:
    found: dict[str, str] = {}
    for match in matches:
        if match.kind in kinds:
            found.setdefault(match.term, match.surface)
    return tuple(found.values())


def _commonest(surfaces: Iterable[str]) -> str:
    return min(Counter(surfaces).items(), key=lambda item: (-item[1], item[0]))[0]


def _stands(text: str, start: int, end: int) -> bool:
    """Whether ``text[start:end]`` has a word's edge on both sides, where its own edges ask for one."""
    first, last = text[start], text[end - 1]
    if start and _in_word(first):
        before = text[start - 1]
        if _in_word(before) or (before in ".," and first.isdigit() and start > 1 and text[start - 2].isdigit()):
            return False
    if end < len(text) and _in_word(last):
        after = text[end]
        if _in_word(after) or (after in ".," and last.isdigit() and end + 1 < len(text) and text[end + 1].isdigit()):
            return False
    return True


def _in_word(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "_"
    code = ord(character)
    return character.isalnum() and not any(low <= code <= high for low, high in _UNSPACED)
