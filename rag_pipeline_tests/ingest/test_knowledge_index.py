"""Which terms a document gives to the L0 index, and the published file."""

import json

import pandas as pd
import pytest

from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.ingest import knowledge_index
from rag_pipeline.ingest.knowledge_index import build_knowledge_index, from_json, normalise, to_json
from rag_pipeline.tables import KNOWLEDGE_INDEX_COLUMNS, from_parquet, to_parquet


def document(source: str, *, title: str = "Page", category: str = "", **values: object) -> dict[str, object]:
    return {
        "source": source, "title": title, "category": category, "keywords": [], "alerts": [], "service": "", **values,
    }  # fmt: skip


def chunk(source: str, index: int, *breadcrumb: str, content: str = "text") -> dict[str, object]:
    return {"source": source, "chunk_index": index, "breadcrumb": list(breadcrumb), "content": content}


def build(documents: list[dict[str, object]], chunks: list[dict[str, object]]) -> pd.DataFrame:
    columns = ["source", "title", "category", "keywords", "alerts", "service"]
    return build_knowledge_index(
        pd.DataFrame(documents, columns=columns),
        pd.DataFrame(chunks, columns=["source", "chunk_index", "breadcrumb", "content"]),
    )


def terms(index: pd.DataFrame, kind: str) -> list[str]:
    return list(index[index["kind"] == kind]["term"])


def entities(text: str) -> set[str]:
    index = build([document("a.md")], [chunk("a.md", 0, content=text)])
    return set(index[index["kind"] == "entity"]["surface"])


def headings(*breadcrumb: str, title: str = "Page") -> list[str]:
    return terms(build([document("a.md", title=title)], [chunk("a.md", 0, *breadcrumb)]), "heading")


REDIS = document(
    "cache/redis.md",
    title="Redis 连接数打满",
    category="cache",
    keywords=["Redis", "连接数", " max   clients ", "redis"],
    alerts=["RedisTooManyConnections"],
    service="redis-session",
)


def test_every_kind_of_term_of_a_document() -> None:
    index = build(
        [REDIS],
        [
            chunk("cache/redis.md", 0, "Redis 连接数打满", "1. 先看现场", content="看 `connected_clients`。"),
            chunk("cache/redis.md", 1, "Redis 连接数打满", "排查步骤", content="connected_clients"),
        ],
    )
    assert tuple(index.columns) == KNOWLEDGE_INDEX_COLUMNS
    where = ("cache/redis.md", "Redis 连接数打满", "cache")
    assert list(index.itertuples(index=False, name=None)) == [
        ("cache", "cache", "category", *where),
        ("connected_clients", "connected_clients", "entity", *where),
        ("max clients", "max clients", "keyword", *where),
        ("redis", "Redis", "keyword", *where),
        ("redis 连接数打满", "Redis 连接数打满", "title", *where),
        ("redis-session", "redis-session", "service", *where),
        ("redistoomanyconnections", "RedisTooManyConnections", "alert", *where),
        ("先看现场", "1. 先看现场", "heading", *where),
        ("连接数", "连接数", "keyword", *where),
    ]


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("  OOM\u3000Killed\n", "oom killed"),
        ("ＲＥＤＩＳ", "redis"),
        ("STRASSE Straße", "strasse strasse"),
        ("\u2460 \ufb01le", "1 file"),
        ("连接数", "连接数"),
    ],
)
def test_terms_are_normalised(text: str, term: str) -> None:
    assert normalise(text) == term
    assert normalise(term) == term


@pytest.mark.parametrize(
    "heading",
    [
        "概述",
        "排查步骤",
        "1. 原因",
        "一、现象：",
        "（二）处理步骤",
        "3.2 概述",
        "3.2.1.4 概述",
        "第一步 验证",
        "Summary",
        "SYMPTOMS:",
        "Step 2: Verify",
        "🔥 Steps",
        "What's next?",
        "Overview {#overview}",
        "2026",
        "7",
        "x",
        "—",
        "y" * 121,
    ],
)
def test_headings_that_say_nothing_are_left_out(heading: str) -> None:
    assert headings(heading) == []


@pytest.mark.parametrize(
    ("heading", "term"),
    [
        ("2. 内存碎片", "内存碎片"),
        ("2.1 内存碎片", "内存碎片"),
        ("三、主从延迟！", "主从延迟"),
        ("第 3 步：切换主库", "切换主库"),
        ("Step 1: which thread is behind?", "which thread is behind"),
        ("Restart {#restart}", "restart"),
        ("5xx errors", "5xx errors"),
        ("10:30 failover", "10:30 failover"),
        ("一致性检查", "一致性检查"),
        ("C#", "c#"),
    ],
)
def test_headings_lose_their_numbering(heading: str, term: str) -> None:
    assert headings(heading) == [term]


def test_a_heading_equal_to_the_title_is_the_title_only() -> None:
    assert headings("Disk FULL", "Inodes", title="Disk full") == ["inodes"]


def test_a_generic_title_is_left_out_but_a_generic_keyword_stays() -> None:
    index = build([document("a.md", title="README", keywords=["Summary"])], [])
    assert list(index["term"]) == ["summary"]


def test_headings_of_the_house_template_are_left_out() -> None:
    """Five documents of a hundred are no template, six are; four of four neither."""
    for documents, headed, expected in [(100, 5, 5), (100, 6, 0), (4, 4, 4)]:
        sources = [f"{number:03}.md" for number in range(documents)]
        index = build(
            [document(source) for source in sources], [chunk(source, 0, "Permanent fix") for source in sources[:headed]]
        )
        assert len(terms(index, "heading")) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("告警KubePodNotReady触发", {"KubePodNotReady"}),
        (
            "OOMKilled, CPUThrottlingHigh and terminationGracePeriodSeconds",
            {"OOMKilled", "CPUThrottlingHigh", "terminationGracePeriodSeconds"},
        ),
        ("Redis METRICS and PVCs, IDs; aB", set()),
        (
            "rate(node_cpu_seconds_total[5m]) by Seconds_Behind_Source",
            {"node_cpu_seconds_total", "Seconds_Behind_Source"},
        ),
        ("max\\_connections", {"max_connections"}),
        ("job:http_errors:rate5m key:value", {"job:http_errors:rate5m"}),
        ("spring.datasource.url and vm.max_map_count", {"spring.datasource.url", "vm.max_map_count", "max_map_count"}),
        ("java.lang.OutOfMemoryError: heap", {"java.lang.OutOfMemoryError", "OutOfMemoryError"}),
        ("values.yaml docs.example.com redis.zh.md e.g. i.e. v1.2.3 10.0.0.1", set()),
        (
            "ORA-00060, CVE-2024-3094, MY-010957, SQL1224N, UTF-8",
            {"ORA-00060", "CVE-2024-3094", "MY-010957", "SQL1224N"},
        ),
        ("SIGKILL ENOSPC ECONNREFUSED EXPLAIN ERROR", {"SIGKILL", "ENOSPC", "ECONNREFUSED"}),
        ("exit code 137, ERROR 1213 (40001), 退出码 143。", {"exit code 137", "ERROR 1213", "退出码 143"}),
        ("see https://x.io/some_path/KubePodX and [a](../other_page.md#KubePodY)", set()),
    ],
)
def test_entities_are_identifiers_worth_matching_exactly(text: str, found: set[str]) -> None:
    assert entities(text) == found


def test_entities_stand_in_title_headings_and_content() -> None:
    index = build([document("a.md", title="KubePodNotReady")], [chunk("a.md", 0, "Why max_connections", content="x_y")])
    assert terms(index, "entity") == ["kubepodnotready", "max_connections", "x_y"]


def test_the_most_frequent_entities_of_a_document_are_kept_ties_by_term() -> None:
    names = [f"metric_{number:02}" for number in range(60)]
    index = build([document("a.md")], [chunk("a.md", 0, content=" ".join([*reversed(names), "metric_59 metric_58"]))])
    assert terms(index, "entity") == [*names[:48], "metric_58", "metric_59"]
    assert len(terms(index, "entity")) == knowledge_index.MAX_ENTITIES


def test_the_surface_of_an_entity_is_its_most_frequent_spelling() -> None:
    assert entities("Max_Conn max_conn MAX_CONN max_conn") == {"max_conn"}
    assert entities("max_conn Max_Conn") == {"Max_Conn"}


def test_rows_are_the_same_for_any_order_of_tables_and_after_parquet() -> None:
    documents = pd.DataFrame([REDIS, document("b.md", keywords=["redis"])])
    chunks = pd.DataFrame(
        [
            chunk("b.md", 0, "Some heading", content="a_b"),
            chunk("b.md", 1, "SOME heading", content="A_b"),
            chunk("gone.md", 0, "Stray"),
        ]
    )
    index = build_knowledge_index(documents, chunks)
    assert not index.duplicated(["term", "kind", "source"]).any()
    assert "gone.md" not in set(index["source"])
    assert list(index[index["kind"] == "heading"]["surface"]) == ["Some heading"]
    pd.testing.assert_frame_equal(build_knowledge_index(documents[::-1], chunks[::-1]), index)
    stored = [from_parquet(to_parquet(table)) for table in (documents, chunks)]
    pd.testing.assert_frame_equal(build_knowledge_index(*stored), index)
    pd.testing.assert_frame_equal(from_parquet(to_parquet(index)), index)


def test_no_documents_give_no_rows() -> None:
    index = build([], [])
    assert (tuple(index.columns), len(index)) == (KNOWLEDGE_INDEX_COLUMNS, 0)
    pd.testing.assert_frame_equal(from_json(to_json(index)), index)


def test_the_published_file_gives_the_table_back_and_has_equal_bytes_for_equal_tables() -> None:
    index = build([REDIS, document("b.md", title='Say "hi" \\ \u2028')], [chunk("cache/redis.md", 0, "先看现场")])
    data = to_json(index)
    assert to_json(index.sample(frac=1, random_state=1)) == data
    pd.testing.assert_frame_equal(from_json(data), index)
    found = json.loads(data)
    assert found["version"] == knowledge_index.KNOWLEDGE_INDEX_VERSION
    assert "先看现场".encode() in data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"not json", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"version":"0","columns":[],"rows":[]}', "has version '0' and this program reads version '1'"),
    ],
)
def test_a_file_of_another_kind_or_version_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(StoreUnavailableError, match=reason):
        from_json(data)
