"""The database by its settings, its schema, and the errors it raises."""

import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rag_pipeline.errors import ConfigurationError, RefusedError, StoreUnavailableError
from rag_pipeline.invocations.database import SCHEMA_REVISION, Database
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline_tests.invocations.samples import invocation, open_database, run_python

MODULES = (
    "connecting", "database", "forking", "records", "recorder", "redaction", "session_memory", "spool", "store",
    "upgrading",
)  # fmt: skip


def test_importing_the_package_loads_no_database_library() -> None:
    script = "import sys\n" + "\n".join(f"import rag_pipeline.invocations.{name}" for name in MODULES)
    script += "\nprint(sorted({'sqlalchemy', 'alembic', 'dagster', 'psycopg', 'pymysql'} & set(sys.modules)))"
    assert run_python(script).strip() == "[]"


def test_a_database_that_was_never_made_says_so_and_is_not_made_by_looking(state: Path) -> None:
    database = open_database(state)
    assert not database.ready()
    assert "There is no database yet" in database.problem()
    assert "rag-pipeline db upgrade" in database.problem()
    with pytest.raises(StoreUnavailableError, match="no database yet"):
        InvocationStore(database).list()
    assert not state.exists()


def test_an_upgrade_makes_the_tables_once(empty_database: Database, state: Path) -> None:
    assert empty_database.upgrade() == (SCHEMA_REVISION,)
    assert empty_database.upgrade() == ()
    assert empty_database.problem() == ""
    assert empty_database.ready()
    file = state / "invocations.db"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_code_knows_the_newest_migration_and_they_form_one_line() -> None:
    from alembic.script import ScriptDirectory

    from rag_pipeline.invocations.upgrading import alembic_config

    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [SCHEMA_REVISION]


def test_the_migrations_make_the_tables_that_the_code_uses(database: Database) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    from rag_pipeline.invocations.tables import VERSION_TABLE, metadata

    with database.transaction() as connection:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


def test_a_new_migration_can_be_written_from_the_template(tmp_path: Path) -> None:
    import shutil

    from alembic import command

    from rag_pipeline.invocations.upgrading import alembic_config

    config = alembic_config()
    copy = tmp_path / "100% migrations"
    shutil.copytree(str(config.get_main_option("script_location")), copy)
    config.set_main_option("script_location", str(copy).replace("%", "%%"))
    script = command.revision(config, "Add a column", rev_id="0002")
    source = Path(script.path).read_text(encoding="utf-8")
    assert "revision = '0002'" in source
    compile(source, script.path, "exec")


def test_a_newer_schema_is_refused_and_nothing_is_written(database: Database, state: Path) -> None:
    InvocationStore(database).insert([invocation()])
    with sqlite3.connect(state / "invocations.db") as connection:
        connection.execute("UPDATE rag_pipeline_version SET version_num = '9999'")
    before = _dump(state)
    newer = open_database(state)
    with pytest.raises(RefusedError, match=r"schema 9999.*Nothing was written"):
        newer.upgrade()
    with pytest.raises(StoreUnavailableError, match="has schema 9999, this version needs 0001"):
        InvocationStore(newer).insert([invocation()])
    assert not newer.ready()
    assert _dump(state) == before


def test_a_table_of_another_program_is_refused_and_nothing_is_written(state: Path) -> None:
    state.mkdir()
    with sqlite3.connect(state / "invocations.db") as connection:
        connection.execute("CREATE TABLE tool_invocation (id INTEGER PRIMARY KEY, payload TEXT)")
    before = _dump(state)
    with pytest.raises(RefusedError, match="tool_invocation of another program"):
        open_database(state).upgrade()
    assert _dump(state) == before


def test_a_file_that_is_no_database_is_unavailable(state: Path) -> None:
    state.mkdir()
    (state / "invocations.db").write_bytes(b"# Not a database at all\n" * 100)
    with pytest.raises(StoreUnavailableError, match="file is not a database"):
        open_database(state).upgrade()
    assert "file is not a database" in open_database(state).problem()


def test_an_upgrade_where_nothing_can_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(StoreUnavailableError, match="cannot be upgraded"):
        open_database(tmp_path / "state").upgrade()


def test_a_database_that_was_made_again_is_used_without_a_restart(database: Database, state: Path) -> None:
    store = InvocationStore(database)
    store.insert([invocation()])
    for file in state.glob("invocations.db*"):
        file.unlink()
    with pytest.raises(StoreUnavailableError):
        store.insert([invocation()])
    assert not database.ready()
    assert not (state / "invocations.db").exists()
    open_database(state).upgrade()
    store.insert([invocation()])
    assert store.count() == 1


def test_a_forked_child_does_not_use_the_connections_of_its_parent(state: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from rag_pipeline_tests.invocations.samples import invocation, open_database
from rag_pipeline.invocations.store import InvocationStore
database = open_database(Path(sys.argv[1])); database.upgrade()
store = InvocationStore(database); store.insert([invocation()])
parent = {id(engine) for engine in database._engines.values()}
pid = os.fork()
store.insert([invocation()])
if pid == 0:
    assert not parent & {id(engine) for engine in database._engines.values()}
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(store.count())
"""
    assert run_python(script, state).strip() == "3"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "is no database URL"),
        ("postgresql://me:hunter2@host:port/x", "is no database URL"),
        ("oracle://me:hunter2@host/x", "names 'oracle', which is not supported"),
        ("postgresql+asyncpg://me:hunter2@host/x", "'postgresql\\+asyncpg', which is not supported"),
        ("postgresql://me:hunter2@host", "names no database"),
        ("sqlite://", "by its absolute path"),
        ("sqlite:///relative.db", "by its absolute path"),
        ("sqlite:////folder/file.db?mode=memory", "without options"),
    ],
)
def test_a_wrong_url_is_a_configuration_error_that_shows_no_password(url: str, message: str, state: Path) -> None:
    database = open_database(state, url=url)
    with pytest.raises(ConfigurationError, match=message) as caught:
        database.upgrade()
    assert "hunter2" not in str(caught.value)
    assert not database.ready()
    assert not state.exists()


LONG = "h" * 64


@pytest.mark.parametrize(
    ("url", "message", "exit_code"),
    [
        ("mysql://me:hunter2@a..b/x", "no name of a host", 2),
        ("postgresql://me:hunter2@a..b/x", "no name of a host", 2),
        (f"mysql://me:hunter2@{LONG}.example/x", "no name of a host", 2),
        (f"postgresql://me:hunter2@/x?host={LONG}.example", "PostgreSQL", None),
        ("mysql://me:hunter2@127.0.0.1:1/x?foo=bar", "foo", 2),
        ("mysql://me:hunter2@127.0.0.1:1/x?port=abc", "port", 2),
        ("mysql://me:hunter2@127.0.0.1:1/x?connect_timeout=abc", "MySQL", None),
        ("mysql://me:hunter2@127.0.0.1:1/x?charset=klingon", None, None),
        ("mysql://me:hunter2@127.0.0.1:1/x?ssl_ca=/nowhere/ca.pem", "No such file", 3),
        ("mysql://me:hunter2@127.0.0.1:1/x?read_default_file=/nowhere/my.cnf", None, None),
        ("mysql://me:hunter2@127.0.0.1:1/x?plugin=nonsense", None, None),
        ("postgresql://me:hunter2@127.0.0.1:1/x?foo=bar", "foo", 3),
        ("postgresql://me:hunter2@127.0.0.1:1/x?sslmode=hunter2&password=hunter2", "sslmode", 3),
        ("postgresql://me:hunter2@127.0.0.1:1/x?port=abc", "abc", 3),
        ("postgresql://me:hunter2@127.0.0.1:1/x?sslrootcert=/nowhere/ca.pem&sslmode=verify-full", None, 3),
        ("sqlite:////tmp/a%00b", "NUL", 2),
        (f"sqlite:////tmp/{'x' * 300}", "too long", 3),
        ("sqlite:////dev/null/x.db", None, 3),
        ("sqlite:////proc/nowhere/x.db", None, 3),
    ],
)
def test_a_url_that_a_driver_stumbles_over_ends_in_a_message_and_an_exit_code(
    url: str, message: str | None, exit_code: int | None, state: Path
) -> None:
    for attempt in (Database.upgrade, Database.require_ready):
        with pytest.raises((ConfigurationError, StoreUnavailableError), match=message) as caught:
            attempt(open_database(state, url=url))
        shown = str(caught.value)
        assert caught.value.exit_code == exit_code or exit_code is None or "no database yet" in shown
        assert "hunter2" not in shown
        assert "state folder writable" not in shown or url.startswith("sqlite")


def test_the_examples_of_a_message_survive_its_masking(state: Path) -> None:
    from rag_pipeline.settings import masked

    problem = open_database(state, url="nonsense").problem()
    assert "postgresql://host/database" in problem
    assert masked(problem) == problem


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("postgresql://me:hunter2@host/x", "psycopg", "rag-pipeline[postgresql]"),
        ("mysql://me:hunter2@host/x", "pymysql", "rag-pipeline[mysql]"),
        ("mariadb+pymysql://me:hunter2@host/x", "pymysql", "rag-pipeline[mysql]"),
    ],
)
def test_a_missing_driver_names_the_extra_to_install(
    url: str, module: str, extra: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rag_pipeline.invocations.connecting.importlib.util.find_spec",
        lambda name: None if name == module else object(),
    )
    problem = open_database(state, url=url).problem()
    assert f"pip install '{extra}'" in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@127.0.0.1:1/x", "mysql://me:hunter2@127.0.0.1:1/x"])
def test_a_server_that_is_not_there_is_unavailable(url: str, state: Path) -> None:
    database = open_database(state, url=url)
    for attempt in (database.upgrade, database.require_ready, InvocationStore(database).count):
        with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1") as caught:
            attempt()
        assert caught.value.exit_code == 3
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "description"),
    [
        ("", "SQLite at {state}/invocations.db"),
        ("sqlite:////data/x.db", "SQLite at /data/x.db"),
        ("postgres://me:hunter2@db:5433/ops", "PostgreSQL at db:5433, database ops"),
        ("postgresql:///ops?host=/run/pg&password=hunter2", "PostgreSQL at /run/pg, database ops"),
        ("mysql+pymysql://hunter2@db/ops?unix_socket=/s", "MySQL or MariaDB at db, database ops"),
    ],
)
def test_the_description_says_where_without_user_and_password(url: str, description: str, state: Path) -> None:
    assert open_database(state, url=url).description == description.format(state=state)


def test_a_place_with_odd_characters_is_one_file(tmp_path: Path) -> None:
    state = tmp_path / "50% of #1? & 状态 'x'"
    database = open_database(state)
    database.upgrade()
    InvocationStore(database).insert([invocation()])
    database.close()
    assert (state / "invocations.db").stat().st_size > 0
    assert InvocationStore(open_database(state)).count() == 1


def test_an_upgrade_waits_for_the_lock_of_the_state_folder(
    database: Database, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    monkeypatch.setattr("rag_pipeline.invocations.upgrading._LOCK_LIMIT_S", 0.1)
    with FileLock(state / "locks" / "database.lock"), pytest.raises(RefusedError, match="Another process"):
        database.upgrade()
    assert database.upgrade() == ()


def test_two_processes_upgrade_at_once(state: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from rag_pipeline_tests.invocations.samples import open_database\n"
        "print(open_database(Path(sys.argv[1])).upgrade())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(state)], stdout=subprocess.PIPE, text=True, cwd=_project())
        for _ in range(3)
    ]
    printed = sorted(process.communicate(timeout=60)[0].strip() for process in started)
    assert printed == ["('0001',)", "()", "()"]


def _project() -> Path:
    return Path(__file__).parents[2]


def _dump(state: Path) -> list[str]:
    connection = sqlite3.connect(f"file:{state}/invocations.db?mode=ro", uri=True)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()
