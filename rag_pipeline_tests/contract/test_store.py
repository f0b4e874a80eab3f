"""Collections, rows, filters, manifests and aliases behave alike on every store."""

import numpy as np
import pytest

from rag_pipeline.errors import RefusedError
from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.index.milvus_connection import StoreCallError

EAST = np.array([1, 0, 0, 0], np.float32)
HOSTILE = [
    'say "quoted"',
    "back\\slash",
    "数据库",
    "it's",
    '"; drop',
    "a\nb",
    "tab\t",
    "{x}",
    "%",
    "emoji 🔥",
    "\\",
    "\\n",
]


def row(key: str, vector: list[float], category: str = "", content: str = "text") -> dict[str, object]:
    return {"id": key, "content": content, "vector": vector, "category": category, "metadata": {"source": key}}


def test_distances_are_squared_and_sorted(store: MilvusStore, collection: str) -> None:
    store.upsert(
        collection, [row("same", [1, 0, 0, 0]), row("right angle", [0, 1, 0, 0]), row("opposite", [-1, 0, 0, 0])]
    )
    store.seal(collection)
    found = store.search(collection, EAST, limit=3, strong=True)
    assert [(hit.id, round(hit.score, 4)) for hit in found] == [("same", 0), ("right angle", 2), ("opposite", 4)]
    assert {hit.score_label for hit in found} == {"l2_distance"}
    assert [hit.metadata for hit in found] == [{"source": hit.id} for hit in found]
    assert [hit.id for hit in store.search(collection, EAST, limit=1, strong=True)] == ["same"]


@pytest.mark.parametrize("index_type", ["FLAT", "HNSW"])
def test_more_neighbours_than_rows_and_a_thousand_neighbours(store: MilvusStore, index_type: str) -> None:
    name = f"many_{index_type}"
    store.create(name, dimension=4, index_type=index_type)
    assert (store.search(name, EAST, limit=5), store.count(name), list(store.ids(name))) == ([], 0, [])
    angles = np.linspace(0, np.pi, 1500)
    store.upsert(name, [row(f"{n:04}", [float(np.cos(a)), float(np.sin(a)), 0, 0]) for n, a in enumerate(angles)])
    store.seal(name)
    found = [hit.id for hit in store.search(name, EAST, limit=1000, strong=True)]
    assert found == [f"{n:04}" for n in range(1000)]
    store.drop(name)


def test_upsert_replaces_a_row_before_and_after_a_seal(store: MilvusStore, collection: str) -> None:
    for content in ("first", "second"):
        store.upsert(collection, [row("a", [1, 0, 0, 0], content=content)])
    store.seal(collection)
    store.upsert(collection, [row("a", [0, 1, 0, 0], content="third")])
    store.seal(collection)
    assert store.count(collection) == 1
    assert [found["content"] for found in store.rows(collection)] == ["third"]
    assert [hit.score for hit in store.search(collection, EAST, limit=5, strong=True)] == pytest.approx([2.0])


def test_any_category_can_be_filtered_by_and_none_is_injected(store: MilvusStore, collection: str) -> None:
    store.upsert(collection, [row(f"{n}", [0, 1, 0, 0], category) for n, category in enumerate(HOSTILE)])
    store.upsert(collection, [row("nearer", [1, 0, 0, 0], "secret")])
    store.seal(collection)
    found = [
        [hit.id for hit in store.search(collection, EAST, limit=50, category=category, strong=True)]
        for category in HOSTILE
    ]
    assert found == [[f"{n}"] for n in range(len(HOSTILE))]
    for injection in ('x" or category == "secret', 'x" or id != "', '" || true || category == "', "secret\\"):
        assert store.search(collection, EAST, limit=5, category=injection, strong=True) == []


def test_ids_and_rows_go_over_many_pages(store: MilvusStore, collection: str) -> None:
    wanted = [f"{n:05}" for n in range(2_345)]
    store.upsert(collection, [row(key, [1, 0, 0, 0]) for key in wanted])
    store.seal(collection)
    assert sorted(store.ids(collection)) == wanted
    assert store.count(collection) == 2_345
    assert [found["id"] for found in store.rows(collection)] == wanted


def test_contents_of_60_000_bytes_of_chinese_come_back_as_they_were(store: MilvusStore, collection: str) -> None:
    contents = {f"{n:03}": f"{n:03}" + "汉" * 19_999 for n in range(120)}
    store.upsert(collection, [row(key, [1, 0, 0, 0], "类" * 100, content) for key, content in contents.items()])
    store.seal(collection)
    assert {found["id"]: found["content"] for found in store.rows(collection)} == contents
    hits = store.search(collection, EAST, limit=120, strong=True)
    assert {hit.id: hit.content for hit in hits} == contents


@pytest.mark.parametrize("characters", [10, 20_000, 150_000], ids=["small", "20 kB", "450 kB"])
def test_the_manifest_travels_with_the_collection(store: MilvusStore, collection: str, characters: int) -> None:
    assert store.manifest_json(collection) == '{"名": "值"}'
    manifest = '{"quoted": "\\"值\\\\", "long": "' + "值" * characters + '"}'
    store.set_manifest_json(collection, manifest)
    assert store.manifest_json(collection) == manifest
    assert store.dimension(collection) == 4


def test_a_manifest_that_a_server_could_not_drop_again_is_refused(store: MilvusStore, collection: str) -> None:
    with pytest.raises(RefusedError, match="600000 bytes"):
        store.set_manifest_json(collection, "m" * 600_000)
    with pytest.raises(RefusedError, match="600000 bytes"):
        store.create("never", dimension=4, index_type="FLAT", manifest="m" * 600_000)
    assert not store.exists("never")


def test_an_alias_moves_and_its_target_cannot_be_dropped(store: MilvusStore, collection: str) -> None:
    other = f"{collection}_2"
    alias = f"moving_{collection}"
    store.create(other, dimension=4, index_type="FLAT")
    assert store.alias_target(alias) is None
    store.point_alias(alias, collection)
    store.point_alias(alias, collection)
    store.point_alias(alias, other)
    assert (store.alias_target(alias), store.aliases(other), store.aliases(collection)) == (other, [alias], [])
    assert alias not in store.collections()
    with pytest.raises(RefusedError, match=f"{alias} points to"):
        store.drop(other)
    with pytest.raises(RefusedError, match="not a collection"):
        store.drop(alias)
    store.drop(collection)
    assert not store.exists(collection)
    assert store.exists(other)
    store._call("drop_alias", alias)
    store.drop(other)


def test_an_alias_whose_target_was_dropped_behind_our_back_can_be_pointed_again(
    store: MilvusStore, collection: str
) -> None:
    gone = f"{collection}_gone"
    alias = f"dangling_{collection}"
    store.create(gone, dimension=4, index_type="FLAT")
    store.point_alias(alias, gone)
    store._call("drop_collection", gone)
    assert store.alias_target(alias) is None
    store.point_alias(alias, collection)
    assert store.alias_target(alias) == collection
    store._call("drop_alias", alias)


def test_what_the_store_refuses_is_a_typed_error_at_once(store: MilvusStore, collection: str) -> None:
    store.upsert(collection, [row("a", [1, 0, 0, 0])])
    store.seal(collection)
    with pytest.raises(StoreCallError, match=r"refuses search: .*not (found|exist)"):
        store.search("no_such_collection", EAST, limit=1)
    with pytest.raises(StoreCallError, match="refuses search"):
        store.search(collection, np.ones(3, np.float32), limit=1)
    with pytest.raises(StoreCallError, match="refuses describe_collection"):
        store.manifest_json("no_such_collection")
    with pytest.raises(StoreCallError, match="refuses upsert"):
        store.upsert(collection, [row("b", [1, 0, 0])])
    with pytest.raises(StoreCallError, match="no_such_collection"):
        store.point_alias("no_such_alias", "no_such_collection")


def test_a_released_collection_is_loaded_by_the_search_that_needs_it(store: MilvusStore, collection: str) -> None:
    store.upsert(collection, [row("a", [1, 0, 0, 0])])
    store.seal(collection)
    store._call("release_collection", collection)
    assert [hit.id for hit in store.search(collection, EAST, limit=1, strong=True)] == ["a"]
