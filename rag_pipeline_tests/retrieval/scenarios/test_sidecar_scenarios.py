"""Scenarios on the sidecar: absent unless asked for, harmless when it fails, comparable when it answers."""

import json
import subprocess
import sys

import pytest

from rag_pipeline_tests.conftest import PROJECT
from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp
from rag_pipeline_tests.retrieval.small_base import comparable, recorded

SOCKETS = "maxclients is reached: close idle sockets of the checkout pool"

APPLICATION = """
import json, sys
from pathlib import Path
from rag_pipeline.retrieval import snapshot
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline_tests.retrieval.small_base import WordEmbedder, recorded, settings_of

snapshot.Embedder = WordEmbedder
state, knowledge, model, query = sys.argv[1:]
WATCHED = ("langchain_milvus", "langchain_core", "rag_pipeline.retrieval.sidecar")

def ask():
    with KnowledgeLookup(settings_of(Path(state), Path(knowledge), Path(model))) as lookup:
        results = [lookup.lookup(query), lookup.lookup_for_alert({"alertName": query})]
        rows = [recorded(lookup, result.invocation_id) for result in results]
    return {
        "blocks": [result.to_dict()["evidenceBlocks"] for result in results],
        "sidecar": [row.retrieval_details["sidecar"] for row in rows],
    }

plain = {**ask(), "imported": [name for name in WATCHED if name in sys.modules]}
for name in WATCHED:
    sys.modules[name] = None  # from here on an import of it fails
print(json.dumps([plain, ask()]))
"""


def test_sidecar_disabled_by_default(look_up: LookUp) -> None:
    """Scenario: Sidecar disabled by default.

    In a process of its own: neither the sidecar nor the framework is imported, and nothing needs them.
    """
    lookup = look_up()
    settings = lookup.settings
    assert settings.retrieval.sidecar.enabled is False
    arguments = [settings.state, settings.path(settings.knowledge.roots[0].path), settings.embedding.model, SOCKETS]
    ended = subprocess.run(
        [sys.executable, "-c", APPLICATION, *map(str, arguments)],
        cwd=PROJECT, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    plain, without = json.loads(ended.stdout.splitlines()[-1])
    assert plain["imported"] == []
    assert plain["blocks"][0] == lookup.lookup(SOCKETS).to_dict()["evidenceBlocks"] != []
    assert plain["blocks"] == without["blocks"]
    assert plain["sidecar"] == without["sidecar"] == [{"status": "disabled"}] * 2


def test_sidecar_failure_does_not_break_main_retrieval(look_up: LookUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: Sidecar failure does not break main retrieval.

    It fails to be imported, to be made, and to answer.
    """
    import langchain_milvus

    from rag_pipeline.retrieval.sidecar import Sidecar

    expected = json.dumps(comparable(look_up().lookup(SOCKETS)), sort_keys=True)

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("the sidecar fell off")

    def broken(patch: pytest.MonkeyPatch, way: str) -> None:
        if way == "framework":
            patch.setitem(sys.modules, "langchain_milvus", None)
        elif way == "query":
            patch.setattr(langchain_milvus.Milvus, "similarity_search_with_score", failing)
        else:
            patch.setattr(Sidecar, "__init__", failing)

    for way, reason in (
        ("framework", "langchain-milvus"),
        ("query", "the sidecar fell off"),
        ("constructor", "the sidecar fell off"),
    ):
        with monkeypatch.context() as patch:
            broken(patch, way)
            lookup = look_up(retrieval__sidecar__enabled=True)
            for _ in range(2):
                result = lookup.lookup(SOCKETS)
                row = recorded(lookup, result.invocation_id)
                assert json.dumps(comparable(result), sort_keys=True) == expected
                assert (row.success, row.evidence_status) == (True, "evidence")
                assert row.retrieval_details["sidecar"]["status"] == "unavailable", way
                assert reason in row.retrieval_details["sidecar"]["reason"]


def test_comparable_result_metadata(look_up: LookUp) -> None:
    """Scenario: Comparable result metadata."""
    lookup = look_up(retrieval__sidecar__enabled=True)
    result = lookup.lookup(SOCKETS)
    sidecar = recorded(lookup, result.invocation_id).retrieval_details["sidecar"]
    assert (sidecar["status"], sidecar["mode"]) == ("available", "langchain")
    first, *others = sidecar["candidates"]
    block = result.evidence_blocks[0]
    assert first["source"] == block.source == "cache/redis-clients.md"
    assert first["id"] == block.chunk_ids[0]
    assert first["title"] == "Redis clients"
    assert first["breadcrumb"] == ["Redis clients", "Mitigation"]
    assert first["category"] == "cache"
    assert 0 < len(first["preview"]) <= 200
    assert block.content.startswith(first["preview"])
    assert first["score_label"] == "similarity"
    assert first["raw_score"] == pytest.approx(1.0 - first["score"] / 2.0)
    assert [one["rank"] for one in sidecar["candidates"]] == list(range(1, 2 + len(others)))
    assert all(set(one) == set(first) for one in others)


def test_score_semantics_are_explicit(look_up: LookUp) -> None:
    """Scenario: Score semantics are explicit.

    The record of both paths says how each one's numbers are to be read; they differ for the same chunk.
    """
    lookup = look_up(retrieval__sidecar__enabled=True)
    details = recorded(lookup, lookup.lookup(SOCKETS).invocation_id).retrieval_details
    attempt = details["retrieval_trace"]["attempts"][0]
    main = {one["id"]: one for one in attempt["candidates"]}
    beside = {one["id"]: one for one in details["sidecar"]["candidates"]}
    assert (attempt["path"], details["sidecar"]["mode"]) == ("sdk", "langchain")
    assert set(main) == set(beside)
    assert len(main) == 2
    assert {one["score_label"] for one in main.values()} == {"l2_distance"}
    assert {one["score_label"] for one in beside.values()} == {"similarity"}
    for key, one in main.items():
        assert one["raw_score"] == pytest.approx(2.0 - 2.0 * beside[key]["raw_score"], abs=1e-5)
        assert one["raw_score"] != pytest.approx(beside[key]["raw_score"], abs=1e-3)
