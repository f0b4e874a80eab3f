"""What the scenarios look through: the searches a lookup asks for, and a few real documents under the default model."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.vector_search import SearchOutcome, VectorSearch
from rag_pipeline_tests.conftest import PROJECT
from rag_pipeline_tests.retrieval.small_base import settings_of

LookUp = Callable[..., KnowledgeLookup]

REAL_DOCUMENTS = (
    "cache/redis-connections-exhausted.en.md",
    "database/postgres-too-many-connections.zh.md",
    "security/tls-certificate-expiry.en.md",
)


@dataclass
class Searches:
    """What the vector search was asked: (query, category filter), and what it answered, in order."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    answered: list[SearchOutcome] = field(default_factory=list)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    """The searches of all lookups of a test, as they go through the facade."""
    seen = Searches()
    search = VectorSearch.search

    def watched(self: VectorSearch, snapshot: object, query: str, *, category: str = "", **options: object) -> object:
        seen.asked.append((query, category))
        outcome = search(self, snapshot, query, category=category, **options)  # type: ignore[arg-type]
        seen.answered.append(outcome)
        return outcome

    monkeypatch.setattr(VectorSearch, "search", watched)
    return seen


@pytest.fixture
def framework_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The keyword arguments of each search that goes through LangChain's vector store, the query among them."""
    import langchain_milvus

    calls: list[dict[str, object]] = []
    search = langchain_milvus.Milvus.similarity_search_with_score

    def watched(self: object, query: str, **options: object) -> object:
        calls.append({"query": query, **options})
        return search(self, query, **options)

    monkeypatch.setattr(langchain_milvus.Milvus, "similarity_search_with_score", watched)
    return calls


@pytest.fixture(scope="session")
def real_lookup(model_cache_dir: Path) -> Iterator[KnowledgeLookup]:
    """A lookup over a few documents that are shipped, with the default model."""
    from rag_pipeline import reindex
    from rag_pipeline.index import lite_server
    from rag_pipeline.workspace import Workspace

    folder = Path(tempfile.mkdtemp(prefix="real-index-"))
    for source in REAL_DOCUMENTS:
        (folder / "docs" / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / "knowledge" / source, folder / "docs" / source)
    state = folder / "state"
    (state / "cache").mkdir(parents=True)
    (state / "cache" / "models").symlink_to(model_cache_dir)
    settings = settings_of(
        state,
        folder / "docs",
        Path("bundled:multilingual-e5-small"),
        chunking__soft_tokens=300,
        chunking__hard_tokens=480,
    )
    try:
        reindex.reindex(Workspace(settings))
        with KnowledgeLookup(settings) as lookup:
            yield lookup
    finally:
        lite_server.stop(state / "milvus")
        shutil.rmtree(folder, ignore_errors=True)
