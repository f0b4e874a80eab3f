"""The main job and its readers behave alike on every store."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rag_pipeline import reindex, release
from rag_pipeline.errors import RefusedError
from rag_pipeline.retrieval.vector_search import VectorSearch
from rag_pipeline.watch import Watch
from rag_pipeline.workspace import Workspace
from rag_pipeline_tests.conftest import write

pytestmark = pytest.mark.slow

Open = Callable[..., Workspace]


def contents(ws: Workspace) -> tuple[list[dict[str, object]], list[list[float]]]:
    """Rows of the promoted version without their vectors, and the vectors."""
    rows = ws.store.rows(ws.versions.promoted().collection, vectors=True)
    return [{k: v for k, v in row.items() if k != "vector"} for row in rows], [row["vector"] for row in rows]


def add(root: Path) -> None:
    write(root / "cache/new.md", "# New\n\nA new runbook.\n\n## Steps\n\nDo it.\n")


def edit(root: Path) -> None:
    file = root / "cache/redis-memory.md"
    file.write_text(file.read_text().replace("INFO memory", "MEMORY DOCTOR"))


def rename(root: Path) -> None:
    (root / "kubernetes/oom.md").rename(root / "kubernetes/pod-oomkilled.md")


def delete(root: Path) -> None:
    (root / "cache/redis-clients.md").unlink()


def move(root: Path) -> None:
    (root / '宿"主\\机').mkdir()
    (root / "kubernetes/disk.md").rename(root / '宿"主\\机/disk.md')


def test_a_knowledge_base_lives_through_its_changes(
    ws: Workspace, open_workspace: Open, flags: dict[str, object], knowledge: Path
) -> None:
    first = reindex.reindex(ws)
    assert (first.result, first.manifest.documents, first.embedded) == ("promoted", 4, first.manifest.chunks)
    assert ws.store.manifest_json(first.manifest.collection) == first.manifest.to_json()
    again = reindex.reindex(ws)
    assert (again.result, again.embedded, again.pruned) == ("unchanged", 0, ())

    embedded = []
    for change in (add, edit, rename, delete, move):
        change(knowledge)
        outcome = reindex.reindex(ws)
        embedded.append(outcome.embedded)
        assert (outcome.result, outcome.manifest.applied_by) == ("promoted", "sync"), change
        assert ws.versions.promoted() == outcome.manifest
    assert embedded == [2, 1, 0, 0, 0]
    kept = [manifest.collection for manifest in ws.versions.all()]
    assert len(kept) <= 3
    assert kept == [name for name in ws.store.collections() if name.startswith(ws.settings.index.alias)]

    hits = VectorSearch(ws, mode="sdk").nearest("清理镜像", top_k=10, category='宿"主\\机')
    assert {hit.metadata["source"] for hit in hits} == {'宿"主\\机/disk.md'}

    synced = contents(ws)
    rebuilt = reindex.reindex(ws, full=True)
    assert (rebuilt.manifest.applied_by, rebuilt.manifest.fingerprint) == ("rebuild", outcome.manifest.fingerprint)
    assert contents(ws) == synced
    elsewhere = reindex.reindex(open_workspace(**flags, state_dir=ws.state.parent / "elsewhere"), full=True)
    assert elsewhere.embedded == elsewhere.manifest.chunks
    rows, vectors = contents(ws)
    assert rows == synced[0]
    np.testing.assert_allclose(vectors, synced[1], atol=1e-5)


def test_rollback_takes_under_five_seconds_and_can_be_undone(ws: Workspace, knowledge: Path) -> None:
    first = reindex.reindex(ws).manifest
    add(knowledge)
    second = reindex.reindex(ws).manifest
    began = time.monotonic()
    assert release.rollback(ws).collection == first.collection
    assert time.monotonic() - began < 5.0
    assert ws.store.alias_target(ws.settings.index.alias) == first.collection
    with pytest.raises(RefusedError, match="rolled back"):
        reindex.reindex(ws)
    assert release.rollback(ws, to=second.collection).collection == second.collection
    assert reindex.reindex(ws).result == "unchanged"
    with pytest.raises(RefusedError, match="points to"):
        ws.store.drop(second.collection)


def test_debris_of_a_killed_run_is_pruned(ws: Workspace, knowledge: Path) -> None:
    first = reindex.reindex(ws).manifest
    add(knowledge)

    def die(step: str) -> None:
        if step == "publish":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reindex.reindex(ws, watch=Watch(at_step=die))
    (debris,) = [manifest.collection for manifest in ws.versions.all() if manifest.state == "building"]
    assert ws.versions.promoted().collection == first.collection
    assert reindex.reindex(ws).pruned == (debris,)
    assert not ws.store.exists(debris)


def set_release(root: Path, number: int) -> None:
    for file in root.rglob("*.md"):
        title = file.stem
        file.write_text(f"# {title}\n\nRelease {number}.\n\n## Steps\n\nSteps of {title} in release {number}.\n")


def test_readers_see_no_error_and_no_mixture_while_versions_come_and_go(
    open_workspace: Open, flags: dict[str, object], ws: Workspace, knowledge: Path
) -> None:
    writer = open_workspace(**flags, index__keep_versions=1, index__grace_s=2.0)
    set_release(knowledge, 0)
    reindex.reindex(writer)
    ended = threading.Event()
    seen: list[int] = []
    faults: list[object] = []

    def read() -> None:
        search = VectorSearch(ws, mode="sdk")
        while not ended.is_set():
            try:
                hits = search.nearest("steps of a release", top_k=50)
            except Exception as error:  # whatever it is, a reader must not see it
                faults.append(error)
                continue
            releases = {int(hit.content.rpartition("elease ")[2].rstrip(".\n")) for hit in hits}
            if len(hits) != 8 or len(releases) != 1:
                faults.append((len(hits), releases))
            seen.extend(releases)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    pruned = 0
    for number in range(1, 6):
        set_release(knowledge, number)
        pruned += len(reindex.reindex(writer).pruned)
        time.sleep(1.2)
    ended.set()
    for reader in readers:
        reader.join()
    assert faults == []
    assert set(seen) == set(range(6))
    assert pruned >= 2
    assert len(seen) > 100


OTHER_PROCESS = """
import json, sys
from pathlib import Path
from rag_pipeline import reindex
from rag_pipeline.settings import load_settings
from rag_pipeline.workspace import Workspace
flags, root = json.loads(sys.argv[1]), Path(sys.argv[2])
print(reindex.reindex(Workspace(load_settings(flags=flags, project_root=root))).manifest.collection)
"""


def test_a_reindex_in_another_process_reaches_a_reader_within_two_seconds(
    ws: Workspace, knowledge: Path, tmp_path: Path
) -> None:
    reindex.reindex(ws)
    reader = VectorSearch(ws, mode="sdk")
    assert all("new.md" not in hit.metadata["source"] for hit in reader.nearest("A new runbook.", top_k=20))
    add(knowledge)
    settings = {name: str(value) for name, value, origin in ws.settings.effective() if origin == "command line"}
    settings |= {"knowledge.roots": [str(knowledge)]}  # type: ignore[dict-item]
    other = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, json.dumps(settings), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert other.returncode == 0, other.stderr
    assert ws.store.alias_target(ws.settings.index.alias) == other.stdout.strip()
    time.sleep(1.1)
    assert any("new.md" in hit.metadata["source"] for hit in reader.nearest("A new runbook.", top_k=20))
    shutil.rmtree(ws.state / "artifacts")
    assert reader.nearest("A new runbook.", top_k=1)
