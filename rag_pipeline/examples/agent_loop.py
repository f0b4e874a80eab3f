"""An agent loop around ``lookup_knowledge`` without any model provider: a scripted planner takes the model's place.

    python -m rag_pipeline.examples.agent_loop [ALERT.json]

The planner sees what a model would see, the tool's declaration and the messages so far, and answers as a model would:
with a tool call or with a final text. To use a real model, put its client in place of `ScriptedPlanner`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rag_pipeline.lookup_knowledge import KnowledgeLookup, build_knowledge_retrieval_query
from rag_pipeline.tool_declarations import NAME, call_tool, openai_tool

Message = dict[str, Any]
_MOST_TURNS = 6

ALERT = {
    "alertName": "KubePodCrashLooping",
    "service": "checkout",
    "severity": "critical",
    "description": "Pod checkout-7d9f of example.com restarts again and again, exit code 137.",
}


class Planner(Protocol):
    """What takes the place of a model."""

    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """The next message: with ``tool_calls``, or with ``content`` alone when done."""
        ...


class ScriptedPlanner:
    """Looks the recommended query up, then a narrower one that keeps the alert's name and service, then answers."""

    def __init__(self, alert: Mapping[str, Any]) -> None:
        self._alert = alert

    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """See `Planner`."""
        assert [tool["function"]["name"] for tool in tools] == [NAME]
        answers = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
        if not answers:
            return _call("call-1", build_knowledge_retrieval_query(self._alert))
        if len(answers) == 1 and answers[0]["found"]:
            return _call("call-2", f"{self._alert['alertName']} {self._alert['service']} mitigation steps")
        return {"role": "assistant", "content": _conclusion(answers)}


def run(alert: Mapping[str, Any], *, planner: Planner, lookup: KnowledgeLookup, session_id: str = "") -> list[Message]:
    """Run the loop until the planner answers without a tool call.

    Returns:
        All messages, the planner's last answer at the end.

    Raises:
        RuntimeError: The planner has not finished within a few turns.
    """
    messages: list[Message] = [
        {"role": "system", "content": "You diagnose alerts. Use the tool for knowledge, and cite what you use."},
        {
            "role": "user",
            "content": f"{json.dumps(alert)}\nRecommended query: {build_knowledge_retrieval_query(alert)}",
        },
    ]
    for _ in range(_MOST_TURNS):
        answer = planner.answer(messages, [openai_tool()])
        messages.append(answer)
        if not answer.get("tool_calls"):
            return messages
        for call in answer["tool_calls"]:
            content = call_tool(call["function"]["arguments"], session_id=session_id, lookup=lookup)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    raise RuntimeError(f"The planner has not answered within {_MOST_TURNS} turns.")


def _call(call_id: str, query: str) -> Message:
    arguments = json.dumps({"query": query}, ensure_ascii=False)
    function = {"name": NAME, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def _conclusion(answers: Sequence[Mapping[str, Any]]) -> str:
    blocks = [block for answer in answers for block in answer["evidenceBlocks"] if not block["givenBefore"]]
    if not blocks:
        return f"The knowledge base does not help here ({answers[-1]['evidenceStatus']})."
    cited = "\n".join(
        f"- {' > '.join(block['breadcrumb']) or block['title']} ({block['source']}:{block['lineStart']})"
        for block in blocks
    )
    return f"What the knowledge base says about this:\n{cited}"


def main() -> None:
    """Run the loop on an alert file, or on the alert in this module, and print the messages."""
    alert = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")) if len(sys.argv) > 1 else ALERT
    with KnowledgeLookup() as lookup:
        for message in run(alert, planner=ScriptedPlanner(alert), lookup=lookup, session_id="example"):
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
            shown = message["content"] or f"calls {NAME} {', '.join(calls)}"
            print(f"{message['role']}: {shown if len(shown) <= 600 else shown[:600] + ' …'}\n")


if __name__ == "__main__":
    main()
