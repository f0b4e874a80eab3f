"""L0 hints: where a term stands, which of several wins, what it keeps, and which domains it speaks for."""

import json
import time
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.ingest.terms import KNOWLEDGE_INDEX_VERSION, TermRow, normalise
from rag_pipeline.records import HintMatch, Hints
from rag_pipeline.retrieval.l0_hints import KINDS, HintMatcher


def row(surface: str, kind: str = "keyword", *, of: str = "cache/a.md", title: str = "", category: str = "") -> TermRow:
    return TermRow(normalise(surface), surface, kind, of, title or f"Title of {of}", category)


def terms(query: str, *known: str) -> list[str]:
    """The terms of ``known`` that stand in the query, in order."""
    return [match.term for match in HintMatcher([row(term) for term in known]).match(query).matches]


@pytest.mark.parametrize(
    ("query", "term", "stands"),
    [
        ("why does redis-cli hang", "redis", True),
        ("redis.conf", "redis", True),
        ("cache/redis:6379", "redis", True),
        ("(redis)", "redis", True),
        ("redis_exporter is down", "redis", False),
        ("my_redis", "redis", False),
        ("rediscover it", "redis", False),
        ("predis", "redis", False),
        ("redis7", "redis", False),
        ("raise max_connections now", "max_connections", True),
        ("mysql.max_connections=500", "max_connections", True),
        ("max_connections_total", "max_connections", False),
        ("mysql_max_connections", "max_connections", False),
        ("container left with exit code 1", "exit code 1", True),
        ("exit code 137", "exit code 1", False),
        ("exit code 137", "exit code 137", True),
        ("It ended with exit code 1. Then it came back", "exit code 1", True),
        ("exit code 1.5", "exit code 1", False),
        ("exit code 1,500", "exit code 1", False),
        ("0.5 gb", "5 gb", False),
        ("v.5 gb", "5 gb", True),
        ("redis连接数打满", "redis", True),
        ("清理redis内存", "redis", True),
        ("запросredis", "redis", False),
        ("redisé", "redis", False),
        ("堆内存溢出", "内存", True),
        ("restart the Ｒｅｄｉｓ pod", "redis", True),
        ("REDIS", "redis", True),
        ("ﬁlesystem full", "filesystem", True),
        ("ｒｅｄｉｓ＿ｘ", "redis", False),
        ("-XX:MaxHeap", "-xx:maxheap", True),
        ("a-xx:maxheap", "-xx:maxheap", True),
        ("exit   code\n137", "exit code 137", True),
    ],
)
def test_a_term_counts_where_it_stands_as_a_word(query: str, term: str, stands: bool) -> None:
    assert terms(query, term) == ([term] if stands else [])


@pytest.mark.parametrize(
    ("query", "known", "expected"),
    [
        # Chinese: the longest at the leftmost place, then on after its end.
        ("堆内存溢出怎么办", ("内存", "堆内存", "内存溢出"), ["堆内存"]),
        ("内存溢出", ("内存", "内存溢出", "溢出"), ["内存溢出"]),
        ("磁盘写满磁盘", ("磁盘", "磁盘写满"), ["磁盘写满", "磁盘"]),
        # A longer one that begins later loses to a shorter one that begins earlier.
        ("node disk pressure high", ("node disk", "disk pressure high"), ["node disk"]),
        ("node disk pressure", ("node", "node disk", "node disk pressure"), ["node disk pressure"]),
        # What does not stand does not hide what it overlaps.
        ("redis connections2", ("redis connections", "redis"), ["redis"]),
        ("the node disk", ("e node", "node", "disk"), ["node", "disk"]),
        ("redis redis redis", ("redis",), ["redis"]),
        ("kafka, then redis, then kafka", ("redis", "kafka"), ["kafka", "redis"]),
        ("redisredis", ("redis",), []),
        ("a.a.a", ("a.a",), ["a.a"]),
    ],
)
def test_the_leftmost_longest_term_wins_and_overlaps_are_dropped(
    query: str, known: Sequence[str], expected: list[str]
) -> None:
    assert terms(query, *known) == expected
    assert terms(query, *reversed(known)) == expected


def test_a_term_keeps_all_its_kinds_and_documents_and_its_commonest_surface() -> None:
    matcher = HintMatcher(
        [
            row("Redis", "entity", of="z.md", category="cache"),
            row("REDIS", "keyword", of="c.md", category="database"),
            row("Redis", "keyword", of="b.md", category="cache"),
            row("Redis", "keyword", of="a.md", category=" "),
            row("Redis", "title", of="a.md", title="Redis", category=""),
        ]
    )
    hints = matcher.match("REDIS!")
    assert hints.matches == (
        HintMatch("redis", "Redis", "title", ("a.md",), ()),
        HintMatch("redis", "Redis", "keyword", ("a.md", "b.md", "c.md"), ("cache", "database")),
        HintMatch("redis", "Redis", "entity", ("z.md",), ("cache",)),
    )
    assert hints.titles == ("Redis", "Title of b.md", "Title of c.md")
    assert hints.keywords == ("Redis",)
    assert hints.entities == ("Redis",)
    assert hints.domains == ("cache", "database")
    # Equally common: the one that sorts first.
    assert HintMatcher([row("redis"), row("REDIS")]).match("redis").keywords == ("REDIS",)


def test_each_kind_feeds_the_lists_it_belongs_to_in_order_of_the_query() -> None:
    matcher = HintMatcher([row(f"the {kind}", kind, of=f"{kind}.md", title=f"T {kind}") for kind in KINDS])
    order = ("service", "heading", "title", "entity", "keyword", "category", "alert")
    hints = matcher.match(" ".join(f"the {kind}" for kind in order))
    assert [match.kind for match in hints.matches] == list(order)
    assert hints.titles == ("T title", "T keyword", "T alert")
    assert hints.keywords == ("the heading", "the keyword", "the alert")
    assert hints.entities == ("the service", "the entity")


def test_a_document_without_a_title_adds_no_blank_one() -> None:
    assert HintMatcher([TermRow("redis", "redis", "keyword", "a.md", "", "c")]).match("redis").titles == ()


@pytest.mark.parametrize("query", ["", "   ", "🔥🔥🔥", "\ud800", "\x00", "怎么办", "x" * 100])
def test_text_without_a_term_has_no_hints(query: str) -> None:
    assert HintMatcher([row("redis")]).match(query) == Hints()
    assert HintMatcher([]).match(query) == Hints()
    assert HintMatcher([TermRow("", "", "title", "a.md", "A", "c")]).match(query) == Hints()


@pytest.mark.parametrize("query", ["🔥redis🔥", "\ud83dredis\udd25", "é redis", "\u200bredis"])
def test_odd_characters_beside_a_term_move_nothing(query: str) -> None:
    assert terms(query, "redis") == ["redis"]


# Domains


def domains(query: str, *rows: TermRow) -> tuple[str, ...]:
    return HintMatcher(rows).match(query).domains


def test_a_term_votes_for_the_categories_it_reaches_as_a_word_of_longer_terms() -> None:
    node = row("node", "title", of="kubernetes/node.md", category="kubernetes")
    assert domains("node down", node) == ("kubernetes",)
    heading = row("Node is not ready", "heading", of="host/ready.md", category="host")
    assert domains("node down", node, heading) == ("host", "kubernetes")
    # Not as a part of a word, and no longer term votes through a shorter one.
    assert domains("node down", node, row("nodejs heap", "heading", of="app/a.md", category="app")) == ("kubernetes",)
    assert domains("node is not ready", node, heading) == ("host",)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "category"])
def test_every_kind_but_the_category_decides(kind: str) -> None:
    assert domains("redis", row("redis", kind, category="cache")) == ("cache",)


def test_a_categorys_name_never_decides_alone_and_only_adds_to_what_was_voted_for() -> None:
    database = row("database", "category", of="database/a.md", category="database")
    redis = row("redis", "title", category="cache")
    assert domains("the database is slow", database) == ()
    assert domains("database", database, redis) == ()
    assert domains("redis as a database", database, redis) == ("cache", "database")
    # Nor by what has it as a word, nor is what it names reached by others.
    assert domains("database", database, row("Database host lost", "heading", category="host")) == ()
    longer = row("database host", "category", of="host/a.md", category="host")
    assert domains("database", row("database", "title", category="database"), longer) == ("database",)


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_blank_categories_are_no_domain(blank: str) -> None:
    unnamed = row("redis", "title", of="a.md", category=blank)
    hints = HintMatcher([unnamed]).match("redis")
    assert (hints.domains, hints.domain, hints.titles) == ((), "", ("Title of a.md",))
    hints = HintMatcher([unnamed, row("redis", "keyword", of="b.md", category="cache")]).match("redis")
    assert (hints.domains, hints.domain) == (("cache",), "cache")


def test_several_domains_are_no_filter() -> None:
    hints = HintMatcher([row("redis", of="b.md", category="b"), row("redis", of="a.md", category="a")]).match("redis")
    assert (hints.domains, hints.domain) == (("a", "b"), "")


# The published artefact


def artefact(**changes: object) -> bytes:
    rows = [list(row("Redis clients", "title", category="cache"))]
    known = {"version": KNOWLEDGE_INDEX_VERSION, "columns": list(TermRow._fields), "rows": rows}
    return json.dumps({**known, **changes}).encode()


def test_a_published_index_is_read() -> None:
    hints = HintMatcher.from_json(artefact()).match("redis CLIENTS")
    assert (hints.titles, hints.domain) == (("Title of cache/a.md",), "cache")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (artefact(version="0"), "The knowledge index has version '0' and this program reads version "),
        (artefact(version=1), "The knowledge index has version 1 and this program reads version "),
        (artefact(columns=["term"]), "reindex needed"),
        (artefact(rows=[["only", "two"]]), "The knowledge index cannot be read (TypeError: "),
        (artefact(rows=5), "The knowledge index cannot be read (TypeError: "),
        (b'{"version": "1"}', "The knowledge index cannot be read (KeyError: 'columns'): reindex to publish it again."),
        (b"[]", "The knowledge index cannot be read (TypeError: "),
        (b"null", "The knowledge index cannot be read (TypeError: "),
        (b"", "The knowledge index cannot be read (JSONDecodeError: "),
        (b"\xff\xfe\xfa", "The knowledge index cannot be read ("),
        (artefact()[:-5], "The knowledge index cannot be read (JSONDecodeError: "),
    ],
)
def test_a_broken_index_or_one_of_another_version_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(StoreUnavailableError) as error:
        HintMatcher.from_json(data)
    assert message in str(error.value)
    assert "reindex" in str(error.value)


# Against a matcher that tries every place


def is_word(character: str) -> bool:
    """A letter, digit or underscore of a script that puts spaces between words."""
    unspaced = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI")
    return (character.isalnum() or character == "_") and not unicodedata.name(character, "").startswith(unspaced)


def stands(text: str, start: int, end: int) -> bool:
    before, after = text[:start], text[end:]
    if before and is_word(text[start]):
        if is_word(before[-1]):
            return False
        if text[start].isdigit() and before[-1] in ".," and before[-2:-1].isdigit():
            return False
    if after and is_word(text[end - 1]):
        if is_word(after[0]):
            return False
        if text[end - 1].isdigit() and after[0] in ".," and after[1:2].isdigit():
            return False
    return True


def naive_terms(text: str, known: Sequence[str]) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(text):
        here = [term for term in known if text.startswith(term, at) and stands(text, at, at + len(term))]
        if here:
            found.append(max(here, key=len))
            at += len(found[-1])
        else:
            at += 1
    return list(dict.fromkeys(found))


def naive_reach(term: str, rows: Sequence[TermRow]) -> set[str]:
    return {
        one.category
        for one in rows
        if one.kind != "category" and one.category.strip()
        for at in range(len(one.term))
        if one.term.startswith(term, at) and stands(one.term, at, at + len(term))
    }


PIECES = (
    "a",
    "b",
    "ab",
    "1",
    "13",
    "_",
    "-",
    ".",
    ",",
    " ",
    "内",
    "内存",
    "堆",
    "é",
    "Ａ",
    "B",
    "ß",
    "🔥",
    "redis",
    "か",
    "ไ",
)
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
surfaces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
rows_of = st.lists(
    st.builds(
        lambda surface, kind, source, category: row(surface, kind, of=source, category=category),
        surfaces,
        st.sampled_from(KINDS),
        st.sampled_from(("a.md", "b.md", "c.md")),
        st.sampled_from(("cache", "host", "", " ")),
    ),
    max_size=10,
)


@settings(max_examples=500, deadline=None)
@given(texts, rows_of)
def test_it_finds_what_trying_every_place_finds(text: str, rows: list[TermRow]) -> None:
    rows = [one for one in rows if one.term]
    hints = HintMatcher(rows).match(text)
    found = naive_terms(normalise(text), sorted({one.term for one in rows}))
    assert list(dict.fromkeys(match.term for match in hints.matches)) == found
    kinds = {(one.term, one.kind) for one in rows if one.term in found}
    assert {(match.term, match.kind) for match in hints.matches} == kinds
    for match in hints.matches:
        own = [one for one in rows if (one.term, one.kind) == (match.term, match.kind)]
        assert match.sources == tuple(sorted({one.source for one in own}))
        assert match.categories == tuple(sorted({one.category for one in own if one.category.strip()}))
    votes = {name for term, kind in kinds if kind != "category" for name in naive_reach(term, rows)}
    added = {name for match in hints.matches if match.kind == "category" for name in match.categories}
    assert hints.domains == tuple(sorted(votes | added if votes else ()))


@settings(max_examples=100, deadline=None)
@given(texts, rows_of, st.randoms())
def test_the_order_of_the_rows_matters_not(text: str, rows: list[TermRow], random: object) -> None:
    # Titles belong to documents, so that they cannot differ between two rows of one.
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert HintMatcher(shuffled).match(text) == HintMatcher(rows).match(text)


@pytest.mark.parametrize("filler", ["x ", "内"])
def test_a_term_across_two_windows_of_a_long_query_is_found_once(filler: str) -> None:
    window = 65_536
    matcher = HintMatcher([row("redis clients"), row("clients"), row("redis")])
    for before in range(window - 8, window + 2):
        text = (filler * window)[: before - 1] + " redis clients " + filler * 3
        found = [match.term for match in matcher.match(text).matches]
        assert found == ["redis clients"], before


# Linear time


def seconds(matcher: HintMatcher, query: str) -> float:
    times = []
    for _ in range(3):
        started = time.process_time()
        matcher.match(query)
        times.append(time.process_time() - started)
    return min(times)


@pytest.mark.parametrize(
    "unit", ["redis connections are exhausted, ", "内存溢出怎么办", "aaaaaaaaaaaaaaa", "a a a a a a a "]
)
def test_twice_the_query_takes_about_twice_the_time(unit: str) -> None:
    nested = ["a" * length for length in range(1, 12)] + [" ".join("a" * length) for length in range(2, 8)]
    matcher = HintMatcher([row(term) for term in ("redis", "redis connections", "内存", "内存溢出", *nested)])
    whole = 160_000 // len(unit)
    # Eightfold, so that quadratic time (64 times) stands far above the noise.
    assert seconds(matcher, unit * whole) < 24 * seconds(matcher, unit * (whole // 8))
