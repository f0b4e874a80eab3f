"""Vectors are those of sentence-transformers whatever the batches, and no text is embedded twice."""

import logging
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rag_pipeline.errors import CheckFailedError, ModelUnavailableError
from rag_pipeline.index.embedding import (
    Embedder,
    EmbeddingCache,
    Progress,
    Vectors,
    embed_texts,
    embedding_digest,
    normalised,
    plan_batches,
)
from rag_pipeline.index.models import ResolvedModel, load_token_counter
from rag_pipeline_tests.fakes import HashingEmbedder, tiny_model

MIXED = [
    "the pod restarts",
    "节点 NotReady：磁盘空间不足，kubelet 驱逐了 Pod，请先清理镜像。",
    "disk",
    "the disk of the node is full and the pod does not restart: error 28",
    "错误",
    "",
    "x = 1\ny = 2",
    "restart restart restart restart restart restart restart restart",
    "证书过期",
] * 3


def plain_vectors(model: ResolvedModel, texts: Sequence[str]) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(model.path), local_files_only=True, model_kwargs={"dtype": "float32"})
    return loaded.encode_document(list(texts), normalize_embeddings=True)


def unit(seed: int, dimension: int = 8) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=dimension).astype(np.float32)
    return vector / np.linalg.norm(vector)


# Batches


def test_batches_are_longest_first_and_within_the_budget() -> None:
    counts = [5, 100, 40, 100, 7, 40, 300, 1]

    batches = plan_batches(counts, texts=8, batch_tokens=200, max_tokens=256)

    assert batches == [[6], [1, 3], [2, 5, 4, 0, 7]]


@pytest.mark.parametrize("budget", [1, 64, 1024, 10**6])
def test_each_text_is_in_one_batch(budget: int) -> None:
    counts = np.random.default_rng(1).integers(0, 700, 500).tolist()

    batches = plan_batches(counts, texts=500, batch_tokens=budget, max_tokens=512)

    assert sorted(index for batch in batches for index in batch) == list(range(500))
    for batch in batches:
        longest = max(min(max(counts[index], 1), 512) for index in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget


def test_counts_must_match_the_texts(tiny: ResolvedModel) -> None:
    with pytest.raises(ValueError, match="2 texts come with 1 token counts"):
        Embedder(tiny).embed_documents(["a", "b"], token_counts=[1])
    with pytest.raises(ValueError, match="2 texts come with 3 token counts"):
        embed_texts(["a", "b"], token_counts=[1, 2, 3], embedder=HashingEmbedder(), cache=None)


# The embedder


@pytest.mark.parametrize("batch_tokens", [1, 100, 1024, 100_000])
def test_vectors_equal_plain_ones_in_any_order_and_budget(tiny: ResolvedModel, batch_tokens: int) -> None:
    plain = plain_vectors(tiny, MIXED)
    order = np.random.default_rng(batch_tokens).permutation(len(MIXED))
    embedder = Embedder(tiny, batch_tokens=batch_tokens)

    vectors = embedder.embed_documents([MIXED[index] for index in order])

    assert vectors.dtype == np.float32
    assert vectors.shape == (len(MIXED), embedder.dimension) == (27, 32)
    np.testing.assert_allclose(vectors, plain[order], atol=1e-5, rtol=0)


@pytest.mark.model
@pytest.mark.slow
def test_vectors_of_the_default_model_equal_plain_ones(e5: ResolvedModel) -> None:
    texts = MIXED[:9]
    plain = plain_vectors(e5, texts)

    vectors = Embedder(e5, batch_tokens=128).embed_documents(texts[::-1])

    np.testing.assert_allclose(vectors[::-1], plain, atol=1e-5, rtol=0)


def test_wrong_counts_change_no_vector(tiny: ResolvedModel) -> None:
    embedder = Embedder(tiny)
    right = embedder.embed_documents(MIXED)

    wrong = embedder.embed_documents(MIXED, token_counts=list(range(len(MIXED))))

    np.testing.assert_allclose(wrong, right, atol=1e-5, rtol=0)


def test_no_texts_give_no_rows_and_load_nothing(tiny: ResolvedModel) -> None:
    embedder = Embedder(ResolvedModel("x", Path("no/such/folder"), tiny.profile, "0" * 16))
    assert embedder.embed_documents([]).shape == (0, 32)
    assert embedder.dimension == 32


def test_query_and_document_prompts_are_applied(tiny: ResolvedModel) -> None:
    embedder = Embedder(tiny)

    query = embedder.embed_query("disk full")

    assert query.shape == (32,)
    assert np.linalg.norm(query) == pytest.approx(1, abs=1e-6)
    assert not np.allclose(query, embedder.embed_documents(["disk full"])[0], atol=1e-3)


def test_a_model_that_does_not_normalise_gives_unit_vectors_too(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", cache_dir=tmp_path, normalize=False)

    vectors = Embedder(model).embed_documents(MIXED)

    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)


def test_progress_ends_at_the_number_of_texts(tiny: ResolvedModel) -> None:
    seen: list[tuple[int, int]] = []

    Embedder(tiny, batch_tokens=64).embed_documents(MIXED, progress=lambda done, total: seen.append((done, total)))

    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (27, 27)
    assert len(seen) > 3


def test_a_text_that_is_cut_is_told(tiny: ResolvedModel, caplog: pytest.LogCaptureFixture) -> None:
    embedder = Embedder(tiny)
    with caplog.at_level(logging.WARNING, logger="rag_pipeline"):
        embedder.embed_documents(["disk", "pod " * 100])
        embedder.embed_query("pod " * 30)
        assert [record.getMessage()[:30] for record in caplog.records] == ["1 of 2 texts are longer than t"]
        embedder.embed_query("pod " * 100)
    assert "The query has 104 tokens" in caplog.text


def test_threads_are_put_back_after_each_call(tiny: ResolvedModel) -> None:
    import torch

    before = torch.get_num_threads()
    embedder = Embedder(tiny, threads=1)
    during: list[int] = []

    embedder.embed_documents(MIXED, progress=lambda *_: during.append(torch.get_num_threads()))
    loaded = embedder._load()
    loaded.register_forward_pre_hook(lambda *_: during.append(torch.get_num_threads()))
    embedder.embed_query("disk")

    assert torch.get_num_threads() == before
    assert during[-1] == 1


def test_threads_share_an_embedder(tiny: ResolvedModel) -> None:
    embedder = Embedder(tiny)
    queries = [f"pod {index} restart" for index in range(40)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(embedder.embed_query, queries))

    for query, vector in zip(queries, together, strict=True):
        np.testing.assert_allclose(vector, embedder.embed_query(query), atol=1e-6, rtol=0)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", cache_dir=tmp_path)
    (model.path / "model.safetensors").write_bytes(b"no weights")

    with pytest.raises(ModelUnavailableError, match="cannot be loaded") as caught:
        Embedder(model).embed_query("disk")

    assert str(model.path) in str(caught.value)


def test_normalised_keeps_what_has_no_direction() -> None:
    rows = np.array([[3, 4], [0, 0], [np.nan, 1]], np.float32)

    result = normalised(rows)

    assert result[0].tolist() == pytest.approx([0.6, 0.8])
    assert result[1].tolist() == [0, 0]
    assert np.isnan(result[2]).any()


# The cache


def test_cache_gives_back_the_bytes_that_were_put(tmp_path: Path) -> None:
    items = {embedding_digest(str(index)): unit(index) for index in range(1200)}
    with EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as cache:
        assert cache.get_many(list(items)) == {}
        cache.put_many(items)
        cache.put_many({})
    with EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as cache:
        found = cache.get_many([*items, *items, embedding_digest("absent")])

    assert found.keys() == items.keys()
    assert all(np.array_equal(found[digest], items[digest]) for digest in items)
    assert cache.path == tmp_path / f"{'f' * 16}.sqlite"


def test_caches_of_models_are_apart(tmp_path: Path, tiny: ResolvedModel) -> None:
    digest = embedding_digest("x")
    with EmbeddingCache(tmp_path, fingerprint=tiny.fingerprint, dimension=8) as cache:
        cache.put_many({digest: unit(1)})
    with EmbeddingCache(tmp_path, fingerprint="0" * 16, dimension=8) as other:
        assert other.get_many([digest]) == {}
    assert sorted(path.stem for path in tmp_path.glob("*.sqlite")) == sorted(["0" * 16, tiny.fingerprint])


def test_a_stored_value_that_is_no_unit_vector_counts_as_missing(tmp_path: Path) -> None:
    names = ["good", "short", "scaled", "nan"]
    digests = {name: embedding_digest(name) for name in names}
    with EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as cache:
        cache.put_many({digests[name]: unit(1) for name in names})
    with sqlite3.connect(tmp_path / f"{'f' * 16}.sqlite") as connection:
        for name, value in (
            ("short", unit(1)[:4]),
            ("scaled", unit(1) * 1.1),
            ("nan", np.full(8, np.nan, np.float32)),
        ):
            connection.execute(
                "UPDATE vectors SET vector = ? WHERE digest = ?", (value.tobytes(), bytes.fromhex(digests[name]))
            )
    connection.close()
    with EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as cache:
        assert list(cache.get_many(list(digests.values()))) == [digests["good"]]


def damage_header(path: Path) -> None:
    path.write_bytes(b"this is no database" * 1000)


def damage_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_header, damage_pages])
def test_a_damaged_cache_is_set_aside_and_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    items = {embedding_digest(str(index)): unit(index) for index in range(300)}
    with EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as cache:
        cache.put_many(items)
    damage(cache.path)  # type: ignore[operator]

    with (
        caplog.at_level(logging.WARNING, logger="rag_pipeline"),
        EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as again,
    ):
        assert again.get_many(list(items)) == {}
        again.put_many(items)
        assert again.get_many(list(items)).keys() == items.keys()

    assert len(caplog.records) == 1
    assert "damaged" in caplog.text
    assert (tmp_path / f"{'f' * 16}.sqlite.corrupt").exists()


def test_damage_found_while_writing_loses_nothing_of_the_batch(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8)
    damage_header(tmp_path / f"{'f' * 16}.sqlite")

    cache.put_many({embedding_digest("x"): unit(1)})

    assert list(cache.get_many([embedding_digest("x")])) == [embedding_digest("x")]
    cache.close()


@pytest.mark.parametrize("kind", ["file in the way", "read-only folder", "later layout"])
def test_a_cache_that_cannot_be_used_warns_once_and_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = tmp_path / "cache"
    user = None
    if kind == "file in the way":
        folder.write_text("")
    elif kind == "read-only folder":
        folder.mkdir(mode=0o555)
        if hasattr(os, "geteuid") and (user := os.geteuid()) == 0:
            os.seteuid(65534)
    else:
        folder.mkdir()
        connection = sqlite3.connect(folder / f"{'f' * 16}.sqlite")
        connection.execute("PRAGMA user_version=99")
        connection.close()
    try:
        with (
            caplog.at_level(logging.WARNING, logger="rag_pipeline"),
            EmbeddingCache(folder, fingerprint="f" * 16, dimension=8) as cache,
        ):
            for _ in range(3):
                cache.put_many({embedding_digest("x"): unit(1)})
                assert cache.get_many([embedding_digest("x")]) == {}
    finally:
        if user == 0:
            os.seteuid(0)

    assert len(caplog.records) == 1
    assert "embeds without it" in caplog.text


def _write_and_read(folder: str, worker: int) -> int:
    with EmbeddingCache(Path(folder), fingerprint="f" * 16, dimension=8) as cache:
        for start in range(0, 200, 20):
            # Half of the keys are written by every worker, with the same value.
            cache.put_many({embedding_digest(f"all {index}"): unit(index) for index in range(start, start + 10)})
            cache.put_many({embedding_digest(f"{worker} {index}"): unit(index) for index in range(start, start + 10)})
        return len(cache.get_many([embedding_digest(f"{worker} {index}") for index in range(200)]))


@pytest.mark.fault
def test_processes_share_a_cache(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        own = list(pool.map(_write_and_read, [str(tmp_path)] * 4, range(4)))

    assert own == [100] * 4
    with EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as cache:
        everything = [f"{worker} {index}" for worker in ("all", 0, 1, 2, 3) for index in range(200)]
        assert len(cache.get_many([embedding_digest(name) for name in everything])) == 500


def _repair(folder: str, worker: int) -> int:
    with EmbeddingCache(Path(folder), fingerprint="f" * 16, dimension=8) as cache:
        for index in range(50):
            cache.put_many({embedding_digest(f"{worker} {index}"): unit(index)})
        return len(cache.get_many([embedding_digest(f"{worker} {index}") for index in range(50)]))


@pytest.mark.fault
def test_processes_that_find_the_same_damage_repair_it_once(tmp_path: Path) -> None:
    damage_header(tmp_path / f"{'f' * 16}.sqlite")

    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        own = list(pool.map(_repair, [str(tmp_path)] * 4, range(4)))

    assert own == [50] * 4
    assert sorted(path.name for path in tmp_path.glob("*.corrupt")) == [f"{'f' * 16}.sqlite.corrupt"]
    assert (tmp_path / f"{'f' * 16}.sqlite.corrupt").read_bytes().startswith(b"this is no database")


def test_threads_share_a_cache(tmp_path: Path) -> None:
    with EmbeddingCache(tmp_path, fingerprint="f" * 16, dimension=8) as cache, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: cache.put_many({embedding_digest(str(index)): unit(index)}), range(64)))
        assert len(cache.get_many([embedding_digest(str(index)) for index in range(64)])) == 64


# Nothing twice


class Flawed(HashingEmbedder):
    """Gives the value instead of the vector of one text; or fails at one call."""

    def __init__(self, text: str = "", value: float = 0.0, fail_at_call: int = 0) -> None:
        super().__init__(dimension=16)
        self._text, self._value, self._fail_at_call = text, value, fail_at_call

    def embed_documents(
        self, texts: Sequence[str], *, token_counts: Sequence[int] | None = None, progress: Progress | None = None
    ) -> Vectors:
        vectors = super().embed_documents(texts, token_counts=token_counts, progress=progress)
        if self._fail_at_call and len(self.calls) >= self._fail_at_call:
            raise KeyboardInterrupt
        for row, text in enumerate(texts):
            if text == self._text:
                vectors[row] = self._value
        return vectors


def test_equal_texts_are_embedded_once_and_known_ones_not_at_all(tmp_path: Path) -> None:
    embedder = HashingEmbedder()
    texts = ["disk full", "pod restart", "disk full", "node down"]
    with EmbeddingCache(tmp_path, fingerprint=embedder.model.fingerprint, dimension=embedder.dimension) as cache:
        first = embed_texts(texts, token_counts=[2, 3, 2, 2], embedder=embedder, cache=cache)
        second = embed_texts([*texts[::-1], "new"], token_counts=[2, 2, 3, 2, 1], embedder=embedder, cache=cache)

    assert (first.embedded, first.reused) == (3, 1)
    assert (second.embedded, second.reused) == (1, 4)
    assert embedder.calls == [["pod restart", "disk full", "node down"], ["new"]]
    np.testing.assert_array_equal(first.vectors, HashingEmbedder().embed_documents(texts))
    np.testing.assert_array_equal(second.vectors[:4], first.vectors[::-1])
    assert first.seconds > 0


def test_refresh_embeds_again_and_replaces(tmp_path: Path) -> None:
    embedder = HashingEmbedder()
    with EmbeddingCache(tmp_path, fingerprint=embedder.model.fingerprint, dimension=embedder.dimension) as cache:
        cache.put_many({embedding_digest("disk"): unit(1, embedder.dimension)})
        stale = embed_texts(["disk"], token_counts=[1], embedder=embedder, cache=cache)
        fresh = embed_texts(["disk"], token_counts=[1], embedder=embedder, cache=cache, refresh=True)
        again = embed_texts(["disk"], token_counts=[1], embedder=embedder, cache=cache)

    assert (stale.embedded, fresh.embedded, again.embedded) == (0, 1, 0)
    np.testing.assert_array_equal(stale.vectors[0], unit(1, embedder.dimension))
    np.testing.assert_array_equal(fresh.vectors, embedder.embed_documents(["disk"]))
    np.testing.assert_array_equal(again.vectors, fresh.vectors)


def test_truncated_texts_are_counted_even_when_cached(tmp_path: Path) -> None:
    embedder = HashingEmbedder(max_tokens=10)
    with EmbeddingCache(tmp_path, fingerprint=embedder.model.fingerprint, dimension=embedder.dimension) as cache:
        for _ in range(2):
            result = embed_texts(["a", "b", "c"], token_counts=[10, 11, 500], embedder=embedder, cache=cache)
            assert result.truncated == 2


def test_a_killed_run_keeps_all_but_the_last_piece(tmp_path: Path) -> None:
    texts = [f"text {index}" for index in range(600)]
    embedder = Flawed(fail_at_call=3)
    with EmbeddingCache(tmp_path, fingerprint=embedder.model.fingerprint, dimension=16) as cache:
        with pytest.raises(KeyboardInterrupt):
            embed_texts(texts, token_counts=[10] * 600, embedder=embedder, cache=cache)
        result = embed_texts(texts, token_counts=[10] * 600, embedder=Flawed(), cache=cache)

    assert (result.embedded, result.reused) == (88, 512)


def test_long_texts_are_kept_in_smaller_pieces() -> None:
    embedder = HashingEmbedder()
    embed_texts([f"text {index}" for index in range(100)], token_counts=[480] * 100, embedder=embedder, cache=None)
    assert [len(call) for call in embedder.calls] == [35, 35, 30]


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_a_vector_without_direction_is_refused_and_not_kept(tmp_path: Path, value: float) -> None:
    embedder = Flawed("the bad one", value)
    with EmbeddingCache(tmp_path, fingerprint=embedder.model.fingerprint, dimension=16) as cache:
        with pytest.raises(CheckFailedError, match="'the bad one'"):
            embed_texts(["good", "the bad one"], token_counts=[1, 3], embedder=embedder, cache=cache)
        assert cache.get_many([embedding_digest("the bad one")]) == {}


def test_a_model_that_gives_nan_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", cache_dir=tmp_path, poison=True)

    with pytest.raises(CheckFailedError, match="for 2 of 2 texts"):
        embed_texts(["disk", "pod"], token_counts=[1, 1], embedder=Embedder(model), cache=None)


def test_progress_counts_only_what_is_embedded(tmp_path: Path) -> None:
    embedder = HashingEmbedder()
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    texts = [f"text {index}" for index in range(300)]
    with EmbeddingCache(tmp_path, fingerprint=embedder.model.fingerprint, dimension=embedder.dimension) as cache:
        for _ in range(2):
            embed_texts(texts, token_counts=[5] * 300, embedder=embedder, cache=cache, progress=note)

    assert seen == [(256, 300), (300, 300)]


def test_no_texts_give_an_empty_result() -> None:
    result = embed_texts([], token_counts=[], embedder=HashingEmbedder(), cache=None)
    assert result.vectors.shape == (0, 1024)
    assert (result.embedded, result.reused, result.truncated) == (0, 0, 0)


def test_vectors_from_the_cache_equal_embedded_ones(tmp_path: Path, tiny: ResolvedModel) -> None:
    counts = load_token_counter(tiny).count_inputs(MIXED)
    with EmbeddingCache(tmp_path, fingerprint=tiny.fingerprint, dimension=32) as cache:
        first = embed_texts(MIXED, token_counts=counts, embedder=Embedder(tiny), cache=cache)
        second = embed_texts(
            MIXED[::-1], token_counts=counts[::-1], embedder=HashingEmbedder(dimension=32), cache=cache
        )

    assert (first.embedded, second.embedded) == (9, 0)
    np.testing.assert_array_equal(first.vectors, second.vectors[::-1])
    np.testing.assert_allclose(first.vectors, plain_vectors(tiny, MIXED), atol=1e-5, rtol=0)


KILLED = """
import os, sys
from pathlib import Path
from rag_pipeline.index.embedding import EmbeddingCache, embed_texts
from rag_pipeline_tests.fakes import HashingEmbedder
embedder = HashingEmbedder(dimension=16)
cache = EmbeddingCache(Path(sys.argv[1]), fingerprint=embedder.model.fingerprint, dimension=16)
def progress(done, total):
    if done > 700: os.kill(os.getpid(), 9)
texts = [f"text {i}" for i in range(1000)]
embed_texts(texts, token_counts=[9] * 1000, embedder=embedder, cache=cache, progress=progress)
"""


@pytest.mark.fault
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_kill_nine_leaves_a_sound_cache(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -9

    embedder = HashingEmbedder(dimension=16)
    with EmbeddingCache(tmp_path, fingerprint=embedder.model.fingerprint, dimension=16) as cache:
        result = embed_texts(
            [f"text {index}" for index in range(1000)], token_counts=[9] * 1000, embedder=embedder, cache=cache
        )

    assert (result.embedded, result.reused) == (488, 512)
    assert not list(tmp_path.glob("*.corrupt"))


def test_embedder_is_loaded_once_by_threads(tiny: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from rag_pipeline.index import embedding

    loads: list[int] = []
    load = embedding._load_sentence_transformer
    monkeypatch.setattr(
        embedding, "_load_sentence_transformer", lambda model: loads.append(threading.get_ident()) or load(model)
    )
    embedder = Embedder(tiny)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(embedder.embed_query, ["a", "b", "c", "d"]))
    assert len(loads) == 1
