"""Invocations and sessions alike on SQLite, PostgreSQL and MariaDB: the same tests over each."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_pipeline.errors import RefusedError, StoreUnavailableError
from rag_pipeline.invocations.database import SCHEMA_REVISION, Database
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline.invocations.records import Amendment, storable_text
from rag_pipeline.invocations.session_memory import SessionMemory, SessionState
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline_tests.conftest import PROJECT
from rag_pipeline_tests.contract.database_servers import CannotStartError, DatabaseServer, MariaDbServer, PostgresServer
from rag_pipeline_tests.invocations.samples import START, invocation, open_database, run_python, series
from rag_pipeline_tests.invocations.test_records import JSON, TEXTS

SERVERS = [
    pytest.param("postgresql", marks=pytest.mark.database_server),
    pytest.param("mariadb", marks=pytest.mark.database_server),
]
LIMIT_S = 60.0
FIRST, SECOND = "1" * 32, "2" * 32


def serve(kind: type[DatabaseServer]) -> Iterator[DatabaseServer]:
    try:
        server = kind()
    except CannotStartError as error:
        pytest.skip(f"no {kind.name}: {error}")
    try:
        server.start()
        yield server
    except CannotStartError as error:
        pytest.skip(f"no {kind.name}: {error}")
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[DatabaseServer]:
    yield from serve(PostgresServer)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[DatabaseServer]:
    yield from serve(MariaDbServer)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> DatabaseServer:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["sqlite", *SERVERS])
def url(request: pytest.FixtureRequest) -> str:
    """A new, empty database; blank for the SQLite file of the state folder."""
    return "" if request.param == "sqlite" else request.getfixturevalue(request.param).new_database()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def open_one(url: str, state: Path) -> Iterator[Callable[[], Database]]:
    """Opens the database of the test, with connections of its own each time."""
    opened = []

    def build() -> Database:
        opened.append(open_database(state, url=url, timeout_s=10))
        return opened[-1]

    yield build
    for database in opened:
        database.close()


@pytest.fixture
def database(open_one: Callable[[], Database]) -> Database:
    database = open_one()
    database.upgrade()
    return database


@pytest.fixture
def store(database: Database) -> InvocationStore:
    return InvocationStore(database)


def test_an_upgrade_makes_the_tables_once_and_reading_makes_none(open_one: Callable[[], Database]) -> None:
    database = open_one()
    assert not database.ready()
    assert "rag-pipeline db upgrade" in database.problem()
    with pytest.raises(StoreUnavailableError, match="rag-pipeline db upgrade"):
        InvocationStore(database).list()
    assert database.upgrade() == (SCHEMA_REVISION,)
    assert database.upgrade() == ()
    assert open_one().ready()


def test_the_migrations_make_the_tables_that_the_code_uses(database: Database) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    from rag_pipeline.invocations.tables import VERSION_TABLE, metadata

    with database.transaction() as connection:
        options = {"version_table": VERSION_TABLE, "compare_type": False}  # MariaDB shows JSON as text
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


def test_hosts_that_upgrade_at_once_take_turns(url: str, state: Path, tmp_path: Path) -> None:
    """State folders of their own, as on several hosts: only the database's own lock is between them."""
    if not url:
        url = f"sqlite:///{tmp_path}/shared.db"
    script = (
        "import sys; from pathlib import Path\n"
        "from rag_pipeline_tests.invocations.samples import open_database\n"
        "print(open_database(Path(sys.argv[1]), url=sys.argv[2], timeout_s=20).upgrade())"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / name), url], stdout=subprocess.PIPE, text=True, cwd=PROJECT
        )
        for name in "abc"
    ]
    assert sorted(process.communicate(timeout=120)[0].strip() for process in started) == ["('0001',)", "()", "()"]
    assert open_database(state, url=url).ready()


def test_an_upgrade_that_was_cut_off_is_completed(url: str, open_one: Callable[[], Database], state: Path) -> None:
    """Killed after each of its statements in turn: what MySQL has committed by then is no obstacle."""
    script = """
import os, signal, sys
from pathlib import Path
import sqlalchemy as sa
from rag_pipeline_tests.invocations.samples import open_database
@sa.event.listens_for(sa.Engine, "after_cursor_execute")
def die(connection, cursor, statement, *_):
    if sys.argv[3] in statement:
        os.kill(os.getpid(), signal.SIGKILL)
open_database(Path(sys.argv[1]), url=sys.argv[2]).upgrade()
print("survived")
"""
    for at in (
        "CREATE TABLE rag_pipeline_version",
        "tool_invocation (",
        "session_domain (",
        "ix_tool_invocation_created_at",
        "ix_session_domain_created_at",
        "INSERT INTO rag_pipeline_version",
    ):
        assert "survived" not in run_python(script, state, url, at, check=False), at
    database = open_one()
    database.upgrade()
    store = InvocationStore(database)
    store.insert([invocation()])
    assert store.count() == 1


def test_a_newer_schema_is_refused(database: Database, open_one: Callable[[], Database]) -> None:
    with database.transaction(writes=True) as connection:
        connection.exec_driver_sql("UPDATE rag_pipeline_version SET version_num = '9999'")
    with pytest.raises(RefusedError, match="schema 9999"):
        open_one().upgrade()
    assert "schema 9999" in open_one().problem()


def test_a_table_of_another_program_is_refused(open_one: Callable[[], Database], url: str, state: Path) -> None:
    from rag_pipeline.invocations.connecting import engine_for, target_of

    state.mkdir()
    (state / "invocations.db").touch()
    engine = engine_for(target_of(url, state=state), wait_s=5, connect_s=5)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE tool_invocation (id INTEGER PRIMARY KEY, payload TEXT)")
    with pytest.raises(RefusedError, match="of another program"):
        open_one().upgrade()
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE tool_invocation")
    engine.dispose()
    assert open_one().upgrade() == (SCHEMA_REVISION,)


def test_every_field_comes_back(store: InvocationStore) -> None:
    rows = [
        invocation(),
        invocation(success=False, l0_match_count=2**62, duration_ms=0.1 + 0.2, created_at=START.replace(year=1971)),
        invocation(retrieval_details={}, input_params={}, stage_ms={}, output_preview="", session_id=""),
    ]
    assert store.insert(rows) == {}
    for row in rows:
        assert store.get(row.id) == row


def test_the_same_id_again_keeps_the_first_row(store: InvocationStore) -> None:
    first = invocation()
    assert store.insert([first, first]) == {}
    assert store.insert([invocation(id=first.id, output_preview="another"), invocation()]) == {}
    assert store.count() == 2
    assert store.get(first.id) == first


def test_eight_writers_of_the_same_rows_make_each_row_once(store: InvocationStore) -> None:
    rows = series(300)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            store.insert(rows)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.count() == 300


@pytest.mark.parametrize(
    "text",
    [
        "😀👩‍👩‍👧",
        "𠀀𪚥 四字节",
        "a\x00b",
        "\ud800 alone",
        "tail ",
        " ",
        "\\ ' \" % ? :x",
        "x" * 100_000,
        "\u2028\x7f\r\n",
        "é e\u0301",
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_texts_that_databases_stumble_over(text: str, store: InvocationStore) -> None:
    written = invocation(
        output_preview=text,
        dedup_reason=text,
        session_id=text[:255],
        tool_name=text[:255],
        input_params={"query": text, text: 1},
        retrieval_details={"deep": [{text: text}]},
    )
    assert store.insert([written]) == {}
    assert store.get(written.id) == written.storable()
    assert store.get(written.id).output_preview == storable_text(text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(text=TEXTS, value=JSON, number=st.integers(0, 2**128 - 1))
def test_any_text_comes_back_in_its_storable_form(
    text: str, value: object, number: int, store: InvocationStore
) -> None:
    written = invocation(
        id=f"{number:032x}",
        session_id=text[:255],
        output_preview=text,
        input_params={"query": text},
        retrieval_details={text: value},
    )
    kept = store.get(written.id) or written
    assert store.insert([written]) == {}
    assert store.get(written.id) == kept.storable()


def test_a_deep_nest_and_a_long_record_are_taken(store: InvocationStore) -> None:
    nest: object = "bottom"
    for _ in range(60):
        nest = {"in": [nest]}
    written = invocation(retrieval_details={"nest": nest, "long": "中" * 300_000})
    assert store.insert([written]) == {}
    assert store.get(written.id) == written.storable()


def test_a_row_that_the_database_refuses_does_not_lose_the_others(
    store: InvocationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rag_pipeline.invocations import tables

    rows = series(250)
    bad = rows[123].id
    good = tables.row_of
    monkeypatch.setattr(tables, "row_of", lambda row: {**good(row), **({"tool_name": None} if row.id == bad else {})})
    assert list(store.insert(rows)) == [bad]
    assert store.count() == 249


def test_details_are_amended_in_order_and_twice_is_as_once(store: InvocationStore) -> None:
    rows = [invocation(retrieval_details={"n": number, "text": "连接 😀"}) for number in range(450)]
    store.insert(rows)
    absent = invocation().id
    amendments = [
        *(Amendment(row.id, {"sidecar": {"status": "中", "n": row.retrieval_details["n"]}}) for row in rows),
        Amendment(absent, {"n": 0}),
        Amendment(rows[0].id, {"n": [None]}),
        Amendment(rows[0].id, {"n": "\x00'\\"}),
    ]
    for _ in range(2):
        assert store.amend(amendments) == {absent: ""}
        assert store.get(rows[0].id) == replace(
            rows[0], retrieval_details={"n": "\ufffd'\\", "text": "连接 😀", "sidecar": {"status": "中", "n": 0}}
        )
        assert store.get(rows[-1].id).retrieval_details["sidecar"] == {"status": "中", "n": 449}
    assert store.count() == 450
    assert store.amend([]) == {}


def test_the_list_is_newest_first_and_equal_times_go_by_id(store: InvocationStore) -> None:
    ties = [invocation(id=f"{digit}" * 32) for digit in "a3f0"]
    later = invocation(id="1" * 32, created_at=START + timedelta(milliseconds=1), session_id="other")
    store.insert([*ties, later])
    assert [row.id[0] for row in store.list()] == ["1", "f", "a", "3", "0"]
    assert [row.id[0] for row in store.list(limit=2)] == ["1", "f"]
    assert [row.id[0] for row in store.list(before=later.created_at, limit=3)] == ["f", "a", "3"]
    assert [row.id[0] for row in store.list(session_id="other")] == ["1"]
    assert store.get("aaaaaa") == ties[0]
    assert store.get("aaaaab") is None


def test_sessions_are_told_apart_by_every_byte(store: InvocationStore) -> None:
    names = ("a", "A", "á", "a\u0301", "ä", "ａ")
    store.insert([invocation(session_id=name) for name in names])
    for name in names:
        assert [row.session_id for row in store.list(session_id=name)] == [name]


def test_a_purge_deletes_what_is_older_and_only_that(store: InvocationStore, database: Database) -> None:
    memory = SessionMemory(database, timeout_ms=10_000)
    assert memory.remember("s", FIRST, ["k"], ["d"]).written
    rows = series(450)
    store.insert(rows)
    assert store.purge(rows[443].created_at) == 443
    assert store.list(limit=100) == tuple(rows[:442:-1])
    assert memory.recall("s").state == SessionState({"k": FIRST}, ("d",))
    assert store.purge(START + timedelta(days=100_000)) == 7
    assert memory.recall("s").state == SessionState()


def test_two_engines_share_a_session_and_the_first_write_wins(
    database: Database, open_one: Callable[[], Database]
) -> None:
    one, other = (SessionMemory(each, timeout_ms=10_000) for each in (database, open_one()))
    keys = ["文档/a.md#😀", "K", "k", "k ", "x" * 4000]
    assert one.remember("s", FIRST, keys, ["redis", "运维"]).written
    assert other.remember("s", SECOND, [*keys, "new"], ["Redis"]).written
    expected = SessionState({**dict.fromkeys(keys, FIRST), "new": SECOND}, ("Redis", "redis", "运维"))
    assert one.recall("s").state == other.recall("s").state == expected
    assert one.recall("S").state == SessionState()


def test_many_writers_of_one_session_do_not_fail(database: Database, open_one: Callable[[], Database]) -> None:
    memories = [SessionMemory(each, timeout_ms=30_000) for each in (database, open_one())]
    failures: list[str] = []

    def lookups(number: int) -> None:
        for step in range(10):
            keys = [f"key {(step + at * number) % 17}" for at in range(5)]
            outcome = memories[number % 2].remember("s", f"{number:032x}", keys, [f"d{number}"])
            failures.extend(filter(None, [outcome.failure]))

    threads = [threading.Thread(target=lookups, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert memories[0].recall("s") == memories[1].recall("s")


def test_a_forked_child_leaves_its_parents_connections_alone(database: Database, url: str, state: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline_tests.invocations.samples import invocation, open_database
state = Path(sys.argv[1])
database = open_database(state, url=sys.argv[2])
recorder = InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)
recorder.record(invocation())
assert recorder.flush(30)
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        recorder.record(invocation())
        os._exit(0 if recorder.flush(30) else 1)
    recorder.record(invocation())
    assert os.waitpid(pid, 0)[1] == 0
    assert recorder.flush(30) and InvocationStore(database).count() > 0
print(InvocationStore(database).count())
"""
    assert run_python(script, state, url).strip() == "11"


@pytest.mark.fault
def test_killed_while_recording_no_line_is_lost_and_none_is_there_twice(
    database: Database, store: InvocationStore, url: str, state: Path
) -> None:
    told: set[str] = set()
    for trial in range(10):
        process = subprocess.Popen(
            [sys.executable, "-m", "rag_pipeline_tests.invocations.recording_process", str(state), url, "2"],
            stdout=subprocess.PIPE,
            cwd=PROJECT,
        )
        first = process.stdout.readline()
        time.sleep(0.08 * trial)
        process.kill()
        rest, _ = process.communicate()
        told |= {line.decode() for line in (first + rest).splitlines() if len(line) == 32}
    recorder = InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)
    recorder.record(invocation())
    assert recorder.flush(LIMIT_S)
    recorder.close()
    ids = {row.id for row in store.list(limit=1_000_000)}
    assert told - ids == set()
    assert len(ids) == store.count() <= len(told) + 2 * 10 + 1


@pytest.mark.fault
def test_the_server_is_stopped_and_started_again(server: DatabaseServer, state: Path) -> None:
    """Records wait in the spool and are written once; sessions fail in time and recover, without a restart."""
    database = open_database(state, url=server.new_database())
    database.upgrade()
    store = InvocationStore(database)
    recorder = InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)
    memory = SessionMemory(database, timeout_ms=50)
    patient = SessionMemory(database, timeout_ms=20_000)
    rows = series(60)
    for row in rows[:20]:
        recorder.record(row)
    assert recorder.flush(LIMIT_S)
    assert patient.remember("s", FIRST, ["a"], ["d"]).written
    server.stop()
    try:
        for row in rows[20:40]:
            recorder.record(row)
        assert not recorder.flush(1)
        assert recorder.last_failure
        recalled = memory.recall("s")
        assert recalled.state is None
        assert recalled.failure
        with pytest.raises(StoreUnavailableError) as caught:
            store.count()
        assert "s3cret" not in str(caught.value)
        assert recorder.waiting() > 0
    finally:
        server.start()
    for row in rows[40:]:
        recorder.record(row)
    assert recorder.flush(LIMIT_S), recorder.last_failure
    assert store.list(limit=100) == tuple(reversed(rows))
    assert recorder.waiting() == 0
    assert patient.recall("s").state == SessionState({"a": FIRST}, ("d",))
    assert recorder.close(LIMIT_S)
    database.close()


@pytest.mark.fault
def test_the_server_is_frozen(server: DatabaseServer, state: Path) -> None:
    """Neither recording nor sessions wait for it; both go on when it does."""
    database = open_database(state, url=server.new_database(), timeout_s=3)
    database.upgrade()
    store = InvocationStore(database)
    recorder = InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)
    memory = SessionMemory(database, timeout_ms=50)
    patient = SessionMemory(database, timeout_ms=20_000)
    assert patient.remember("s", FIRST, ["a"], []).written
    rows = series(20)
    recorder.record(rows[0])
    assert recorder.flush(LIMIT_S)
    server.signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        outcomes = [memory.recall("s") for _ in range(20)] + [memory.remember("s", SECOND, ["b"], [])]
        for row in rows[1:]:
            recorder.record(row)
        assert time.monotonic() - begin < 10  # 21 calls that waited for the server would take a minute
        assert all(outcome.failure for outcome in outcomes)
        assert not recorder.flush(1)
    finally:
        server.signal(signal.SIGCONT)
    assert recorder.flush(LIMIT_S), recorder.last_failure
    assert store.list(limit=100) == tuple(reversed(rows))
    deadline = time.monotonic() + LIMIT_S
    while memory.recall("s").failure and time.monotonic() < deadline:
        time.sleep(0.05)
    assert memory.recall("s").state == SessionState({"a": FIRST})
    assert recorder.close(LIMIT_S)
    database.close()


@pytest.mark.fault
def test_all_connections_are_cut(server: DatabaseServer, state: Path) -> None:
    """What an administrator or a proxy does to idle connections: the next use opens new ones."""
    url = server.new_database()
    database = open_database(state, url=url)
    database.upgrade()
    store = InvocationStore(database)
    store.insert([invocation()])
    if server.name == "postgresql":
        server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'rag_%%'")
    else:
        name = url.rsplit("/", 1)[1]
        for (thread,) in server.execute(f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"):
            server.execute(f"KILL {thread}")
    assert store.insert([invocation()]) == {}
    assert store.count() == 2
    database.close()


@pytest.mark.fault
def test_a_lock_of_another_client_ends_in_time(server: DatabaseServer, state: Path) -> None:
    """A locked table: sessions give up within their limit, the recorder spools, and both recover."""
    import sqlalchemy as sa

    url = server.new_database()
    database = open_database(state, url=url, timeout_s=1)
    database.upgrade()
    recorder = InvocationRecorder(database, spool_folder=state / "spool", retention_days=0)
    memory = SessionMemory(database, timeout_ms=50)
    patient = SessionMemory(database, timeout_ms=20_000)
    assert patient.remember("s", FIRST, ["a"], []).written
    one = invocation()
    engine = sa.create_engine(url)
    with engine.connect() as other:
        if server.name == "postgresql":
            other.exec_driver_sql("LOCK TABLE tool_invocation, session_evidence IN ACCESS EXCLUSIVE MODE")
        else:
            other.exec_driver_sql("LOCK TABLES tool_invocation WRITE, session_evidence WRITE")
        begin = time.monotonic()
        recorder.record(one)
        assert not memory.remember("s", SECOND, ["a", "b"], []).written
        assert time.monotonic() - begin < 5
        assert not recorder.flush(0.5)
        if server.name == "mariadb":
            other.exec_driver_sql("UNLOCK TABLES")
        other.rollback()
    engine.dispose()
    assert recorder.flush(LIMIT_S), recorder.last_failure
    assert InvocationStore(database).get(one.id) == one
    assert patient.remember("s", SECOND, ["a", "c"], []).written
    assert patient.recall("s").state == SessionState({"a": FIRST, "c": SECOND})
    assert recorder.close(LIMIT_S)
    database.close()


@pytest.mark.database_server
def test_a_wrong_password_is_unavailable_and_is_not_shown(server: DatabaseServer, state: Path) -> None:
    url = server.new_database().replace("s3cret-of-tests", "hunter2")
    problem = open_database(state, url=url).problem()
    assert "127.0.0.1" in problem
    assert "hunter2" not in problem


@pytest.mark.database_server
def test_servers_listen_on_loopback_only(server: DatabaseServer) -> None:
    import psutil

    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
    ]
    assert set(listening) == {"127.0.0.1"}
