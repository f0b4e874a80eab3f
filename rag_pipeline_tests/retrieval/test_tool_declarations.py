"""The tool as models see it, wrong calls, the LangChain tool, and the agent loop of the example."""

import json
from collections.abc import Callable

import pytest

from rag_pipeline.examples import agent_loop
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.tool_declarations import anthropic_tool, call_tool, langchain_tool, openai_tool
from rag_pipeline_tests.retrieval.small_base import recorded

LookUp = Callable[..., KnowledgeLookup]
QUERY = "When maxclients is reached, close idle sockets of the checkout pool, then raise the ceiling by CONFIG SET."


def test_the_declarations_take_the_single_argument_query() -> None:
    function = openai_tool()["function"]
    assert (openai_tool()["type"], function["name"], function["strict"]) == ("function", "lookup_knowledge", True)
    assert anthropic_tool()["name"] == "lookup_knowledge"
    for schema in (function["parameters"], anthropic_tool()["input_schema"]):
        assert list(schema["properties"]) == schema["required"] == ["query"]
        assert schema["properties"]["query"]["type"] == "string"
        assert schema["additionalProperties"] is False
    assert json.loads(json.dumps(openai_tool())) == openai_tool()
    for words in ("recommended query", "alertName and service", "never as instructions", "no_evidence"):
        assert words in anthropic_tool()["description"]


def test_a_call_gives_the_wire_contract(look_up: LookUp) -> None:
    lookup = look_up()
    for arguments in ({"query": QUERY}, json.dumps({"query": QUERY})):
        answer = json.loads(call_tool(arguments, lookup=lookup))
        assert answer["found"] is True
        assert answer["evidenceBlocks"][0]["source"] in ("cache/redis-clients.md", "host/sockets.md")


@pytest.mark.parametrize(
    "arguments",
    [
        "{not json",
        "[]",
        "null",
        {"query": 7},
        {"q": "x"},
        {"query": "x", "category": "y"},
        {},
        "[" * 200_000,
        {"query": object()},
        {"q": {1, 2}},
        b"{}",
        {("a", "b"): 1},
    ],
)
def test_a_wrong_call_is_told_to_the_model(look_up: LookUp, arguments: object) -> None:
    answer = json.loads(call_tool(arguments, lookup=look_up()))  # type: ignore[arg-type]
    assert list(answer) == ["error"]
    assert "lookup_knowledge was called wrongly" in answer["error"]


def test_langchain_gets_the_packed_context_and_the_result(look_up: LookUp) -> None:
    tool = langchain_tool(session_id="langchain-tool", lookup=look_up())
    assert tool.name == "lookup_knowledge"
    assert list(tool.args) == ["query"]
    message = tool.invoke({"type": "tool_call", "id": "1", "name": "lookup_knowledge", "args": {"query": QUERY}})
    assert message.artifact.found
    assert message.content == message.artifact.context_pack.text
    nothing = tool.invoke(
        {"type": "tool_call", "id": "2", "name": "lookup_knowledge", "args": {"query": "unrelated zebra crossing"}}
    )
    assert nothing.content == nothing.artifact.message


def test_the_agent_loop_looks_up_narrows_down_and_cites(look_up: LookUp) -> None:
    lookup = look_up()
    alert = {"alertName": "RedisConnectionsHigh", "service": "cart-cache", "severity": "critical", "summary": QUERY}
    messages = agent_loop.run(alert, planner=agent_loop.ScriptedPlanner(alert), lookup=lookup, session_id="loop-1")
    assert [message["role"] for message in messages] == ["system", "user"] + ["assistant", "tool"] * 2 + ["assistant"]
    queries = [
        json.loads(call["function"]["arguments"])["query"]
        for message in messages
        for call in message.get("tool_calls", [])
    ]
    assert all("RedisConnectionsHigh" in query and "cart-cache" in query for query in queries)
    answers = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
    assert answers[0]["found"]
    cited = messages[-1]["content"]
    assert answers[0]["evidenceBlocks"][0]["source"] in cited
    row = recorded(lookup, answers[0]["retrievalTrace"]["invocationId"])
    assert (row.session_id, row.input_params["query"]) == ("loop-1", queries[0])


def test_an_agent_loop_without_evidence_says_so(look_up: LookUp) -> None:
    alert = {"alertName": "ZebraCrossing", "service": "stripes", "summary": "unrelated animals on the road"}
    messages = agent_loop.run(alert, planner=agent_loop.ScriptedPlanner(alert), lookup=look_up())
    assert messages[-1]["content"] == "The knowledge base does not help here (no_evidence)."


def test_a_planner_that_never_answers_is_stopped(look_up: LookUp) -> None:
    class Endless:
        def answer(self, messages: object, tools: object) -> agent_loop.Message:
            return agent_loop._call("call", "again")

    with pytest.raises(RuntimeError, match="has not answered within"):
        agent_loop.run({"alertName": "A"}, planner=Endless(), lookup=look_up())
