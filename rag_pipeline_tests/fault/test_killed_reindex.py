"""``kill -9`` in every step and at random moments: alias complete, next run converges, no debris."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rag_pipeline import reindex, release
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import write

Open = Callable[..., Workspace]

# In the order in which a run with a change comes by.
PLACES = (
    "read", "prune", "chunk", "after:chunk", "embed", "after:embed", "index", "check", "create", "write", "after:write",
    "verify", "publish", "promote", "moved",
)  # fmt: skip


def flags_of(ws: Workspace) -> str:
    settings = ws.settings
    return json.dumps({
        "state_dir": str(settings.state_dir),
        "knowledge.roots": [str(root.path) for root in settings.knowledge.roots],
        "embedding.model": settings.embedding.model,
        "chunking.soft_tokens": settings.chunking.soft_tokens,
        "chunking.hard_tokens": settings.chunking.hard_tokens,
        "index.grace_s": settings.index.grace_s,
    })  # fmt: skip


def start(ws: Workspace, where: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rag_pipeline_tests.fault.killed_reindex", flags_of(ws), where],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def rows_of(ws: Workspace) -> list[dict[str, object]]:
    return ws.store.rows(ws.versions.promoted().collection, vectors=True)


def assert_same(rows: list[dict[str, object]], wanted: list[dict[str, object]]) -> None:
    plain = [
        [{name: value for name, value in row.items() if name != "vector"} for row in part] for part in (rows, wanted)
    ]
    assert plain[0] == plain[1]
    np.testing.assert_allclose([row["vector"] for row in rows], [row["vector"] for row in wanted], atol=1e-5)


def assert_no_debris(ws: Workspace) -> None:
    collections = ws.store.collections()
    assert [manifest.state for manifest in ws.versions.all()] == ["built"] * len(collections)
    assert len(collections) <= ws.settings.index.keep_versions
    assert ws.artifacts.collections() == collections
    assert [str(path) for path in ws.state.rglob("*.aside")] == []


@pytest.mark.fault
@pytest.mark.parametrize("where", PLACES)
def test_killed_in_a_step_loses_nothing_and_leaves_nothing(
    open_workspace: Open, knowledge: Path, tmp_path: Path, where: str
) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    old = rows_of(ws)
    write(knowledge / "cache/new.md", "# New\n\nA new runbook.\n\n## Steps\n\nDo it.\n")
    (knowledge / "cache/redis-clients.md").unlink()
    undisturbed = open_workspace(state_dir=tmp_path / "undisturbed")
    reindex.reindex(undisturbed)
    wanted = rows_of(undisturbed)

    killed = start(ws, where)
    assert (killed.communicate(timeout=120)[0].strip(), killed.returncode) == ("started", -signal.SIGKILL)
    assert_same(rows_of(ws), wanted if where == "moved" else old)
    assert VectorSearch(ws, mode="sdk").nearest("Redis memory", top_k=3)

    outcome = reindex.reindex(ws)
    assert outcome.result == ("unchanged" if where == "moved" else "promoted")
    assert_same(rows_of(ws), wanted)
    assert ws.artifacts.read_promoted("knowledge") == outcome.manifest.collection
    write(knowledge / "cache/another.md", "# Another\n\nText.\n")
    reindex.reindex(ws)
    release.prune(ws)
    assert_no_debris(ws)


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_moments_it_converges_every_time(open_workspace: Open, knowledge: Path) -> None:
    ws = open_workspace()
    reindex.reindex(ws)
    chance = random.Random(20261130)
    killed = 0
    for trial in range(60):
        write(knowledge / "cache/new.md", f"# New\n\nTrial {trial}.\n\n## Steps\n\nDo it {trial} times.\n")
        process = start(ws, "nowhere")
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(chance.uniform(0.0, 6.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        promoted = ws.versions.promoted()
        assert promoted is not None
        assert ws.store.count(promoted.collection) == promoted.chunks
        if trial % 10 == 9:
            reindex.reindex(ws)
            assert any(f"Trial {trial}." in str(row["content"]) for row in rows_of(ws))
            release.prune(ws)
            assert_no_debris(ws)
    assert killed >= 30
