"""The whole lookup over Milvus Lite: odd queries, sessions, budgets, settings, records, threads, event loops."""

import asyncio
import json
import threading
import uuid
from collections.abc import Callable

import pytest

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.examples import queries as examples
from rag_pipeline.invocations.records import storable_text
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline_tests.retrieval.small_base import comparable, recorded

LookUp = Callable[..., KnowledgeLookup]
ALERT = {
    "alertName": "RedisConnectionsHigh",
    "service": "cart-cache",
    "severity": "critical",
    "summary": "When maxclients is reached, close idle sockets of the checkout pool, then raise the ceiling by CONFIG.",
    "timeRange": "last 15 minutes",
}
QUERY = "maxclients reached, close idle sockets of the checkout pool"

WIRE = {
    "found", "message", "evidenceStatus", "evidenceBlocks", "contextPack", "retrievalTrace", "rerankTrace",
    "relevanceLevel", "completenessHint", "retrievalLayer", "dedupReason", "retrievedDomainsThisSession",
}  # fmt: skip


def session() -> str:
    return f"incident-{uuid.uuid4().hex}"


def test_the_wire_contract_is_camel_case_json_with_these_fields(look_up: LookUp) -> None:
    wire = look_up().lookup(QUERY).to_dict()
    assert set(wire) == WIRE
    assert json.loads(json.dumps(wire)) == wire

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for item in value.values() for key in keys(item)}
        return {key for item in value for key in keys(item)} if isinstance(value, list) else set()

    assert [key for key in keys(wire) if "_" in key] == []
    assert not {"primary", "supplement"} & keys(wire)
    block = wire["evidenceBlocks"][0]
    assert {"source", "title", "breadcrumb", "retrievalLayer", "content", "score", "hitReasons"} <= set(block)


@pytest.mark.parametrize(
    "query",
    [
        "Redis 连接数打满，怎么排查？",
        "Redis 的 maxclients reached 怎么办 idle sockets",
        "🔥🔥🔥",
        "x" * 20_000,
        "maxclients " * 2_000,
        '" or 1 == 1 or category == "',
        "\x00\x07 broken \udcc4 surrogate",
        "category == 'odd \"name\" with \\back\\slash' quotedvolume",
    ],
)
def test_any_query_is_answered_and_recorded(look_up: LookUp, query: str) -> None:
    lookup = look_up()
    result = lookup.lookup(query)
    assert result.evidence_status in ("evidence", "no_evidence")
    assert result.found is (result.evidence_status == "evidence")
    row = recorded(lookup, result.invocation_id)
    assert row.success
    kept = storable_text(query[: lookup.settings.retrieval.max_query_chars])
    assert row.input_params["query"] == kept
    assert row.input_params.get("query_chars", len(query)) == len(query)
    assert result.retrieval_trace["truncated"] is (len(query) > lookup.settings.retrieval.max_query_chars)


@pytest.mark.parametrize("query", ["", "  \n\t"])
def test_a_blank_query_searches_nothing_and_says_so(look_up: LookUp, query: str) -> None:
    lookup = look_up()
    result = lookup.lookup(query)
    assert (result.evidence_status, result.retrieval_trace["attempts"]) == ("no_evidence", [])
    assert "blank" in result.message
    assert recorded(lookup, result.invocation_id).evidence_status == "no_evidence"


@pytest.mark.parametrize("arguments", [(None,), (17,), (["query"],)])
def test_a_query_that_is_no_text_is_the_caller_s_fault(look_up: LookUp, arguments: tuple[object]) -> None:
    with pytest.raises(TypeError, match="query and session_id are text"):
        look_up().lookup(*arguments)  # type: ignore[arg-type]


def test_a_category_with_quotes_and_backslashes_filters(look_up: LookUp) -> None:
    result = look_up().lookup("a quotedvolume detaches when its label holds a quotation mark")
    (attempt,) = result.retrieval_trace["attempts"]
    assert attempt["category_filter"] == 'odd "name" with \\back\\slash'
    assert [block.source for block in result.evidence_blocks] == ["storage/quotes.md"]


def test_without_l1_there_is_no_evidence_but_hints_and_a_reason(look_up: LookUp) -> None:
    result = look_up(retrieval__l1_enabled=False).lookup("Redis clients")
    assert (result.evidence_status, result.retrieval_layer) == ("no_evidence", "L0")
    assert "Redis clients" in result.retrieval_trace["l0"]["matched_titles"]
    assert "disabled by configuration" in result.message


# Sessions


def test_a_session_gets_no_block_twice_whichever_process_asks(look_up: LookUp) -> None:
    one, other, name = look_up(), look_up(), session()
    first = one.lookup(QUERY, session_id=name)
    again = other.lookup(QUERY, session_id=name)
    assert (first.evidence_status, again.evidence_status) == ("evidence", "already_provided")
    assert again.found
    assert "already_provided" in again.dedup_reason
    assert [block.source for block in again.evidence_blocks] == [block.source for block in first.evidence_blocks]
    assert {block.content for block in again.evidence_blocks} == {f"(given before: invocation {first.invocation_id})"}
    assert first.evidence_blocks[0].content not in again.context_pack.text
    assert again.retrieval_trace["fallback_reason"] == ""
    assert one.lookup(QUERY, session_id=session()).evidence_status == "evidence"
    assert one.lookup(QUERY).evidence_status == "evidence"


def test_new_evidence_comes_beside_repeats_and_the_domains_add_up(look_up: LookUp) -> None:
    lookup, name = look_up(), session()
    first = lookup.lookup("RedisConnectionsHigh idle sockets pool", session_id=name)
    second = lookup.lookup("Promotion stalls while the standby waits for quorum", session_id=name)
    assert "database/failover.md" in {block.source for block in second.evidence_blocks if not block.given_before}
    assert set(first.retrieved_domains_this_session) < set(second.retrieved_domains_this_session)
    assert "database" in second.retrieved_domains_this_session


def test_what_the_pack_cut_is_given_again_in_full(look_up: LookUp) -> None:
    name = session()
    generous = {"retrieval__normalization__reference_threshold": 0.05}
    small = look_up(retrieval__context__unit="characters", retrieval__context__budget=600, **generous)
    cut = small.lookup(QUERY, session_id=name)
    assert cut.completeness_hint == "truncated"
    given = {item["number"] for item in cut.context_pack.included if not item["truncated"]}
    assert 0 < len(given) < len(cut.evidence_blocks)
    again = look_up(**generous).lookup(QUERY, session_id=name)
    repeats = {n for n, block in enumerate(again.evidence_blocks, 1) if block.given_before}
    assert repeats == given
    assert again.evidence_status == "evidence"


def test_a_session_database_that_does_not_answer_is_done_without(
    look_up: LookUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup, name = look_up(retrieval__session__timeout_ms=100), session()
    lookup.lookup(QUERY, session_id=name)
    monkeypatch.setattr(
        "rag_pipeline.invocations.session_memory.SessionMemory._read",
        lambda *_: threading.Event().wait(5),
    )
    result = lookup.lookup(QUERY, session_id=name)
    assert result.evidence_status == "evidence"
    assert "session memory could not be read" in result.retrieval_trace["session_failure"]


# Budgets, variants, payloads


def test_budgets_count_tokens_or_characters(look_up: LookUp) -> None:
    whole = look_up().lookup(QUERY)
    assert whole.completeness_hint in ("complete", "partial")
    few = look_up(retrieval__context__budget=60).lookup(QUERY)
    assert few.context_pack.unit == "tokens"
    assert few.context_pack.used <= 60
    assert few.completeness_hint == "truncated"
    assert [block.content for block in few.evidence_blocks] == [block.content for block in whole.evidence_blocks]


def test_a_budget_that_no_block_fits_does_not_ask_to_cite(look_up: LookUp) -> None:
    result = look_up(retrieval__context__budget=1).lookup(QUERY)
    assert (result.found, result.context_pack.text, result.completeness_hint) == (True, "", "truncated")
    assert "none fits the context budget of 1 tokens" in result.message
    assert "cite" not in result.message


def test_variants_search_the_hint_terms_too_and_plain_results_stay(look_up: LookUp) -> None:
    query = "zebras trouble everywhere RedisConnectionsHigh unicorn"
    plain = look_up(retrieval__l1_enabled=True).lookup(query)
    varied = look_up(retrieval__query_variants=True).lookup(query)
    assert varied.retrieval_trace["variants"] == ["RedisConnectionsHigh"]
    assert plain.retrieval_trace["variants"] == []
    best = varied.retrieval_trace["attempts"][0]["candidates"][0]
    assert best["score"] <= plain.retrieval_trace["attempts"][0]["candidates"][0]["score"]


def test_an_alert_is_looked_up_with_its_recommended_query(look_up: LookUp) -> None:
    lookup = look_up()
    result = lookup.lookup_for_alert(ALERT)
    row = recorded(lookup, result.invocation_id)
    assert row.tool_name == "lookup_knowledge"
    assert row.input_params["query"].startswith("RedisConnectionsHigh (cart-cache, critical)")
    assert row.input_params["payload"]["alert_name"] == "RedisConnectionsHigh"
    assert result.evidence_blocks[0].source == "cache/redis-clients.md"
    with pytest.raises(ConfigurationError, match="no field to search for"):
        lookup.lookup_for_alert({"severity": "critical"})


# Records


def test_a_record_holds_settings_and_state_but_no_secret_and_no_content(look_up: LookUp) -> None:
    lookup = look_up(invocations__redact=["checkout-[a-z0-9]+"])
    query = f"{QUERY} on checkout-7d9f password=hunter2 Authorization: Bearer abcdef0123456789"
    result = lookup.lookup(query, session_id=session())
    row = recorded(lookup, result.invocation_id)
    text = json.dumps([row.input_params, row.retrieval_details, row.output_preview], ensure_ascii=False)
    for secret in ("hunter2", "abcdef0123456789", "checkout-7d9f"):
        assert secret not in text
    for block in result.evidence_blocks:
        assert block.content not in json.dumps(row.retrieval_details, ensure_ascii=False)
    assert row.retrieval_details["settings"]["candidates"] == lookup.settings.retrieval.candidates
    assert "milvus" not in row.retrieval_details["settings"]
    assert row.duration_ms >= sum(row.stage_ms.values()) * 0.5 > 0
    assert {"resolve", "query_transform", "embed", "vector_search", "post_retrieval", "context_pack"} <= set(
        row.stage_ms
    )


def test_nothing_is_recorded_when_that_is_off(look_up: LookUp, small_index: Callable[..., object]) -> None:
    lookup = look_up(invocations__enabled=False)
    result = lookup.lookup(QUERY)
    assert result.found
    assert lookup.flush()
    with pytest.raises(AssertionError, match="not in tool_invocation"):
        recorded(lookup, result.invocation_id)


# Callers


def test_threads_share_a_lookup_and_get_equal_answers(look_up: LookUp) -> None:
    lookup = look_up()
    expected = comparable(lookup.lookup(QUERY))
    answers: list[object] = []
    threads = [threading.Thread(target=lambda: answers.append(comparable(lookup.lookup(QUERY)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 8


def test_the_module_s_functions_share_one_lookup_and_work_in_an_event_loop(
    look_up: LookUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rag_pipeline import lookup_knowledge as module

    made: list[KnowledgeLookup] = []

    def build() -> KnowledgeLookup:
        made.append(look_up())
        return made[-1]

    monkeypatch.setattr(module, "KnowledgeLookup", build)
    monkeypatch.setattr(module, "_shared", None)

    async def ask() -> list[module.LookupResult]:
        return list(await asyncio.gather(*(module.alookup_knowledge(QUERY) for _ in range(4))))

    results = [module.lookup_knowledge(QUERY), *asyncio.run(ask())]
    assert len(made) == 1
    assert {tuple(block.source for block in result.evidence_blocks) for result in results} == {
        tuple(block.source for block in results[0].evidence_blocks)
    }
    assert module.lookup_for_alert(ALERT).found


@pytest.mark.parametrize("name", examples.QUERIES)
def test_the_example_queries_are_answered(look_up: LookUp, name: str) -> None:
    result = examples.run(look_up(), name)
    assert result.evidence_status in ("evidence", "no_evidence")
    assert json.loads(json.dumps(result.to_dict()))["retrievalTrace"]["unavailable"] == ""
