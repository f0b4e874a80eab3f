"""A replay gives the recorded answer on the recorded version, and says so when it cannot or does not."""

import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from rag_pipeline.errors import ConfigurationError, StoreUnavailableError
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.records import Invocation
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.replay import replay
from rag_pipeline_tests.retrieval.small_base import recorded

LookUp = Callable[..., KnowledgeLookup]
QUERY = "When maxclients is reached, close idle sockets of the checkout pool"


def count(lookup: KnowledgeLookup) -> int:
    database = Database(lookup.settings.database, state=lookup.settings.state)
    try:
        return InvocationStore(database).count()
    finally:
        database.close()


def asked(lookup: KnowledgeLookup, query: str = QUERY, *, session_id: str = "") -> Invocation:
    return recorded(lookup, lookup.lookup(query, session_id=session_id).invocation_id)


def test_a_replay_is_the_same_and_leaves_no_trace(look_up: LookUp) -> None:
    lookup = look_up()
    row = asked(lookup)
    before = count(lookup)
    for _ in range(2):
        done = replay(lookup.settings, row)
        assert (done.same, done.differences) == (True, ())
        assert done.result.retrieval_trace["collection"] == row.retrieval_details["retrieval_trace"]["collection"]
    assert count(lookup) == before


def test_a_replay_starts_from_the_recorded_session_and_settings(look_up: LookUp) -> None:
    lookup, session = look_up(retrieval__max_blocks=1), f"replay-{uuid.uuid4().hex}"
    first, second = asked(lookup, session_id=session), asked(lookup, session_id=session)
    assert (first.evidence_status, second.evidence_status) == ("evidence", "already_provided")
    other = look_up(retrieval__max_blocks=5, retrieval__context__budget=50).settings
    for row in (first, second, first):
        done = replay(other, row)
        assert done.same
        assert done.result.evidence_status == row.evidence_status


def test_an_alert_is_replayed_as_an_alert(look_up: LookUp) -> None:
    lookup = look_up()
    result = lookup.lookup_for_alert({"alertName": "RedisConnectionsHigh", "description": QUERY, "userRequest": "help"})
    assert replay(lookup.settings, recorded(lookup, result.invocation_id)).same


def test_a_difference_is_named(look_up: LookUp) -> None:
    lookup = look_up()
    row = asked(lookup)
    details = {**row.retrieval_details, "result_digest": "0" * 64}
    done = replay(lookup.settings, replace(row, retrieval_details=details, relevance_level="low"))
    assert not done.same
    assert done.differences == (f"relevance level: low then, {row.relevance_level} now",)


def test_a_version_that_is_gone_cannot_be_replayed(look_up: LookUp) -> None:
    lookup = look_up()
    row = asked(lookup)
    trace = {**row.retrieval_details["retrieval_trace"], "collection": "knowledge__20200101T000000000000Z_000000000000"}
    with pytest.raises(StoreUnavailableError, match=r"is not in Milvus Lite .* any more"):
        replay(lookup.settings, replace(row, retrieval_details={**row.retrieval_details, "retrieval_trace": trace}))


def test_what_was_redacted_cut_or_recorded_otherwise_cannot_be_replayed(look_up: LookUp) -> None:
    lookup = look_up(retrieval__max_query_chars=40)
    with pytest.raises(ConfigurationError, match="was redacted"):
        replay(lookup.settings, asked(look_up(), f"{QUERY} password=hunter2"))
    with pytest.raises(ConfigurationError, match="first 40 of 67 characters"):
        replay(lookup.settings, asked(lookup))
    row = asked(look_up())
    with pytest.raises(ConfigurationError, match="another version of this program"):
        replay(lookup.settings, replace(row, retrieval_details={"retrieval_trace": {"collection": "c"}}))


def test_a_blank_query_is_replayed_too(look_up: LookUp) -> None:
    lookup = look_up()
    assert replay(lookup.settings, asked(lookup, "  ")).same


def test_a_record_that_cannot_be_read_is_not_replayed(look_up: LookUp) -> None:
    lookup = look_up()
    row = asked(lookup)
    for name in ("retrieval_details", "input_params"):
        with pytest.raises(ConfigurationError, match=f"holds as {name} of invocation {row.id} cannot be read"):
            replay(lookup.settings, replace(row, **{name: {}, "unreadable": (name,)}))


@pytest.mark.parametrize(
    ("name", "value"), [("session_state", "x"), ("settings", [1]), ("evidence_blocks", [1]), ("evidence_blocks", 5)]
)
def test_a_record_of_another_shape_is_not_replayed(name: str, value: object, look_up: LookUp) -> None:
    lookup = look_up()
    row = asked(lookup)
    with pytest.raises(ConfigurationError, match="cannot be run again"):
        replay(lookup.settings, replace(row, retrieval_details={**row.retrieval_details, name: value}))
