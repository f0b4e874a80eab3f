"""Recording: redacted, spooled, written once, without failing the caller."""

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.invocations import recorder as recorder_module
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline.invocations.spool import Spool
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline_tests.invocations.samples import failure_of, invocation, open_database, run_python, series

LIMIT_S = 20.0
Open = Callable[..., InvocationRecorder]


@pytest.fixture
def spool(state: Path) -> Path:
    return state / "spool"


@pytest.fixture
def open_recorder(spool: Path) -> Iterator[Open]:
    """Opens recorders over one spool folder, and closes them."""
    opened = []

    def build(database: Database, **options: object) -> InvocationRecorder:
        opened.append(InvocationRecorder(database, **{"spool_folder": spool, "retention_days": 0, **options}))
        return opened[-1]

    yield build
    for recorder in opened:
        recorder.close(0.1)


def files(spool: Path) -> list[Path]:
    return sorted(spool.iterdir()) if spool.exists() else []


def spooled(spool: Path) -> bytes:
    return b"".join(path.read_bytes() for path in files(spool))


def test_a_record_is_in_the_database_after_a_flush_and_the_spool_is_empty(
    database: Database, store: InvocationStore, open_recorder: Open, spool: Path
) -> None:
    recorder = open_recorder(database)
    rows = series(50)
    for row in rows:
        recorder.record(row)
    assert recorder.flush(LIMIT_S)
    assert store.list(limit=100) == tuple(reversed(rows))
    assert files(spool) == []
    assert (recorder.waiting(), recorder.dropped, recorder.last_failure) == (0, 0, "")


def test_a_flush_without_records_is_done_at_once_even_without_a_database(
    empty_database: Database, open_recorder: Open
) -> None:
    assert open_recorder(empty_database).flush(0)


def test_secrets_reach_neither_the_spool_nor_the_database(state: Path, open_recorder: Open, spool: Path) -> None:
    database = open_database(state)
    recorder = open_recorder(database, patterns=[r"EMP-\d+"])
    secret = invocation(
        session_id="token=hunter2",
        input_params={"query": "password=hunter2", "api_key": "hunter2", "who": "EMP-4711"},
        output_preview="Authorization: Bearer hunter2hunter2 EMP-4711",
        retrieval_details={"a": [{"b": "redis://u:hunter2@h"}], "EMP-4711": 1},
        dedup_reason="secret: hunter2",
    )
    recorder.record(secret)
    assert not recorder.flush(0.3)
    assert b"redacted" in spooled(spool)
    assert b"hunter2" not in spooled(spool)
    assert b"EMP-4711" not in spooled(spool)
    database.upgrade()
    assert recorder.flush(LIMIT_S)
    row = InvocationStore(database).get(secret.id)
    assert row.input_params == {"query": "password=[redacted]", "api_key": "[redacted]", "who": "[redacted]"}
    assert row.output_preview == "Authorization: [redacted] [redacted]"
    assert "hunter2" not in row.to_json_line()


def test_a_wrong_pattern_is_an_error_when_the_recorder_is_made(database: Database, spool: Path) -> None:
    with pytest.raises(ConfigurationError):
        InvocationRecorder(database, spool_folder=spool, patterns=["("])


def test_without_tables_records_wait_and_a_lookup_makes_none(
    empty_database: Database, open_recorder: Open, state: Path, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = open_recorder(empty_database)
    for row in series(3):
        recorder.record(row)
        assert not recorder.flush(0.3)
    assert not (state / "invocations.db").exists()
    assert spooled(spool).count(b"\n") == 3
    assert failure_of(recorder, "no database yet")
    assert sum("wait in the spool" in message for message in caplog.messages) == 1
    empty_database.upgrade()
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(empty_database).count() == 3
    assert recorder.last_failure == ""


def test_a_database_that_comes_up_is_written_to_without_being_asked(
    empty_database: Database, open_recorder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(recorder_module, "_LONGEST_PAUSE_S", 0.05)
    recorder = open_recorder(empty_database)
    recorder.record(invocation())
    assert not recorder.flush(0.2)
    empty_database.upgrade()
    with recorder._changed:
        assert recorder._changed.wait_for(lambda: recorder._written == 1, timeout=LIMIT_S)
    assert InvocationStore(empty_database).count() == 1


def test_another_schema_is_not_written_to(database: Database, open_recorder: Open, state: Path) -> None:
    import sqlite3

    with sqlite3.connect(state / "invocations.db") as connection:
        connection.execute("UPDATE rag_pipeline_version SET version_num = '9999'")
    recorder = open_recorder(open_database(state))
    recorder.record(invocation())
    assert not recorder.flush(0.3)
    assert failure_of(recorder, "schema 9999")
    with sqlite3.connect(state / "invocations.db") as connection:
        assert connection.execute("SELECT count(*) FROM tool_invocation").fetchone() == (0,)
        connection.execute("UPDATE rag_pipeline_version SET version_num = '0001'")
    assert recorder.flush(LIMIT_S)


def test_what_an_earlier_recorder_left_is_written_by_the_next(
    empty_database: Database, open_recorder: Open, spool: Path
) -> None:
    earlier = open_recorder(empty_database)
    left = series(5)
    for row in left:
        earlier.record(row)
    assert not earlier.close(0.3)
    empty_database.upgrade()
    later = open_recorder(empty_database)
    own = invocation()
    later.record(own)
    assert later.flush(LIMIT_S)
    assert {row.id for row in InvocationStore(empty_database).list()} == {row.id for row in [*left, own]}
    assert files(spool) == []


def test_a_recorder_can_begin_with_what_was_left_before_it_records(
    empty_database: Database, open_recorder: Open, spool: Path
) -> None:
    earlier = open_recorder(empty_database)
    earlier.record(invocation())
    earlier.close(0.1)
    empty_database.upgrade()
    later = open_recorder(empty_database)
    assert later.waiting() == 1
    later.start()
    with later._changed:
        assert later._changed.wait_for(lambda: later._attempts > 0 and not files(spool), timeout=LIMIT_S)
    assert InvocationStore(empty_database).count() == 1


def test_a_segment_that_another_process_is_writing_is_not_yet_called_written(
    empty_database: Database, open_recorder: Open, spool: Path
) -> None:
    recorder = open_recorder(empty_database)
    recorder.record(invocation())
    assert not recorder.flush(0.2)
    with recorder._lock:
        recorder._spool.rotate()
    deadline = time.monotonic() + LIMIT_S
    while next(others := Spool(spool).claim(), None) is None:  # the writer may be looking at it itself
        assert time.monotonic() < deadline
    empty_database.upgrade()
    assert not recorder.flush(0.5)
    assert failure_of(recorder, "another process")
    others.close()
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(empty_database).count() == 1


def test_while_the_database_is_down_the_number_of_files_does_not_grow(
    empty_database: Database, open_recorder: Open, spool: Path
) -> None:
    recorder = open_recorder(empty_database)
    for row in series(5):
        recorder.record(row)
        assert not recorder.flush(0.1)
    assert len(files(spool)) <= 2
    assert spooled(spool).count(b"\n") == 5


def test_lines_that_are_none_are_kept_aside_once_and_the_others_go_in(
    empty_database: Database, open_recorder: Open, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = series(2)
    torn = good[0].to_json_line().encode()[:100]
    spool.mkdir(parents=True)
    (spool / "0.ready").write_bytes(
        b"\n".join([good[0].to_json_line().encode(), b"{garbage}", good[1].to_json_line().encode(), torn])
    )
    recorder = open_recorder(empty_database)
    own = invocation()
    recorder.record(own)
    assert not recorder.flush(0.6)  # a database that is down must not have them kept aside with every attempt
    assert not list(spool.glob("*.refused"))
    empty_database.upgrade()
    assert recorder.flush(LIMIT_S)
    assert {row.id for row in InvocationStore(empty_database).list()} == {row.id for row in [*good, own]}
    assert [(path.name, path.read_bytes()) for path in files(spool)] == [("0.refused", b"{garbage}\n" + torn + b"\n")]
    assert sum("2 lines of" in message for message in caplog.messages) == 1


def test_a_row_that_the_database_refuses_is_kept_aside_and_logged(
    database: Database, store: InvocationStore, open_recorder: Open, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rag_pipeline.invocations import tables

    rows = series(3)
    good = tables.row_of
    monkeypatch.setattr(
        tables, "row_of", lambda row: {**good(row), **({"tool_name": None} if row.id == rows[1].id else {})}
    )
    recorder = open_recorder(database)
    for row in rows:
        recorder.record(row)
    assert recorder.flush(LIMIT_S)
    assert store.list() == (rows[2], rows[0])
    (aside,) = files(spool)
    assert (aside.suffix, aside.read_bytes()) == (".refused", rows[1].to_json_line().encode() + b"\n")


def test_an_error_that_nobody_thought_of_loses_nothing(
    database: Database, store: InvocationStore, open_recorder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_recorder(database)
    real = InvocationStore.insert
    failures = iter([True, True])

    def insert(self: InvocationStore, rows: object) -> dict[str, str]:
        if next(failures, False):
            raise ZeroDivisionError("unheard of")
        return real(self, rows)

    monkeypatch.setattr(InvocationStore, "insert", insert)
    recorder.record(invocation())
    assert recorder.flush(LIMIT_S)
    assert store.count() == 1


def test_without_a_spool_the_record_goes_to_the_database_from_memory(
    database: Database, store: InvocationStore, open_recorder: Open, spool: Path
) -> None:
    spool.write_text("a file where the folder should be")
    recorder = open_recorder(database)
    rows = series(3)
    for row in rows:
        recorder.record(row)
    assert recorder.flush(LIMIT_S)
    assert store.list() == tuple(reversed(rows))
    assert (recorder.waiting(), recorder.dropped) == (0, 0)


def test_without_spool_and_database_a_bounded_number_waits_and_the_rest_is_counted(
    empty_database: Database,
    open_recorder: Open,
    spool: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_UNSPOOLED", 5)
    state.mkdir()
    spool.write_text("a file where the folder should be")
    recorder = open_recorder(empty_database)
    rows = series(30)
    for row in rows:
        recorder.record(row)
    assert not recorder.flush(0.3)
    assert (recorder.dropped, recorder.waiting()) == (25, 5)
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2  # the 1st and the 10th
    empty_database.upgrade()
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(empty_database).list() == tuple(reversed(rows[:5]))


def test_what_is_in_memory_goes_to_the_spool_when_that_comes_back_first(
    empty_database: Database, open_recorder: Open, spool: Path, state: Path
) -> None:
    state.mkdir()
    spool.write_text("a file where the folder should be")
    recorder = open_recorder(empty_database)
    recorder.record(invocation())
    assert not recorder.flush(0.3)
    spool.unlink()
    assert not recorder.flush(0.6)
    assert spooled(spool).count(b"\n") == 1
    assert recorder.waiting() == 1


def test_a_spool_that_is_deleted_under_the_recorder_is_made_again(
    database: Database, store: InvocationStore, open_recorder: Open, spool: Path
) -> None:
    recorder = open_recorder(database)
    recorder.record(invocation())
    assert recorder.flush(LIMIT_S)
    shutil.rmtree(spool)
    recorder.record(invocation())
    assert recorder.flush(LIMIT_S)
    assert store.count() == 2


def test_whatever_goes_wrong_in_recording_is_counted_and_not_raised(
    database: Database, open_recorder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_recorder(database)
    monkeypatch.setattr(recorder_module, "_redacted", lambda *_: 1 / 0)
    recorder.record(invocation())
    assert recorder.dropped == 1


def test_a_record_that_is_too_long_is_shortened_and_says_so(
    database: Database, store: InvocationStore, open_recorder: Open
) -> None:
    recorder = open_recorder(database)
    huge = invocation(retrieval_details={"text": "x" * 2_000_000}, output_preview="y" * 5000)
    recorder.record(huge)
    assert recorder.flush(LIMIT_S)
    row = store.get(huge.id)
    assert "more than 1048576" in row.retrieval_details["omitted"]
    assert row == replace(
        huge, retrieval_details=row.retrieval_details, input_params=row.retrieval_details, output_preview="y" * 1000
    )


def test_old_rows_are_purged_after_writing(database: Database, store: InvocationStore, open_recorder: Open) -> None:
    today = datetime.now(UTC)
    old = [invocation(created_at=today - timedelta(days=days)) for days in (91, 92)]
    young = [invocation(created_at=today - timedelta(days=days)) for days in (0, 89)]
    store.insert([*old, *young])
    recorder = open_recorder(database, retention_days=90)
    recorder.record(invocation(created_at=today))
    assert recorder.flush(LIMIT_S)
    recorder.close(LIMIT_S)
    recorder._thread.join(LIMIT_S)
    assert store.count() == 3
    assert all(store.get(row.id) is None for row in old)


def test_a_purge_that_fails_does_not_end_the_writer(
    database: Database, store: InvocationStore, open_recorder: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InvocationStore, "purge", lambda *_: 1 / 0)
    recorder = open_recorder(database, retention_days=90)
    for _ in range(2):
        recorder.record(invocation())
        assert recorder.flush(LIMIT_S)
    assert store.count() == 2
    assert recorder._thread.is_alive()


def test_a_retention_of_0_keeps_everything(database: Database, store: InvocationStore, open_recorder: Open) -> None:
    store.insert([invocation(created_at=datetime(1990, 1, 1, tzinfo=UTC))])
    recorder = open_recorder(database, retention_days=0)
    recorder.record(invocation())
    assert recorder.flush(LIMIT_S)
    recorder.close(LIMIT_S)
    recorder._thread.join(LIMIT_S)
    assert store.count() == 2


def test_what_waits_for_longer_than_rows_are_kept_is_deleted_though_the_database_is_down(
    empty_database: Database, open_recorder: Open, spool: Path
) -> None:
    spool.mkdir(parents=True)
    for name, days in (("old", 91), ("young", 89)):
        (spool / f"{name}.ready").write_text(invocation().to_json_line() + "\n")
        moment = (datetime.now(UTC) - timedelta(days=days)).timestamp()
        os.utime(spool / f"{name}.ready", (moment, moment))
    recorder = open_recorder(empty_database, retention_days=90)
    recorder.start()
    with recorder._changed:
        assert recorder._changed.wait_for(lambda: recorder._attempts > 0, timeout=LIMIT_S)
    assert [path.name for path in files(spool)] == ["young.ready"]


def test_a_short_process_has_its_row_in_the_database_when_it_ends(database: Database, state: Path) -> None:
    script = """
import sys
from pathlib import Path
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline_tests.invocations.samples import invocation, open_database
state = Path(sys.argv[1])
recorder = InvocationRecorder(open_database(state), spool_folder=state / "spool", retention_days=0)
one = invocation(); recorder.record(one); print(one.id)
"""
    made = run_python(script, state).strip()
    assert InvocationStore(database).get(made) is not None
    assert files(state / "spool") == []


def test_a_forked_child_writes_its_own_records_and_not_its_parents(
    database: Database, store: InvocationStore, state: Path
) -> None:
    script = """
import os, sys
from pathlib import Path
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline_tests.invocations.samples import invocation, open_database
state = Path(sys.argv[1])
recorder = InvocationRecorder(open_database(state), spool_folder=state / "spool", retention_days=0)
recorder.record(invocation(tool_name="parent"))
children = []
for number in range(4):
    recorder.record(invocation(tool_name="parent"))
    pid = os.fork()
    if pid == 0:
        for _ in range(10):
            recorder.record(invocation(tool_name=f"child {number}"))
        os._exit(0 if recorder.flush(20) and recorder.dropped == 0 else 1)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
recorder.record(invocation(tool_name="parent"))
assert recorder.flush(20)
"""
    run_python(script, state)
    names = [row.tool_name for row in store.list(limit=100)]
    assert {name: names.count(name) for name in names} == {
        "parent": 6, "child 0": 10, "child 1": 10, "child 2": 10, "child 3": 10,
    }  # fmt: skip
    assert files(state / "spool") == []


def test_recording_after_closing_leaves_the_line_to_the_next(
    database: Database, store: InvocationStore, open_recorder: Open, state: Path
) -> None:
    recorder = open_recorder(database)
    assert recorder.close(LIMIT_S)
    recorder.record(invocation())
    assert not recorder.flush(0.2)
    assert store.count() == 0
    assert recorder.close(0.1) is False
    other = open_recorder(open_database(state))
    other.record(invocation())
    assert other.flush(LIMIT_S)
    assert store.count() == 2


def test_an_amendment_replaces_names_of_the_details_and_leaves_the_rest(
    database: Database, store: InvocationStore, open_recorder: Open, spool: Path
) -> None:
    recorder = open_recorder(database)
    one, other = invocation(retrieval_details={"sidecar": {"status": "pending"}, "a": 1}), invocation()
    recorder.record(one)
    recorder.record(other)
    recorder.amend(one.id, {"sidecar": {"status": "available"}, "b": [2]})
    assert recorder.flush(LIMIT_S)
    assert store.get(one.id).retrieval_details == {"sidecar": {"status": "available"}, "a": 1, "b": [2]}
    assert store.get(other.id) == other
    recorder.amend(one.id, {"a": 3})  # after its row was written
    recorder.amend(one.id, {"a": 4})
    assert recorder.flush(LIMIT_S)
    assert store.get(one.id).retrieval_details["a"] == 4
    assert (files(spool), recorder.dropped) == ([], 0)


def test_amendments_are_spooled_and_written_by_whoever_comes_next_however_often(
    empty_database: Database, open_recorder: Open, spool: Path
) -> None:
    earlier = open_recorder(empty_database)
    one = invocation(retrieval_details={"a": 1})
    earlier.record(one)
    earlier.amend(one.id, {"a": 2})
    earlier.amend(one.id, {"a": 3})
    earlier.close(0.1)
    lines = spooled(spool)
    assert lines.count(b"\n") == 3
    empty_database.upgrade()
    for _ in range(2):
        later = open_recorder(empty_database)
        later.start()
        with later._changed:
            assert later._changed.wait_for(lambda now=later: now._attempts > 0 and not files(spool), timeout=LIMIT_S)
        assert InvocationStore(empty_database).get(one.id).retrieval_details == {"a": 3}
        later.close(LIMIT_S)
        (spool / "0.ready").write_bytes(lines)  # as though it had been killed before it could delete the segment
    (spool / "0.ready").unlink()


def test_secrets_of_amendments_reach_neither_the_spool_nor_the_database(
    empty_database: Database, open_recorder: Open, spool: Path
) -> None:
    recorder = open_recorder(empty_database, patterns=[r"EMP-\d+"])
    one = invocation()
    recorder.record(one)
    recorder.amend(one.id, {"sidecar": {"reason": "redis://u:hunter2@h of EMP-4711", "password": "hunter2"}})
    assert b"hunter2" not in spooled(spool)
    assert b"EMP-4711" not in spooled(spool)
    empty_database.upgrade()
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(empty_database).get(one.id).retrieval_details["sidecar"] == {
        "reason": "redis://[redacted]@h of [redacted]",
        "password": "[redacted]",
    }


def test_an_amendment_without_its_row_is_left_out_and_said(
    database: Database, store: InvocationStore, open_recorder: Open, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = open_recorder(database)
    gone = invocation()
    recorder.amend(gone.id, {"a": 1})
    assert recorder.flush(LIMIT_S)
    assert (store.count(), files(spool)) == (0, [])
    assert [message for message in caplog.messages if gone.id in message] == [
        f"Invocation {gone.id} is not amended: there is no such row"
    ]


def test_an_amendment_waits_for_its_row_in_an_older_segment_that_another_process_holds(
    database: Database, store: InvocationStore, open_recorder: Open, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, own = invocation(retrieval_details={"a": 1}), invocation()
    spool.mkdir(parents=True)
    (spool / "0.ready").write_text(one.to_json_line() + "\n")
    others = Spool(spool).claim()
    next(others)
    recorder = open_recorder(database)
    recorder.record(own)
    recorder.amend(one.id, {"a": 2})
    assert not recorder.flush(0.6)
    recorder.amend(one.id, {"a": 3})
    assert not recorder.flush(0.6)
    assert store.list() == (own,)  # that does not wait
    others.close()
    assert recorder.flush(LIMIT_S)
    assert store.get(one.id).retrieval_details == {"a": 3}
    assert files(spool) == []
    assert not [message for message in caplog.messages if "not amended" in message]


def test_an_amendment_follows_its_row_through_memory_when_the_spool_takes_neither(
    empty_database: Database, open_recorder: Open, spool: Path, state: Path
) -> None:
    state.mkdir()
    spool.write_text("a file where the folder should be")
    recorder = open_recorder(empty_database)
    one = invocation(retrieval_details={"a": 1})
    recorder.record(one)
    spool.unlink()
    recorder.amend(one.id, {"a": 2})
    assert not recorder.flush(0.3)
    empty_database.upgrade()
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(empty_database).get(one.id).retrieval_details == {"a": 2}
    assert recorder.dropped == 0


@pytest.mark.parametrize("details", [{"a": {1, 2}}, {"a": float("nan")}, {"a": "\ud800\x00"}, {1: object}])
def test_amending_takes_any_value(details: dict[object, object], database: Database, open_recorder: Open) -> None:
    recorder = open_recorder(database)
    one = invocation()
    recorder.record(one)
    recorder.amend(one.id, details)
    assert recorder.flush(LIMIT_S)
    assert set(map(str, details)) <= set(InvocationStore(database).get(one.id).retrieval_details)


def test_an_amendment_that_is_none_is_counted_and_not_raised(database: Database, open_recorder: Open) -> None:
    recorder = open_recorder(database)
    recorder.amend("not an id", {"a": 1})
    recorder.amend(invocation().id, None)
    assert recorder.dropped == 2


def test_an_amendment_that_is_too_long_says_so(database: Database, store: InvocationStore, open_recorder: Open) -> None:
    recorder = open_recorder(database)
    one = invocation(retrieval_details={"a": 1})
    recorder.record(one)
    recorder.amend(one.id, {"sidecar": "x" * 2_000_000})
    assert recorder.flush(LIMIT_S)
    assert "more than 1048576" in store.get(one.id).retrieval_details["sidecar"]["omitted"]


def test_a_retention_without_reason_is_refused_by_the_settings_and_bounded_here(
    database: Database, store: InvocationStore, open_recorder: Open
) -> None:
    from rag_pipeline.settings import load_settings

    for days in (36_501, 10**9, -1):
        with pytest.raises(ConfigurationError, match=r"invocations\.retention_days"):
            load_settings(flags={"invocations.retention_days": days})
    for days in (10**9, 36_500):
        recorder = open_recorder(database, retention_days=days)
        one = invocation()
        recorder.record(one)
        assert recorder.flush(LIMIT_S)
        assert store.get(one.id) is not None


@pytest.mark.parametrize("revision", ["9999", "0000", None])
def test_a_schema_that_changes_under_a_running_process_is_not_written_to(
    revision: str | None, database: Database, store: InvocationStore, open_recorder: Open, state: Path, spool: Path
) -> None:
    """With a column that this program does not know, a row would be refused and set aside."""
    recorder = open_recorder(database)
    before, after = invocation(), invocation()
    recorder.record(before)
    assert recorder.flush(LIMIT_S)
    connection = sqlite3.connect(state / "invocations.db", isolation_level=None)
    if revision:
        connection.execute("ALTER TABLE tool_invocation RENAME TO older")
        connection.execute("CREATE TABLE tool_invocation AS SELECT * FROM older")
        connection.execute("ALTER TABLE tool_invocation ADD COLUMN tenant TEXT NOT NULL DEFAULT ''")
        connection.execute("UPDATE rag_pipeline_version SET version_num = ?", (revision,))
    else:
        connection.execute("DELETE FROM rag_pipeline_version")
    recorder.record(after)
    recorder.amend(before.id, {"a": 1})
    assert not recorder.flush(0.6)
    assert failure_of(recorder, f"schema {revision}" if revision else "no tables")
    assert connection.execute("SELECT count(*) FROM tool_invocation").fetchone() == (1,)
    if revision:
        connection.execute("DROP TABLE tool_invocation")
        connection.execute("ALTER TABLE older RENAME TO tool_invocation")
    connection.execute("DELETE FROM rag_pipeline_version")
    connection.execute("INSERT INTO rag_pipeline_version VALUES ('0001')")
    connection.close()
    assert recorder.flush(LIMIT_S)
    assert {row.id for row in store.list()} == {before.id, after.id}
    assert store.get(before.id).retrieval_details["a"] == 1
    assert files(spool) == []
