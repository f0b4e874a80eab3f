"""Cleaning of queries, alert payloads, the recommended query of an alert and what of it is embedded, variants."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.records import Hints
from rag_pipeline.retrieval.l0_hints import HintMatcher
from rag_pipeline.retrieval.query_transform import (
    MAX_FIELD_CHARS,
    MAX_NAME_CHARS,
    MAX_RECOMMENDED_CHARS,
    AlertPayload,
    TransformedQuery,
    build_knowledge_retrieval_query,
    transform,
)

MATCHER = HintMatcher(
    [
        ("redis clients", "Redis clients", "title", "cache/clients.md", "Redis clients", "cache"),
        ("maxclients", "maxclients", "keyword", "cache/clients.md", "Redis clients", "cache"),
        ("max_connections", "max_connections", "entity", "database/mysql.md", "MySQL", "database"),
        ("cart-cache", "cart-cache", "service", "cache/clients.md", "Redis clients", "cache"),
    ]
)
ALERT: Mapping[str, Any] = {
    "alertName": "RedisConnectionsHigh",
    "service": "cart-cache",
    "severity": "critical",
    "description": "Connected clients are above 9000.",
    "timeRange": "last 15 minutes",
    "userRequest": "How do I fix it?",
}


def cleaned(query: str, *, max_chars: int = 1000) -> TransformedQuery:
    return transform(query, matcher=None, max_chars=max_chars)


def embedded(**fields: object) -> str:
    """What is embedded for an alert whose recommended query was asked."""
    alert = AlertPayload.parse(fields)
    return transform(build_knowledge_retrieval_query(alert), matcher=None, max_chars=1000, payload=alert).text


# Cleaning


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("  Redis is down \n", "Redis is down"),
        ("a\tb\r\n\r\nc\x00\x1bd", "a b c d"),
        ("a\u2028b\u2029c\x85d", "a b c d"),
        ("Redis  内存", "Redis  内存"),
        ("ＲＥＤＩＳ", "ＲＥＤＩＳ"),
        ("fire 🔥 now", "fire 🔥 now"),
        ("half \ud83d of a pair", "half ? of a pair"),
        ("", ""),
        (" \x00\n ", ""),
    ],
)
def test_text_loses_control_characters_and_half_pairs_and_keeps_case_and_width(query: str, text: str) -> None:
    found = cleaned(query)
    assert (found.raw, found.text, found.truncated) == (query, text, False)
    assert found.text.encode().decode() == text


@pytest.mark.parametrize(
    ("query", "text", "truncated"),
    [
        ("x" * 10, "x" * 10, False),
        ("x" * 11, "x" * 10, True),
        ("  " + "x" * 10 + "  ", "x" * 10, False),
        ("123456789 1", "123456789", True),
        ("🔥" * 11, "🔥" * 10, True),
    ],
)
def test_a_long_text_is_cut_and_says_so(query: str, text: str, truncated: bool) -> None:
    found = cleaned(query, max_chars=10)
    assert (found.text, found.truncated, found.trace()["truncated"]) == (text, truncated, truncated)


@given(st.text(st.characters(), max_size=60), st.integers(1, 30))
def test_any_text_becomes_one_that_can_be_stored(query: str, max_chars: int) -> None:
    found = cleaned(query, max_chars=max_chars)
    assert len(found.text) <= max_chars
    assert found.text == found.text.strip()
    assert found.text.encode("utf-8").decode("utf-8") == found.text
    assert not any(character in found.text for character in "\x00\n\r\t\x1b\x7f\u2028")
    assert cleaned(found.text, max_chars=max_chars).text == found.text


def test_hints_are_matched_on_the_normalised_text_that_is_left() -> None:
    found = transform("ＲＥＤＩＳ\nClients and maxclients", matcher=MATCHER, max_chars=15)
    assert (found.text, found.matching) == ("ＲＥＤＩＳ Clients a", "redis clients a")
    assert found.hints == MATCHER.match("redis clients")
    assert cleaned("Redis clients").hints == Hints()


def test_the_trace_has_the_hints_under_l0() -> None:
    found = transform("maxclients on cart-cache", matcher=MATCHER, max_chars=100)
    assert found.trace() == {
        "query": "maxclients on cart-cache",
        "truncated": False,
        "l0": {
            "matched_titles": ["Redis clients"],
            "matched_keywords": ["maxclients"],
            "domains": ["cache"],
            "entities": ["cart-cache"],
        },
        "variants": [],
    }


# Variants


@pytest.mark.parametrize(
    ("query", "variants"),
    [
        ("why is MAXCLIENTS of Redis clients reached", ("maxclients Redis clients",)),
        ("maxclients maxclients", ("maxclients",)),
        ("ＭＡＸＣＬＩＥＮＴＳ", ()),
        ("redis   clients", ()),
        ("nothing known", ()),
        ("", ()),
    ],
)
def test_a_variant_is_the_terms_alone_where_they_say_something_else(query: str, variants: tuple[str, ...]) -> None:
    assert transform(query, matcher=MATCHER, max_chars=100, variants=True).variants == variants
    assert transform(query, matcher=MATCHER, max_chars=100).variants == ()
    assert transform(query, matcher=None, max_chars=100, variants=True).variants == ()


def test_a_variant_has_a_term_of_several_spellings_once() -> None:
    spelled = [("redis", name, kind, "a.md", "", "") for name, kind in (("Redis", "title"), ("redis", "keyword"))]
    found = transform("is redis down", matcher=HintMatcher(spelled), max_chars=100, variants=True)
    assert found.variants == ("redis",)


# Payloads


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (
            ALERT,
            AlertPayload(
                "RedisConnectionsHigh", "cart-cache", "critical", "Connected clients are above 9000.",
                "last 15 minutes", "How do I fix it?",
            ),
        ),
        (
            {"alert_name": "A", "time_range": "1h", "user_request": "why"},
            AlertPayload(alert_name="A", time_range="1h", user_request="why"),
        ),
        ({"alertName": "Camel", "alert_name": "snake"}, AlertPayload(alert_name="Camel")),
        ({"alertName": None, "alert_name": "snake"}, AlertPayload(alert_name="snake")),
        ({"alertName": " \n", "alert_name": "snake"}, AlertPayload(alert_name="snake")),
        ({"service": 7, "severity": 1.5, "description": True}, AlertPayload("", "7", "1.5", "True")),
        ({"service": "api", "labels": ["not", "read"], 5: "x"}, AlertPayload(service="api")),
        ({"service": "a\x00\nb"}, AlertPayload(service="a b")),
        ({"service": "a", "timeRange": {"start": "9:00", "end": "9:15"}}, AlertPayload("", "a", "", "", "9:00 - 9:15")),
        ({"service": "a", "timeRange": {"start": 1700000000}}, AlertPayload("", "a", "", "", "1700000000")),
        ({"service": "a", "time_range": {"end": "10:15", "zone": []}}, AlertPayload("", "a", "", "", "10:15")),
        ({"service": "a", "timeRange": {}}, AlertPayload(service="a")),
    ],
)  # fmt: skip
def test_payloads_are_read_in_either_spelling(payload: Mapping[str, Any], expected: AlertPayload) -> None:
    assert AlertPayload.parse(payload) == expected


@pytest.mark.parametrize(
    ("summary", "description", "merged"),
    [
        ("Pods restart.", "", "Pods restart."),
        ("", "Exit code 137.", "Exit code 137."),
        ("Pods restart.", "Exit code 137.", "Pods restart. Exit code 137."),
        ("Pods restart.", "Pods restart.", "Pods restart."),
        ("PODS RESTART!", "The pods restart. Exit code 137.", "The pods restart. Exit code 137."),
        ("Pods restart. Node is lost.", "Pods restart. Exit code 137.", "Node is lost. Pods restart. Exit code 137."),
        ("", "Down. Down. Down again.", "Down. Down again."),
        ("磁盘写满。", "节点磁盘写满。请清理。", "节点磁盘写满。 请清理。"),
        ("内存不足。", "节点磁盘写满。", "内存不足。 节点磁盘写满。"),
    ],
)
def test_the_summary_joins_the_description_without_repetition(summary: str, description: str, merged: str) -> None:
    assert AlertPayload.parse({"summary": summary, "description": description}).description == merged


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "The alert payload is of type NoneType. An alert payload is a mapping with"),
        ("RedisDown", "The alert payload is of type str. "),
        ([("alertName", "A")], "The alert payload is of type list. "),
        ({"alertName": ["A"]}, "The alert payload's 'alertName' is of type list, not text. "),
        ({"alert_name": {"x": 1}}, "The alert payload's 'alert_name' is of type dict, not text. "),
        ({"alertName": "A", "summary": b"x"}, "The alert payload's 'summary' is of type bytes, not text. "),
        ({"alertName": "A", "service": {"name": "x"}}, "The alert payload's 'service' is of type dict, not text. "),
        ({"alertName": "A", "timeRange": ["1h"]}, "The alert payload's 'timeRange' is of type list, not text. "),
        (
            {"alertName": "A", "timeRange": {"start": []}},
            "The alert payload's 'timeRange.start' is of type list, not text. ",
        ),
        ({}, "The alert payload has no field to search for. "),
        ({"severity": "high", "timeRange": "1h", "alertName": " "}, "The alert payload has no field to search for. "),
    ],
)
def test_a_wrong_payload_is_refused_with_an_example(payload: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        AlertPayload.parse(payload)
    assert str(error.value).startswith(message)
    assert '{"alertName": "RedisEvictionsHigh"' in str(error.value)


# The recommended query


@pytest.mark.parametrize(
    ("payload", "query"),
    [
        (
            ALERT,
            "RedisConnectionsHigh (cart-cache, critical): Connected clients are above 9000. How do I fix it? "
            "last 15 minutes",
        ),
        ({"alertName": "A"}, "A"),
        ({"alertName": "A", "service": "s"}, "A (s)"),
        ({"alertName": "A", "severity": "high"}, "A (high)"),
        ({"service": "s", "severity": "high", "description": "Slow."}, "s (high): Slow."),
        ({"alertName": "api", "service": "api", "severity": "high"}, "api (high)"),
        ({"description": "Slow."}, "Slow."),
        ({"description": "Slow.", "severity": "high"}, "high: Slow."),
        ({"userRequest": "Why is it slow?", "description": "It is slow."}, "It is slow. Why is it slow?"),
        # What an earlier field has said already is said once.
        ({"alertName": "Disk full", "description": "disk full. Clean up."}, "Disk full: Clean up."),
        ({"alertName": "A", "description": "Slow.", "userRequest": "slow!"}, "A: Slow."),
        ({"alertName": "A", "description": "s.", "service": "s"}, "A (s)"),
    ],
)
def test_the_recommended_query_is_name_service_severity_description_request_time(
    payload: Mapping[str, Any], query: str
) -> None:
    assert build_knowledge_retrieval_query(payload) == query
    assert build_knowledge_retrieval_query(AlertPayload.parse(payload)) == query


def test_the_order_of_the_fields_changes_nothing() -> None:
    assert build_knowledge_retrieval_query(dict(reversed(ALERT.items()))) == build_knowledge_retrieval_query(ALERT)


def test_the_description_is_cut_first() -> None:
    query = build_knowledge_retrieval_query({**ALERT, "description": "word " * 1000})
    assert MAX_RECOMMENDED_CHARS - 5 <= len(query) <= MAX_RECOMMENDED_CHARS
    assert query.startswith("RedisConnectionsHigh (cart-cache, critical): word word ")
    assert query.endswith(" wo How do I fix it? last 15 minutes")


def test_a_long_request_or_time_range_leaves_room_for_the_description() -> None:
    query = build_knowledge_retrieval_query({**ALERT, "userRequest": "why " * 300, "timeRange": "t" * 3})
    assert query.startswith("RedisConnectionsHigh (cart-cache, critical): Connected clients are above 9000. why why ")
    assert query.count("why") == MAX_FIELD_CHARS / 4
    assert query.endswith(" why ttt")


def test_all_fields_too_long_still_give_a_bounded_query() -> None:
    payload = {
        "alertName": "N" * 500, "service": "s" * 500, "severity": "v" * 500, "description": "d " * 5000,
        "userRequest": "u" * 5000, "timeRange": "t" * 5000,
    }  # fmt: skip
    query = build_knowledge_retrieval_query(payload)
    assert query.startswith(f"{'N' * MAX_NAME_CHARS} ({'s' * MAX_NAME_CHARS}, {'v' * MAX_NAME_CHARS}): u")
    assert len(query) == MAX_RECOMMENDED_CHARS


fields_of_alerts = st.text(st.sampled_from("ab .!?。\n名"), max_size=30) | st.builds(
    lambda unit, times: unit * times, st.sampled_from(("a", "b c", "名。", "x. ")), st.integers(1, 1200)
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys((*ALERT, "summary"), fields_of_alerts)))
def test_name_and_service_stay_in_front_and_the_length_is_bounded(payload: dict[str, str]) -> None:
    try:
        alert = AlertPayload.parse(payload)
    except ConfigurationError:
        return
    query = build_knowledge_retrieval_query(payload)
    assert query == build_knowledge_retrieval_query(dict(reversed(payload.items())))
    assert len(query) <= MAX_RECOMMENDED_CHARS
    name, service = (part[:MAX_NAME_CHARS].rstrip() for part in (alert.alert_name, alert.service))
    assert query.startswith(name or service)
    if name and service and name != service:
        assert query.startswith(f"{name} ({service}")
    text = transform(query, matcher=None, max_chars=MAX_RECOMMENDED_CHARS, payload=alert).text
    assert len(text) <= MAX_RECOMMENDED_CHARS
    assert text.startswith(name or service)


# What is embedded


@pytest.mark.parametrize(
    "request_",
    [
        "How do I fix it?", "please help", "What is the root cause of this alert?", "Please investigate ASAP!",
        "What should we do next?", "怎么处理？", "请帮我排查一下这个告警的根因", "如何解决", "please 处理 it", "??",
    ],
)  # fmt: skip
def test_requests_that_only_ask_for_help_and_time_ranges_are_not_embedded(request_: str) -> None:
    text = embedded(**{**ALERT, "userRequest": request_})
    assert text == "RedisConnectionsHigh (cart-cache, critical): Connected clients are above 9000."


@pytest.mark.parametrize(
    "request_",
    [
        "How do I raise maxclients?", "Is it safe to restart the pod?", "why does CONFIG SET fail", "怎么清理磁盘",
        "exit code 137?", "Comment redémarrer ?",
    ],
)  # fmt: skip
def test_specific_requests_are_embedded(request_: str) -> None:
    text = embedded(**{**ALERT, "userRequest": request_})
    assert text == f"RedisConnectionsHigh (cart-cache, critical): Connected clients are above 9000. {request_}"


def test_the_recommended_query_stays_what_was_asked() -> None:
    alert = AlertPayload.parse(ALERT)
    query = build_knowledge_retrieval_query(alert)
    found = transform(query, matcher=MATCHER, max_chars=1000, payload=alert)
    assert (found.raw, found.payload) == (query, alert)
    assert "last 15 minutes" not in found.text
    assert found.hints.entities == ("cart-cache",)


def test_a_query_of_the_agents_own_is_embedded_as_it_is() -> None:
    alert = AlertPayload.parse(ALERT)
    own = "RedisConnectionsHigh cart-cache: how do I fix it? last 15 minutes"
    assert transform(own, matcher=None, max_chars=1000, payload=alert).text == own
    assert cleaned(build_knowledge_retrieval_query(alert)).text == build_knowledge_retrieval_query(alert)
