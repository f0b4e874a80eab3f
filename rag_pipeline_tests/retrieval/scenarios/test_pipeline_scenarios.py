"""Scenarios on the pipeline as a whole: the order of its components, and the tool around it."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline.invocations.records import Invocation
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline.lookup_knowledge import alookup_knowledge, lookup_knowledge
from rag_pipeline.retrieval import pipeline, retriever
from rag_pipeline.retrieval.results import EvidenceBlock, LookupResult
from rag_pipeline.retrieval.vector_search import SearchOutcome, VectorSearch
from rag_pipeline.tool_declarations import anthropic_tool, call_tool, langchain_tool, openai_tool
from rag_pipeline_tests.retrieval.scenarios.conftest import LookUp

SOCKETS = "maxclients is reached: close idle sockets of the checkout pool"


def test_pipeline_components_execute_in_order(look_up: LookUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: Pipeline components execute in order.

    Each component is watched with what goes in and what comes out.
    """
    events: list[tuple[str, tuple[Any, ...], Any]] = []

    def watch(owner: object, name: str, component: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            value = function(*args, **options)
            events.append((component, args, value))
            return value

        monkeypatch.setattr(owner, name, watched)

    watch(retriever, "transform", "transform")
    watch(VectorSearch, "search", "retrieve")
    watch(retriever, "process", "post-process")
    watch(pipeline, "pack_context", "pack")
    watch(pipeline, "assemble", "assemble")
    watch(InvocationRecorder, "record", "record")
    result = look_up().lookup(SOCKETS)
    order = [name for (name, _, _), before in zip(events, ["", *(event[0] for event in events)], strict=False)
             if name != before]  # fmt: skip
    assert order == ["transform", "retrieve", "post-process", "pack", "assemble", "record"]
    last = {name: (args, value) for name, args, value in events}
    found: SearchOutcome = last["retrieve"][1]
    assert last["retrieve"][0][2] == last["transform"][1].text == SOCKETS
    assert {item.id for item in last["post-process"][0][1]} == {item.id for item in found.candidates}
    blocks: Sequence[EvidenceBlock] = last["pack"][0][0]
    assert tuple(blocks) == last["post-process"][1].blocks == result.evidence_blocks != ()
    assembled: LookupResult = last["assemble"][1]
    assert assembled.context_pack == last["pack"][1] == result.context_pack
    row: Invocation = last["record"][0][1]
    assert row.id == result.invocation_id
    assert [block["source"] for block in row.retrieval_details["evidence_blocks"]] == [block.source for block in blocks]
    stages = [name for name in result.retrieval_trace["duration_ms"] if name != "whole"]
    wanted = ["query_transform", "vector_search", "post_retrieval", "context_pack", "assembly"]
    assert [name for name in stages if name in wanted] == wanted


def test_tool_boundary_remains_explicit(look_up: LookUp) -> None:
    """Scenario: Tool boundary remains explicit.

    The tool takes the query and nothing else; knowledge is looked up when it is called and at no other time.
    """
    for function in (lookup_knowledge, alookup_knowledge):
        query, session = inspect.signature(function).parameters.values()
        assert (query.name, query.default) == ("query", inspect.Parameter.empty)
        assert (session.kind, session.default) == (inspect.Parameter.KEYWORD_ONLY, "")
    lookup = look_up()
    tool = langchain_tool(lookup=lookup)
    schemas = [
        openai_tool()["function"]["parameters"],
        anthropic_tool()["input_schema"],
        tool.tool_call_schema if isinstance(tool.tool_call_schema, dict) else tool.tool_call_schema.model_json_schema(),
    ]
    assert openai_tool()["function"]["name"] == anthropic_tool()["name"] == tool.name == "lookup_knowledge"
    for schema in schemas:
        assert list(schema["properties"]) == ["query"]
        assert schema["required"] == ["query"]

    database = Database(lookup.settings.database, state=lookup.settings.state)
    store = InvocationStore(database)
    before = store.count()
    assert "error" in json.loads(call_tool({"query": SOCKETS, "category": "cache"}, lookup=lookup))
    assert lookup.flush()
    assert store.count() == before
    answered = json.loads(call_tool(json.dumps({"query": SOCKETS}), lookup=lookup))
    assert lookup.flush()
    assert store.count() == before + 1
    assert answered["evidenceBlocks"] == lookup.lookup(SOCKETS).to_dict()["evidenceBlocks"] != []
    assert lookup.flush()
    database.close()
