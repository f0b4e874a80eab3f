"""One index of the small knowledge base for all tests of a process, and lookups over it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline_tests.retrieval.small_base import DOCUMENTS, EMBEDDERS, SettingsOf, WordEmbedder, indexed


@pytest.fixture(scope="session")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with enough dimensions to count words in."""
    from rag_pipeline_tests.fakes import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("word-model") / "model", dimension=512, max_tokens=512)


@pytest.fixture(scope="session")
def small_index(word_model: Path) -> Iterator[SettingsOf]:
    """Settings of the indexed small knowledge base; flags override them. Shared: tests only read it."""
    with indexed(DOCUMENTS, model=word_model) as settings:
        yield settings


@pytest.fixture
def word_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are near each other by the words they share, whatever the model's folder says."""
    for name in EMBEDDERS:
        monkeypatch.setattr(name, WordEmbedder)


@pytest.fixture
def open_lookup(word_ranking: None) -> Iterator[Callable[..., KnowledgeLookup]]:
    """A function that opens a lookup by settings, closed at the end of the test."""
    opened: list[KnowledgeLookup] = []

    def build(settings: object) -> KnowledgeLookup:
        opened.append(KnowledgeLookup(settings))  # type: ignore[arg-type]
        return opened[-1]

    yield build
    for lookup in opened:
        lookup.close()


@pytest.fixture
def look_up(small_index: SettingsOf, open_lookup: Callable[..., KnowledgeLookup]) -> Callable[..., KnowledgeLookup]:
    """A function that opens a lookup over the small knowledge base (mode ``sdk``); flags override settings."""
    return lambda **flags: open_lookup(small_index(**flags))
