"""Writing and reading invocations; the same over all databases is in `contract/test_databases.py`."""

import sqlite3
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.records import Amendment, Invocation
from rag_pipeline.invocations.redaction import Redactor
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline_tests.invocations.samples import START, invocation, series
from rag_pipeline_tests.invocations.test_records import JSON, TEXTS


def test_what_was_written_is_read_field_by_field(store: InvocationStore) -> None:
    written = invocation()
    assert store.insert([written]) == {}
    assert store.get(written.id) == written


def test_the_same_id_again_keeps_the_first_row(store: InvocationStore) -> None:
    first = invocation()
    store.insert([first, first])
    store.insert([invocation(id=first.id, output_preview="another"), invocation()])
    assert store.count() == 2
    assert store.get(first.id) == first


def test_inserting_nothing_is_no_error(store: InvocationStore) -> None:
    assert store.insert([]) == {}
    assert store.count() == 0
    assert store.list() == ()


def test_a_beginning_of_an_id_finds_the_only_one(store: InvocationStore) -> None:
    one = invocation(id="0123456789abcdef" * 2)
    other = invocation(id="0123457" + "0" * 25)
    store.insert([one, other])
    assert store.get("0123456") == one
    assert store.get(" 0123457-0000 ") == other
    assert store.get("0123458") is None
    with pytest.raises(ConfigurationError, match=r"'012345', .* among them. Give more than 6 characters"):
        store.get("012345")
    with pytest.raises(ConfigurationError, match="at least 6"):
        store.get("01234")


@pytest.mark.parametrize("wanted", ["%%%%%%", "______", "' OR 1=1 --", "zzzzzz", "0" * 33, "012345\x00"])
def test_what_is_no_id_finds_nothing(wanted: str, store: InvocationStore) -> None:
    store.insert([invocation()])
    assert store.get(wanted) is None


def test_the_list_is_newest_first_and_equal_times_go_by_id(store: InvocationStore) -> None:
    ties = [invocation(id=f"{number:032x}") for number in (3, 1, 2)]
    later = invocation(id="0" * 32, created_at=START + timedelta(milliseconds=1))
    store.insert([*ties, later])
    assert [row.id[-1] for row in store.list()] == ["0", "3", "2", "1"]
    assert [row.id[-1] for row in store.list(limit=2)] == ["0", "3"]
    assert store.list(limit=0) == ()
    assert [row.id[-1] for row in store.list(before=later.created_at)] == ["3", "2", "1"]


def test_the_list_of_a_session_holds_no_other(store: InvocationStore) -> None:
    store.insert([invocation(session_id=name) for name in ("a", "A", "b", "", "a")])
    assert [row.session_id for row in store.list(session_id="a")] == ["a", "a"]
    assert len(store.list()) == 5


@pytest.mark.parametrize("name", ["token=hunter2", "EMP-4711", "x" * 300, "a\x00b", "a\ud800", " plain ", "a"])
def test_a_session_is_found_by_the_id_that_its_caller_knows(name: str, database: Database) -> None:
    patterns = [r"EMP-\d+"]
    store = InvocationStore(database, patterns=patterns)
    stored = Redactor(patterns).session_id(name)
    store.insert([invocation(session_id=stored), invocation(session_id="another")])
    assert [row.session_id for row in store.list(session_id=name)] == [stored]
    assert [row.session_id for row in store.list(session_id=stored)] == [stored]


@pytest.mark.parametrize(
    ("column", "stored"),
    [
        *(("retrieval_details", value) for value in ("{not json", "[1]", "null", "5", b"\xff", "[" * 100_000)),
        ("input_params", "{not json"),
        ("stage_ms", "[]"),
        ("created_at", "yesterday"),
        ("duration_ms", "long"),
        ("l0_match_count", "many"),
        ("tool_name", b"\xff"),
    ],
)
def test_a_row_that_cannot_be_read_is_given_without_what_cannot_and_hides_no_other(
    column: str, stored: object, store: InvocationStore, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = series(3)
    bad = rows[1].id
    store.insert(rows)
    with sqlite3.connect(state / "invocations.db") as connection:
        connection.execute(f"UPDATE tool_invocation SET {column} = ? WHERE id = ?", (stored, bad))
    connection.close()
    found = {row.id: row for row in store.list()}
    assert {key: row for key, row in found.items() if key != bad} == {row.id: row for row in rows if row.id != bad}
    row = store.get(bad)
    assert row == found[bad]
    assert row.unreadable == (column,)
    empty = Invocation(id="", tool_name="", created_at=datetime(1970, 1, 1, tzinfo=UTC))
    assert replace(row, unreadable=()) == replace(rows[1], **{column: getattr(empty, column)})
    assert any(bad in message and column in message for message in caplog.messages)
    assert store.amend([Amendment(bad, {"a": 1}), Amendment(rows[0].id, {"a": 1})]) == {}
    assert store.get(rows[0].id).retrieval_details["a"] == 1
    assert column != "retrieval_details" or store.get(bad) == row


def test_a_text_that_is_no_utf_8_hides_no_other_row(store: InvocationStore, state: Path) -> None:
    rows = series(2)
    store.insert(rows)
    with sqlite3.connect(state / "invocations.db") as connection:
        connection.execute(
            "UPDATE tool_invocation SET output_preview = CAST(x'61ff' AS TEXT) WHERE id = ?", (rows[0].id,)
        )
    connection.close()
    assert [row.output_preview for row in store.list()] == [rows[1].output_preview, "a\ufffd"]


def test_a_purge_deletes_what_is_older_and_only_that(store: InvocationStore, database: Database) -> None:
    from rag_pipeline.invocations.session_memory import SessionMemory

    memory = SessionMemory(database, timeout_ms=5000)
    assert memory.remember("old", "1" * 32, ["k"], ["d"]).written
    rows = series(450)
    store.insert(rows)
    limit = rows[443].created_at
    assert store.purge(limit) == 443
    assert store.list(limit=100) == tuple(rows[:442:-1])
    assert memory.recall("old").state.given == {"k": "1" * 32}  # written just now
    assert store.purge(START + timedelta(days=100_000)) == 7
    assert (memory.recall("old").state.given, memory.recall("old").state.domains) == ({}, ())


def test_a_row_that_the_database_refuses_does_not_lose_the_others(
    store: InvocationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rag_pipeline.invocations import tables

    rows = series(250)
    bad = rows[123].id
    good = tables.row_of
    monkeypatch.setattr(tables, "row_of", lambda row: {**good(row), **({"tool_name": None} if row.id == bad else {})})
    refused = store.insert(rows)
    assert list(refused) == [bad]
    assert "NOT NULL" in refused[bad]
    assert store.count() == 249


def test_numbers_beyond_what_a_column_holds_are_bounded(store: InvocationStore) -> None:
    huge = invocation(l0_match_count=10**30, l1_match_count=-(10**30), duration_ms=float("nan"))
    assert store.insert([huge]) == {}
    assert (store.get(huge.id).l0_match_count, store.get(huge.id).duration_ms) == (2**63 - 1, 0.0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(text=TEXTS, value=JSON, ids=st.integers(0, 2**128 - 1))
def test_any_text_comes_back_in_its_storable_form(text: str, value: object, ids: int, store: InvocationStore) -> None:
    written = invocation(
        id=f"{ids:032x}",
        session_id=text[:255],
        tool_name=text[:255],
        output_preview=text,
        dedup_reason=text * 3,
        input_params={"query": text},
        retrieval_details={text: value},
    )
    first = store.get(written.id) or written
    assert store.insert([written]) == {}
    assert store.get(written.id) == first.storable()
    assert isinstance(store.get(written.id), Invocation)
