"""What a session was given: shared between processes, first write wins, and never slower than its limit."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.session_memory import Recall, Remembered, SessionMemory, SessionState
from rag_pipeline_tests.invocations.samples import open_database, run_python

FIRST, SECOND = "1" * 32, "2" * 32
# Far above the limit of a call, far below how long the database hangs.
SOON_S = 5.0


@pytest.fixture
def memory(database: Database) -> SessionMemory:
    return SessionMemory(database, timeout_ms=5000)


def workers() -> int:
    return sum(thread.name == "session-memory" for thread in threading.enumerate())


@contextmanager
def hanging(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A database that does not answer inside the block; the event tells that somebody asked."""
    real, release, asked = database.transaction, threading.Event(), threading.Event()

    @contextmanager
    def transaction(**options: Any) -> Iterator[Any]:
        with real(**options) as connection:
            asked.set()
            release.wait(60)
            yield connection

    monkeypatch.setattr(database, "transaction", transaction)
    try:
        yield asked
    finally:
        release.set()
        monkeypatch.setattr(database, "transaction", real)


def test_a_new_session_was_given_nothing(memory: SessionMemory) -> None:
    assert memory.recall("s") == Recall(SessionState({}, ()))


def test_what_was_remembered_is_recalled_and_the_first_invocation_stays(memory: SessionMemory) -> None:
    assert memory.remember("s", FIRST, ["b", "a", "a"], ["redis", "kubernetes"]) == Remembered(written=True)
    assert memory.remember("s", SECOND, ["b", "c"], ["redis", "zookeeper"]) == Remembered(written=True)
    assert memory.recall("s") == Recall(
        SessionState({"a": FIRST, "b": FIRST, "c": SECOND}, ("kubernetes", "redis", "zookeeper"))
    )
    assert memory.recall("S").state == SessionState()


def test_a_blank_session_is_none(memory: SessionMemory) -> None:
    assert memory.remember("  ", FIRST, ["a"], ["d"]).written
    assert memory.recall("  ") == Recall(SessionState())
    assert memory.remember("s", FIRST, [], []).written


def test_keys_and_ids_of_any_kind(memory: SessionMemory) -> None:
    keys = ["k" * 5000, "k" * 5000 + "2", "文档/重启.md#步骤 😀", "a ", "a", "A", "' OR 1=1", "tab\t"]
    session = "s" * 10_000
    assert memory.remember(session, FIRST, keys, ["运维 😀", "x" * 2000]).written
    assert dict(memory.recall(session).state.given) == dict.fromkeys(keys, FIRST)
    assert memory.recall(session).state.domains == ("x" * 2000, "运维 😀")
    assert memory.recall(session + "s").state == SessionState()
    assert memory.remember("nul", FIRST, ["a\x00\ud800"], []).written
    assert list(memory.recall("nul").state.given) == ["a\ufffd\ufffd"]


def test_two_processes_see_each_others_rows(memory: SessionMemory, state: Path) -> None:
    memory.remember("s", FIRST, ["mine"], ["a"])
    script = f"""
import sys
from pathlib import Path
from rag_pipeline.invocations.session_memory import SessionMemory
from rag_pipeline_tests.invocations.samples import open_database
memory = SessionMemory(open_database(Path(sys.argv[1])), timeout_ms=5000)
assert memory.remember("s", "{SECOND}", ["mine", "theirs"], ["b"]).written
print(dict(memory.recall("s").state.given))
"""
    expected = {"mine": FIRST, "theirs": SECOND}
    assert run_python(script, state).strip() in (str(expected), str(dict(reversed(expected.items()))))
    assert memory.recall("s").state == SessionState(expected, ("a", "b"))


def test_a_secret_in_a_session_id_is_not_stored(database: Database, state: Path) -> None:
    memory = SessionMemory(database, timeout_ms=5000, patterns=["EMP-\\d+"])
    for session in ("password=hunter2", "EMP-4711"):
        assert memory.remember(session, FIRST, [session[:3]], []).written
        assert list(memory.recall(session).state.given) == [session[:3]]
    database.close()
    content = b"".join(path.read_bytes() for path in state.glob("invocations.db*"))
    assert b"hunter2" not in content
    assert b"EMP-4711" not in content


def test_without_a_database_the_reason_is_given(empty_database: Database) -> None:
    memory = SessionMemory(empty_database, timeout_ms=5000)
    recalled, remembered = memory.recall("s"), memory.remember("s", FIRST, ["a"], [])
    assert recalled.state is None
    assert not remembered.written
    assert "no database yet" in recalled.failure
    assert "no database yet" in remembered.failure
    empty_database.upgrade()
    assert memory.recall("s").state == SessionState()


def test_an_unexpected_error_is_a_reason_too(memory: SessionMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_read", lambda _: 1 / 0)
    assert memory.recall("s") == Recall(None, "ZeroDivisionError: division by zero")
    monkeypatch.undo()
    assert memory.recall("s").state == SessionState()


def test_a_write_lock_of_another_process_costs_no_more_than_the_limit(database: Database, state: Path) -> None:
    memory = SessionMemory(database, timeout_ms=50)
    memory.recall("s")
    other = open_database(state)
    with other.transaction(writes=True):
        begin = time.monotonic()
        remembered = memory.remember("s", FIRST, ["a"], [])
        assert time.monotonic() - begin < SOON_S
        assert not remembered.written
        assert remembered.failure
        assert memory.recall("s").state == SessionState()  # reading goes on
    patient = SessionMemory(database, timeout_ms=5000)
    assert patient.remember("s", SECOND, ["a"], []).written
    assert patient.recall("s").state.given == {"a": SECOND}


def test_a_database_that_hangs_costs_the_limit_and_a_bounded_number_of_threads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SessionMemory(database, timeout_ms=50)
    before = workers()
    begin = time.monotonic()
    with hanging(database, monkeypatch):
        outcomes = [memory.recall("s") for _ in range(30)]
        outcomes += [memory.remember("s", FIRST, ["a"], []) for _ in range(30)]
        assert time.monotonic() - begin < SOON_S
        assert all(outcome.failure for outcome in outcomes)
        assert all(recall.state is None for recall in outcomes[:30])
        assert workers() - before <= 4
        assert "did not answer within 50 ms" in outcomes[0].failure
        assert "earlier calls" in outcomes[-1].failure
    deadline = time.monotonic() + 20
    patient = SessionMemory(database, timeout_ms=5000)
    assert patient.recall("s").state == SessionState()
    while memory.recall("s").failure and time.monotonic() < deadline:
        time.sleep(0.01)
    assert memory.recall("s").state == SessionState()  # the same object has recovered
    assert workers() - before <= 5


def test_what_was_told_to_have_failed_is_not_written_later(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SessionMemory(database, timeout_ms=50)
    memory.recall("s")
    with hanging(database, monkeypatch) as asked:
        assert not memory.remember("s", FIRST, ["a"], ["d"]).written
        assert asked.wait(20)
    patient = SessionMemory(database, timeout_ms=5000)
    # The write lock is free only when the abandoned transaction has ended.
    assert patient.remember("other", FIRST, ["b"], []).written
    assert patient.recall("s").state == SessionState()


def test_many_threads_share_a_session(database: Database) -> None:
    memory = SessionMemory(database, timeout_ms=20_000)
    before = workers()
    failures: list[str] = []

    def lookups(number: int) -> None:
        for step in range(20):
            outcome = memory.remember("s", f"{number:032x}", [f"key {step}", f"own {number} {step}"], [f"d{number}"])
            failures.extend(filter(None, [outcome.failure, memory.recall("s").failure]))

    threads = [threading.Thread(target=lookups, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert workers() - before <= 4
    state = memory.recall("s").state
    assert len(state.given) == 20 + 8 * 20
    assert state.domains == tuple(f"d{number}" for number in range(8))


def test_a_forked_child_has_workers_of_its_own(database: Database, state: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from rag_pipeline.invocations.session_memory import SessionMemory
from rag_pipeline_tests.invocations.samples import open_database
memory = SessionMemory(open_database(Path(sys.argv[1])), timeout_ms=5000)
assert memory.remember("s", "{FIRST}", ["a"], []).written
pid = os.fork()
if pid == 0:
    os._exit(0 if memory.remember("s", "{SECOND}", ["b"], []).written else 1)
assert os.waitpid(pid, 0)[1] == 0
assert len(memory.recall("s").state.given) == 2
"""
    run_python(script, state)


def test_preparing_opens_the_database_in_the_background(database: Database, memory: SessionMemory) -> None:
    database.close()
    memory.prepare()
    deadline = time.monotonic() + 20
    while not database._engines and time.monotonic() < deadline:
        time.sleep(0.01)
    assert database._engines
