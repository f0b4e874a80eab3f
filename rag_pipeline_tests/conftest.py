"""Fixtures of all tests: state folders that clean up after themselves, the tiny model, the development data."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["GX_ANALYTICS_ENABLED"] = "false"
for name in [name for name in os.environ if name.startswith("RAG_")]:
    del os.environ[name]

PROJECT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def model_cache_dir() -> Path:
    """Where the bundled model is unpacked once for all tests (and for `make demo`)."""
    folder = PROJECT / ".rag" / "cache" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The development corpora beside the project."""
    folder = PROJECT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the development data is not at {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models of one dimension and different weights."""
    from rag_pipeline_tests.fakes import build_tiny_model

    home = tmp_path_factory.mktemp("models")
    first = build_tiny_model(home / "first", seed=1, max_tokens=128)
    return first, build_tiny_model(home / "second", seed=2, max_tokens=128)


@pytest.fixture
def stop_lite() -> Iterator[Callable[[Path], None]]:
    """Register a Milvus Lite folder whose server is stopped at the end of the test."""
    from rag_pipeline.index import lite_server

    folders: list[Path] = []
    yield folders.append
    for folder in folders:
        lite_server.stop(folder)


@pytest.fixture
def knowledge(tmp_path: Path) -> Path:
    """A small knowledge base of four documents in two categories."""
    root = tmp_path / "docs"
    write(
        root / "cache/redis-memory.md",
        "# Redis memory\n\nEvictions start at maxmemory.\n\n## Check\n\nRun `INFO memory`.\n",
    )
    write(root / "cache/redis-clients.md", "# Redis clients\n\nThe maxclients limit is reached.\n")
    write(root / "kubernetes/oom.md", "---\ntitle: OOMKilled\nkeywords: [oom, '137']\n---\n# OOM\n\nExit code 137.\n")
    write(root / "kubernetes/disk.md", "# 磁盘\n\n节点磁盘写满了。\n\n## 处理\n\n清理镜像。\n")
    return root


def write(path: Path, text: str) -> None:
    """Write a file, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def open_workspace(
    tmp_path: Path, knowledge: Path, tiny_models: tuple[Path, Path], stop_lite: Callable[[Path], None]
) -> Callable[..., object]:
    """A function that opens a workspace over ``knowledge`` in a state folder of this test; flags override settings."""
    from rag_pipeline.settings import load_settings
    from rag_pipeline.workspace import Workspace

    def build(**flags: object) -> Workspace:
        named = {name.replace("__", "."): value for name, value in flags.items()}
        values: dict[str, object] = {
            "state_dir": tmp_path / "state",
            "knowledge.roots": [str(knowledge)],
            "embedding.model": str(tiny_models[0]),
            "chunking.soft_tokens": 80,
            "chunking.hard_tokens": 120,
            "retrieval.milvus.lite_idle_s": 30.0,
            "index.grace_s": 0.0,
            **named,
        }
        workspace = Workspace(load_settings(flags=values, project_root=tmp_path))
        stop_lite(workspace.lite_folder)
        return workspace

    return build
