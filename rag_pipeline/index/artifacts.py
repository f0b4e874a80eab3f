"""What a version needs beside its collection, published before promotion where readers on any host find it.

``<artifacts_uri>/<collection>/`` holds ``manifest.json``, ``documents.parquet``, ``chunks.parquet`` and
``knowledge_index.json``; their digests stand in the manifest. ``<artifacts_uri>/<alias>.promoted.json`` repeats what
the alias points to, for a quick `status`; the store's alias is what counts.
"""

import hashlib
import json
from collections.abc import Mapping

from upath import UPath

from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.index.manifest import Manifest

DOCUMENTS = "documents.parquet"
CHUNKS = "chunks.parquet"
KNOWLEDGE_INDEX = "knowledge_index.json"
MANIFEST = "manifest.json"


class ArtifactStore:
    """Artefacts of versions under one fsspec URI.

    Args:
        base: The folder or URI.
        cache: Local folder where files of a remote ``base`` are kept by digest; ``None`` for a local ``base``.
    """

    def __init__(self, base: UPath, *, cache: UPath | None = None) -> None:
        self._base = base
        self._cache = cache

    def publish(self, collection: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write a version's files; returns their digests. A file is complete or absent, also after a crash."""
        for name, data in files.items():
            self._write(self._base / collection / name, data)
        return {name: _digest(data) for name, data in sorted(files.items())}

    def read(self, manifest: Manifest, name: str) -> bytes:
        """A version's file, whose digest is the one in the manifest.

        Raises:
            StoreUnavailableError: It is missing or its bytes are others.
        """
        wanted = manifest.artifacts.get(name)
        if wanted is None:
            raise StoreUnavailableError(f"{manifest.collection} was published without {name}: reindex needed.")
        cached = self._cache / wanted if self._cache else None
        if cached is not None and cached.exists() and _digest(data := cached.read_bytes()) == wanted:
            return data
        path = self._base / manifest.collection / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreUnavailableError(
                f"The artefact {path} of {manifest.collection} cannot be read ({error}). Check index.artifacts_uri, "
                "or run `rag-pipeline reindex --full`."
            ) from None
        if _digest(data) != wanted:
            raise StoreUnavailableError(
                f"The artefact {path} is not what was published with {manifest.collection} (its digest differs). "
                "Run `rag-pipeline reindex --full`."
            )
        if cached is not None:
            self._write(cached, data)
        return data

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the copy of a version's manifest."""
        self._write(self._base / manifest.collection / MANIFEST, manifest.to_json().encode())

    def manifests(self) -> list[Manifest]:
        """The copies of all manifests, ordered by collection; unreadable ones are left out."""
        found = []
        if not self._base.exists():
            return []
        for folder in sorted(self._base.iterdir(), key=lambda path: path.name):
            path = folder / MANIFEST
            try:
                found.append(Manifest.from_json(path.read_text(encoding="utf-8"), where=str(path)))
            except (OSError, StoreUnavailableError):
                continue
        return found

    def remove(self, collection: str) -> None:
        """Remove a version's files; nothing happens when there are none."""
        folder = self._base / collection
        if folder.exists():
            folder.rmdir(recursive=True)

    def collections(self) -> list[str]:
        """Names of the versions that have any file here."""
        if not self._base.exists():
            return []
        return sorted(path.name for path in self._base.iterdir() if path.is_dir())

    def write_promoted(self, alias: str, collection: str) -> None:
        """Repeat what an alias points to."""
        self._write(self._base / f"{alias}.promoted.json", json.dumps({"collection": collection}).encode())

    def read_promoted(self, alias: str) -> str:
        """What the alias pointed to when it was last moved from here; blank when unknown."""
        try:
            return str(json.loads((self._base / f"{alias}.promoted.json").read_text(encoding="utf-8"))["collection"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _write(self, path: UPath, data: bytes) -> None:
        if path.exists() and path.read_bytes() == data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.parent / f".{path.name}.aside"
        aside.write_bytes(data)
        aside.rename(path.absolute() if path.protocol in ("", "file") else path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
