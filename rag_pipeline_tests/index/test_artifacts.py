"""The artefacts of a version: complete or absent, and every failure one message with a type of this project."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from upath import UPath

from rag_pipeline.errors import ConfigurationError, StoreUnavailableError
from rag_pipeline.index.artifacts import ArtifactStore
from rag_pipeline.index.manifest import Manifest, ModelEntry, Owner

FILES = {"documents.parquet": b"documents", "chunks.parquet": b"chunks"}
NAME = "kb__20260101T000000000000Z_0123456789ab"


def manifest_of(artifacts: dict[str, str], collection: str = NAME) -> Manifest:
    return Manifest(
        collection=collection, alias="kb", knowledge_base_id="x", fingerprint="0" * 64, chunker_version="1",
        model=ModelEntry(name="m", fingerprint="f", dimension=4), soft_tokens=1, hard_tokens=2, documents_digest="d",
        created_at="2026-01-01T00:00:00.000Z", artifacts=artifacts,
        owner=Owner.model_validate({"host": "h", "pid": 1, "state": "s"}),
    )  # fmt: skip


@pytest.fixture(params=["local", "file", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[UPath]:
    if request.param == "local":
        yield UPath(tmp_path / "artifacts")
    elif request.param == "file":
        yield UPath(f"file://{tmp_path}/artifacts")
    else:
        place = UPath(f"memory://{tmp_path}/artifacts")
        yield place
        if place.exists():
            place.rmdir(recursive=True)


def published(base: UPath) -> tuple[ArtifactStore, Manifest]:
    store = ArtifactStore(base)
    manifest = manifest_of(store.publish(NAME, FILES))
    store.write_manifest(manifest)
    return store, manifest


def test_what_is_published_is_read_back_and_nothing_lies_beside_it(base: UPath) -> None:
    store, manifest = published(base)
    store.publish(NAME, {**FILES, "chunks.parquet": b"others"})
    store.publish(NAME, FILES)
    store.write_promoted("kb", NAME)
    assert {name: store.read(manifest, name) for name in FILES} == FILES
    assert store.manifests() == [manifest]
    assert store.collections() == [NAME]
    assert store.read_promoted("kb") == NAME
    assert sorted(path.name for path in base.iterdir()) == ["kb.promoted.json", NAME]
    assert sorted(path.name for path in (base / NAME).iterdir()) == sorted([*FILES, "manifest.json"])


def test_intact_looks_at_the_bytes_of_every_file(base: UPath, tmp_path: Path) -> None:
    _, manifest = published(base)
    store = ArtifactStore(base, cache=UPath(tmp_path / "cache"))
    assert store.read(manifest, "chunks.parquet") == b"chunks"
    assert store.intact(manifest)
    (base / NAME / "chunks.parquet").write_bytes(b"chunkz")
    assert store.read(manifest, "chunks.parquet") == b"chunks"  # from the cache, which proves nothing of the place
    assert not store.intact(manifest)
    (base / NAME / "chunks.parquet").unlink()
    assert not store.intact(manifest)
    assert store.intact(manifest_of({}))


def test_intact_does_not_take_an_outage_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, manifest = published(UPath(tmp_path))

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(StoreUnavailableError, match=r"index\.artifacts_uri.* cannot be read.*Input/output error"):
        store.intact(manifest)


def test_leftovers_of_killed_writes_go_with_the_version(base: UPath) -> None:
    store, _ = published(base)
    (base / NAME / ".chunks.parquet.1-ab.aside").write_bytes(b"half")
    (base / NAME / ".chunks.parquet.aside").write_bytes(b"half")
    store.remove(NAME)
    store.remove(NAME)
    assert store.collections() == []
    assert not (base / NAME).exists()


def test_a_removal_that_is_killed_still_shows_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, manifest = published(UPath(tmp_path))
    removed: list[str] = []
    unlink = Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        assert store.manifests() == [manifest]
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", note)
    store.remove(NAME)
    assert removed == ["chunks.parquet", "documents.parquet", "manifest.json"]


def test_two_writers_of_one_file_never_share_what_they_write_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asides: list[str] = []
    replace = Path.replace

    def note(path: Path, target: str) -> Path:
        asides.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", note)
    store = ArtifactStore(UPath(tmp_path))
    store.write_promoted("kb", "a")
    store.write_promoted("kb", "b")
    assert len(set(asides)) == 2
    assert all(name.startswith(f".kb.promoted.json.{os.getpid()}-") and name.endswith(".aside") for name in asides)


def test_a_full_disk_is_one_message_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(UPath(tmp_path))
    store.write_promoted("kb", "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rag_pipeline.index.artifacts.os.fsync", full)
    with pytest.raises(StoreUnavailableError, match=r"No space left on device.*disk is not full"):
        store.write_promoted("kb", "new")
    assert store.read_promoted("kb") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kb.promoted.json"]


def test_a_file_in_the_way_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = ArtifactStore(UPath(tmp_path / "file"))
    for act in (lambda: store.publish(NAME, FILES), lambda: store.write_promoted("kb", NAME)):
        with pytest.raises(StoreUnavailableError, match=r"index\.artifacts_uri"):
            act()
    assert store.read_promoted("kb") == ""


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    store = ArtifactStore(UPath("s3://key:hunter2@bucket/x"))
    with pytest.raises(ConfigurationError, match=r"index\.artifacts_uri.*s3fs.*rag-pipeline\[s3\]") as refused:
        store.manifests()
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigurationError):
        store.publish(NAME, FILES)


def test_a_drivers_own_error_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        pass

    def fail(self: UPath) -> bool:
        raise NoCredentialsError("Unable to locate credentials")

    base = UPath("memory://nowhere")
    monkeypatch.setattr(type(base), "exists", fail)
    with pytest.raises(StoreUnavailableError, match="NoCredentialsError: Unable to locate credentials"):
        ArtifactStore(base).manifests()


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": 1}', b"null", b"7"])
def test_garbage_is_left_out(base: UPath, garbage: bytes) -> None:
    store, manifest = published(base)
    (base / "kb__other").mkdir(parents=True, exist_ok=True)
    (base / "kb__other" / "manifest.json").write_bytes(garbage)
    (base / "stray.txt").write_bytes(garbage)
    (base / "kb.promoted.json").write_bytes(garbage)
    assert store.manifests() == [manifest]
    assert store.read_promoted("kb") == ""
    (base / "kb.promoted.json").write_bytes(b'{"collection": null}')
    assert store.read_promoted("kb") == ""
