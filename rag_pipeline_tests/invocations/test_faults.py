"""Locked, read-only, full and deleted databases, killed processes: the record is spooled and written later, once."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline_tests.conftest import PROJECT
from rag_pipeline_tests.invocations.samples import failure_of, invocation, open_database, run_python, series

pytestmark = pytest.mark.fault
LIMIT_S = 60.0
KILLS = 40


def recorder_of(database: Database, state: Path) -> InvocationRecorder:
    return InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)


def drained(state: Path) -> list[str]:
    """The ids in the database after a new process's recorder has taken over the whole spool."""
    database = open_database(state)
    recorder = recorder_of(database, state)
    recorder.record(invocation(tool_name="last"))
    assert recorder.flush(LIMIT_S)
    assert recorder.close(LIMIT_S)
    assert [path.name for path in (state / "spool").iterdir() if path.suffix != ".refused"] == []
    with sqlite3.connect(state / "invocations.db") as connection:
        ids = [row[0] for row in connection.execute("SELECT id FROM tool_invocation WHERE tool_name <> 'last'")]
    connection.close()
    database.close()
    return ids


def test_killed_while_recording_no_line_is_lost_and_none_is_there_twice(database: Database, state: Path) -> None:
    """``kill -9`` at a random moment, many times over one database: each id that was recorded is there once."""
    seed = random.Random(4711)
    told: list[str] = []
    for _ in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "-m", "rag_pipeline_tests.invocations.recording_process", str(state), "", "2"],
            stdout=subprocess.PIPE,
            cwd=PROJECT,
        )
        first = process.stdout.readline()
        # From before the writer's first transaction to several of them.
        time.sleep(seed.choice([0.0, 0.02, 0.3, 0.8]) * seed.random())
        process.kill()
        rest, _ = process.communicate()
        told += [line.decode() for line in (first + rest).splitlines() if len(line) == 32]
    ids = drained(state)
    assert len(told) > KILLS
    assert set(told) - set(ids) == set()
    assert len(ids) == len(set(ids))
    # A kill between the write and the message leaves a row that nobody was told of: one a thread at most.
    assert len(set(ids) - set(told)) <= 2 * KILLS


def test_eight_threads_record_500_each(database: Database, state: Path, store: InvocationStore) -> None:
    recorder = recorder_of(database, state)
    rows = [series(500) for _ in range(8)]
    threads = [threading.Thread(target=lambda own: [recorder.record(row) for row in own], args=(own,)) for own in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.flush(LIMIT_S)
    assert recorder.dropped == 0
    assert {row.id for row in store.list(limit=10_000)} == {row.id for own in rows for row in own}
    assert store.count() == 4000
    recorder.close(LIMIT_S)


def test_four_processes_record_at_once(database: Database, state: Path, store: InvocationStore) -> None:
    script = """
import sys
from pathlib import Path
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline_tests.invocations.samples import open_database, series
state = Path(sys.argv[1])
recorder = InvocationRecorder(open_database(state, timeout_s=20), spool_folder=state / "spool", retention_days=0)
for row in series(500):
    recorder.record(row)
assert recorder.flush(60), recorder.last_failure
"""
    started = [subprocess.Popen([sys.executable, "-c", script, str(state)], cwd=PROJECT) for _ in range(4)]
    assert [process.wait(120) for process in started] == [0] * 4
    assert store.count() == 2000
    assert list((state / "spool").iterdir()) == []


def test_four_processes_record_and_amend_while_the_database_is_upgraded(state: Path) -> None:
    """They begin without a database; one of them and another process make it meanwhile, more than once."""
    script = """
import sys
from pathlib import Path
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline_tests.invocations.samples import open_database, series
state, upgrades = Path(sys.argv[1]), sys.argv[2] == "1"
database = open_database(state, timeout_s=20)
recorder = InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)
print("ready", flush=True)
for number, row in enumerate(series(500)):
    recorder.record(row)
    recorder.amend(row.id, {"sidecar": {"number": number}})
    if upgrades and number in (200, 400):
        database.upgrade()
assert recorder.flush(60), recorder.last_failure
assert recorder.dropped == 0
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(state), str(number)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
        )
        for number in range(4)
    ]
    assert [process.stdout.readline() for process in started] == ["ready\n"] * 4
    open_database(state).upgrade()
    open_database(state).upgrade()
    assert [process.wait(200) for process in started] == [0] * 4
    for process in started:
        process.stdout.close()
    rows = InvocationStore(open_database(state)).list(limit=10_000)
    assert len(rows) == 2000
    assert sorted(row.retrieval_details["sidecar"]["number"] for row in rows) == sorted([*range(500)] * 4)
    assert list((state / "spool").iterdir()) == []


def test_locked_by_another_process(database: Database, state: Path, store: InvocationStore) -> None:
    """Held for longer than a writer waits: the caller goes on, and the rows are there once afterwards."""
    recorder = recorder_of(open_database(state, timeout_s=0.2), state)
    locker = sqlite3.connect(state / "invocations.db", isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")
    rows = series(200)
    begin = time.monotonic()
    for row in rows:
        recorder.record(row)
    assert time.monotonic() - begin < 10  # 200 records that waited 0.2 s each would take 40 s
    assert not recorder.flush(2)
    assert failure_of(recorder, "locked")
    assert store.count() == 0
    locker.execute("ROLLBACK")
    locker.close()
    assert recorder.flush(LIMIT_S)
    assert store.list(limit=1000) == tuple(reversed(rows))
    assert list((state / "spool").iterdir()) == []
    recorder.close(LIMIT_S)


def test_the_file_is_deleted_and_made_again(database: Database, state: Path) -> None:
    recorder = recorder_of(database, state)
    before, after = invocation(), invocation()
    recorder.record(before)
    assert recorder.flush(LIMIT_S)
    for file in state.glob("invocations.db*"):
        file.unlink()
    recorder.record(after)
    assert not recorder.flush(1)
    assert not (state / "invocations.db").exists()
    open_database(state).upgrade()
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(open_database(state)).list() == (after,)
    recorder.close(LIMIT_S)


def test_the_file_is_replaced_by_an_older_copy(database: Database, state: Path, tmp_path: Path) -> None:
    """A restored backup: rows are not written to the file that is gone."""
    database.close()
    shutil.copy(state / "invocations.db", tmp_path / "backup")
    recorder = recorder_of(database, state)
    recorder.record(invocation())
    assert recorder.flush(LIMIT_S)
    for file in state.glob("invocations.db-*"):
        file.unlink()
    (tmp_path / "backup").replace(state / "invocations.db")
    after = invocation()
    recorder.record(after)
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(open_database(state)).list() == (after,)
    recorder.close(LIMIT_S)


def test_the_state_folder_is_deleted(database: Database, state: Path) -> None:
    recorder = recorder_of(database, state)
    recorder.record(invocation())
    assert recorder.flush(LIMIT_S)
    shutil.rmtree(state)
    after = invocation()
    recorder.record(after)
    assert not recorder.flush(1)
    assert recorder.dropped == 0
    open_database(state).upgrade()
    assert recorder.flush(LIMIT_S)
    assert InvocationStore(open_database(state)).list() == (after,)
    recorder.close(LIMIT_S)


READ_ONLY = """
import sys
from pathlib import Path
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline_tests.invocations.samples import failure_of, open_database, series
state = Path(sys.argv[1])
recorder = InvocationRecorder(open_database(state), spool_folder=state / "spool", retention_days=0)
for row in series(20):
    recorder.record(row)
assert not recorder.flush(1)
assert recorder.dropped == 0
print(failure_of(recorder))
"""


@pytest.mark.parametrize("folder_too", [False, True], ids=["file", "file and folder"])
def test_the_database_is_read_only(folder_too: bool, database: Database, state: Path) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv writes to read-only files")
    database.close()
    (state / "spool").mkdir()
    (state / "invocations.db").chmod(0o444)
    if folder_too:
        state.chmod(0o555)
    said = run_python(READ_ONLY, state, obeys_modes=True)
    assert "readonly database" in said or "unable to open" in said
    state.chmod(0o755)
    (state / "invocations.db").chmod(0o600)
    assert len(drained(state)) == 20


FULL = """
import resource, sys
from pathlib import Path
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline_tests.invocations.samples import failure_of, open_database, series
state = Path(sys.argv[1])
database = open_database(state)
recorder = InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)
rows = series(300)
recorder.record(rows[0])
assert recorder.flush(20)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
for row in rows[1:]:
    recorder.record(row)
assert not recorder.flush(1)
assert recorder.dropped == 0
print(failure_of(recorder))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert recorder.flush(30), recorder.last_failure
assert recorder.dropped == 0
"""


def test_files_may_not_grow(database: Database, state: Path, store: InvocationStore) -> None:
    """Neither the database nor, past its first lines, the spool takes a byte: what waits in memory is written later."""
    run_python(FULL, state)
    assert store.count() == 300
    assert len({row.id for row in store.list(limit=1000)}) == 300
    assert list((state / "spool").iterdir()) == []


def test_the_disk_is_full(tmp_path: Path) -> None:
    """A file system of 512 KB, filled up: what the spool has no room for waits in memory, and nothing is lost."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    try:
        database = open_database(disk, timeout_s=0.5)
        database.upgrade()
        recorder = recorder_of(database, disk)
        rows = series(400)
        recorder.record(rows[0])
        assert recorder.flush(LIMIT_S)
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(b"x" * 1024)
        for row in rows[1:]:
            recorder.record(row)
        assert not recorder.flush(1)
        assert recorder.dropped == 0
        assert recorder._unspooled
        assert failure_of(recorder, "full", "disk I/O")
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert recorder.flush(LIMIT_S), recorder.last_failure
        recorder.close(LIMIT_S)
        assert {row.id for row in InvocationStore(database).list(limit=1000)} == {row.id for row in rows}
        assert [path.name for path in (disk / "spool").iterdir()] == []
        database.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_killed_while_upgrading_the_next_upgrade_completes(state: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
import sqlalchemy as sa
from rag_pipeline_tests.invocations.samples import open_database
steps = int(sys.argv[2])
@sa.event.listens_for(sa.Engine, "after_cursor_execute")
def count(*_):
    global steps
    steps -= 1
    if not steps:
        os.kill(os.getpid(), signal.SIGKILL)
open_database(Path(sys.argv[1])).upgrade()
print("survived")
"""
    for steps in range(1, 100):
        here = state / str(steps)
        if "survived" in run_python(script, here, steps, check=False):
            break
        database = open_database(here)
        assert database.upgrade() in (("0001",), ())
        InvocationStore(database).insert([invocation()])
        assert InvocationStore(database).count() == 1
        database.close()
    assert steps > 10


def test_a_process_that_is_stopped_by_a_signal_leaves_its_line_to_the_next(database: Database, state: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rag_pipeline_tests.invocations.recording_process", str(state), "", "1"],
        stdout=subprocess.PIPE,
        cwd=PROJECT,
    )
    told = process.stdout.readline().strip().decode()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert told in drained(state)
