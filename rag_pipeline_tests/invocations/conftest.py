"""A database of invocations in a state folder of the test, and what goes into it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline.setting_groups import DatabaseSettings


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def empty_database(state: Path) -> Iterator[Database]:
    """A database that was never upgraded, so there is no file."""
    database = Database(DatabaseSettings(timeout_s=2), state=state)
    yield database
    database.close()


@pytest.fixture
def database(empty_database: Database) -> Database:
    empty_database.upgrade()
    return empty_database


@pytest.fixture
def store(database: Database) -> InvocationStore:
    return InvocationStore(database)
