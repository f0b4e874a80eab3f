"""Invocations to record."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline.invocations.records import Invocation, new_invocation_id
from rag_pipeline.setting_groups import DatabaseSettings

START = datetime(2026, 5, 4, 12, 0, 0, 123_000, tzinfo=UTC)


def invocation(**values: Any) -> Invocation:
    """One with a value in every field; named ones are replaced."""
    full = Invocation(
        id=new_invocation_id(),
        session_id="incident-4711",
        tool_name="lookup_knowledge",
        input_params={"query": "Redis 连接数打满，怎么排查？"},
        output_preview="[1] Redis clients 😀",
        retrieval_layer="L0+L1",
        l0_match_count=2,
        l1_match_count=30,
        retrieval_details={"query_transform": {"l0": {"matched_titles": ["Redis 连接"]}}, "scores": [0.5, -1, None]},
        relevance_level="highly_relevant",
        evidence_status="evidence",
        dedup_reason="same content",
        duration_ms=12.345678901234,
        stage_ms={"l0": 0.25, "l1": 7.5},
        success=True,
        index_fingerprint="f" * 64,
        created_at=START,
    )
    return replace(full, **values)


def series(count: int) -> list[Invocation]:
    """Invocations a millisecond apart, oldest first."""
    return [invocation(created_at=START + timedelta(milliseconds=number)) for number in range(count)]


def open_database(state: Path, *, url: str = "", timeout_s: float = 2) -> Database:
    """A second opening of a state folder's database, as another process has it."""
    return Database(DatabaseSettings(url=url, timeout_s=timeout_s), state=state)


def run_python(script: str, *arguments: object, obeys_modes: bool = False, check: bool = True) -> str:
    """Run a script in a process of its own; returns what it prints.

    With ``obeys_modes`` it may not write to read-only files, even when it is root's.
    """
    before = ["setpriv", "--bounding-set=-dac_override"] if obeys_modes and os.geteuid() == 0 else []
    done = subprocess.run(
        [*before, sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def failure_of(recorder: InvocationRecorder, *words: str, limit_s: float = 30) -> str:
    """The last failure with any of ``words``, waited for: on a busy machine an attempt takes its time."""
    deadline = time.monotonic() + limit_s
    while not any(word in recorder.last_failure for word in words or (" ",)):
        assert not recorder.flush(0.2)
        assert time.monotonic() < deadline, f"{words} not in {recorder.last_failure!r}"
    return recorder.last_failure
