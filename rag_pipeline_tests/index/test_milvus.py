"""The store's contract on Milvus Lite."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rag_pipeline.errors import RefusedError, StoreUnavailableError
from rag_pipeline.index.milvus import MilvusStore, literal
from rag_pipeline.settings import MilvusSettings


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MilvusStore:
    from rag_pipeline.index import lite_server

    folder = tmp_path_factory.mktemp("store")
    yield MilvusStore(MilvusSettings(lite_idle_s=60), lite_folder=folder)
    lite_server.stop(folder)


@pytest.fixture
def collection(store: MilvusStore, request: pytest.FixtureRequest) -> str:
    name = f"c_{abs(hash(request.node.nodeid)):x}"
    store.create(name, dimension=4, index_type="FLAT", manifest='{"名": "值"}')
    return name


def row(key: str, vector: list[float], category: str = "", content: str = "text") -> dict[str, object]:
    return {"id": key, "content": content, "vector": vector, "category": category, "metadata": {"source": key}}


def test_distances_are_squared_and_sorted(store: MilvusStore, collection: str) -> None:
    store.upsert(
        collection, [row("same", [1, 0, 0, 0]), row("right angle", [0, 1, 0, 0]), row("opposite", [-1, 0, 0, 0])]
    )
    store.seal(collection)
    found = store.search(collection, np.array([1, 0, 0, 0], np.float32), limit=3)
    assert [(hit.id, round(hit.score, 4)) for hit in found] == [("same", 0), ("right angle", 2), ("opposite", 4)]
    assert {hit.score_label for hit in found} == {"l2_distance"}


def test_upsert_replaces_a_row(store: MilvusStore, collection: str) -> None:
    store.upsert(collection, [row("a", [1, 0, 0, 0], content="old")])
    store.upsert(collection, [row("a", [1, 0, 0, 0], content="new")])
    store.seal(collection)
    assert store.count(collection) == 1
    assert [found["content"] for found in store.rows(collection)] == ["new"]


@pytest.mark.parametrize(
    "category", ['say "quoted"', "back\\slash", "数据库", "it's", '"; drop', "a\nb", "tab\t", "{x}", "%", "emoji 🔥"]
)
def test_any_category_can_be_filtered_by(store: MilvusStore, collection: str, category: str) -> None:
    store.upsert(collection, [row("in", [0, 1, 0, 0], category), row("out", [1, 0, 0, 0], "other")])
    store.seal(collection)
    found = store.search(collection, np.array([1, 0, 0, 0], np.float32), limit=5, category=category)
    assert [hit.id for hit in found] == ["in"]


def test_a_filter_cannot_be_injected(store: MilvusStore, collection: str) -> None:
    store.upsert(collection, [row("secret", [1, 0, 0, 0], "secret")])
    store.seal(collection)
    hostile = 'x" or category == "secret'
    assert store.search(collection, np.array([1, 0, 0, 0], np.float32), limit=5, category=hostile) == []


def test_literals_keep_chinese_as_it_is() -> None:
    assert literal('数据"库\\') == '"数据\\"库\\\\"'


def test_the_manifest_travels_with_the_collection(store: MilvusStore, collection: str) -> None:
    assert store.manifest_json(collection) == '{"名": "值"}'
    store.set_manifest_json(collection, '{"b": 2}')
    assert store.manifest_json(collection) == '{"b": 2}'


def test_ids_lists_every_row_over_many_pages(store: MilvusStore, collection: str) -> None:
    store.upsert(collection, [row(f"{n:05}", [1, 0, 0, 0]) for n in range(2_345)])
    store.seal(collection)
    assert sorted(store.ids(collection)) == [f"{n:05}" for n in range(2_345)]
    assert store.count(collection) == 2_345


def test_an_alias_moves_and_its_target_cannot_be_dropped(store: MilvusStore, collection: str) -> None:
    other = f"{collection}_2"
    store.create(other, dimension=4, index_type="FLAT")
    assert store.alias_target("moving") is None
    store.point_alias("moving", collection)
    store.point_alias("moving", other)
    assert (store.alias_target("moving"), store.aliases(other)) == (other, ["moving"])
    with pytest.raises(RefusedError, match="moving points to"):
        store.drop(other)
    with pytest.raises(RefusedError, match="not a collection"):
        store.drop("moving")
    store.drop(collection)
    assert not store.exists(collection)
    assert store.exists(other)


def test_a_closed_port_is_a_typed_error(tmp_path: Path) -> None:
    away = MilvusStore(MilvusSettings(uri="http://127.0.0.1:9", timeout_s=2), lite_folder=tmp_path)
    with pytest.raises(StoreUnavailableError, match="Milvus at http://127.0.0.1:9 does not answer"):
        away.check()


def test_opening_a_store_touches_nothing(tmp_path: Path, stop_lite: Callable[[Path], None]) -> None:
    MilvusStore(MilvusSettings(), lite_folder=tmp_path / "unused")
    assert not (tmp_path / "unused").exists()
