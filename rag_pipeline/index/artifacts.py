"""What a version needs beside its collection, published before promotion where readers on any host find it.

``<artifacts_uri>/<collection>/`` holds ``manifest.json``, ``documents.parquet``, ``chunks.parquet`` and
``knowledge_index.json``; their digests stand in the manifest. ``<artifacts_uri>/<alias>.promoted.json`` repeats what
the alias points to, for a quick `status`; the store's alias is what counts.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from upath import UPath

from rag_pipeline.errors import ConfigurationError, RagPipelineError, StoreUnavailableError
from rag_pipeline.index.manifest import Manifest
from rag_pipeline.settings import masked

DOCUMENTS = "documents.parquet"
CHUNKS = "chunks.parquet"
KNOWLEDGE_INDEX = "knowledge_index.json"
MANIFEST = "manifest.json"

# What an ArtifactStore takes for "not there", as opposed to "cannot be reached".
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_EXTRAS = {"s3": "s3", "s3a": "s3"}


class ArtifactStore:
    """Artefacts of versions under one fsspec URI.

    Every method raises `StoreUnavailableError` when the place cannot be reached, read or written, and
    `ConfigurationError` when its protocol is unknown or needs a package that is not installed.

    Args:
        base: The folder or URI.
        cache: Local folder where files of a remote ``base`` are kept by digest; ``None`` for a local ``base``.
    """

    def __init__(self, base: UPath, *, cache: UPath | None = None) -> None:
        self._base = base
        self._cache = cache

    def publish(self, collection: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write a version's files; returns their digests. A file is complete or absent, also after a crash."""
        with self._explained("written"):
            for name, data in files.items():
                _write(self._base / collection / name, data)
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
        if cached is not None and (data := _cached(cached, wanted)) is not None:
            return data
        path = self._base / manifest.collection / name
        with self._explained("read"):
            try:
                data = path.read_bytes()
            except OSError as error:
                raise StoreUnavailableError(
                    f"The artefact {masked(str(path))} of {manifest.collection} cannot be read ({error}). Check "
                    "index.artifacts_uri, or run `rag-pipeline reindex --full`."
                ) from None
        if _digest(data) != wanted:
            raise StoreUnavailableError(
                f"The artefact {masked(str(path))} is not what was published with {manifest.collection} (its digest "
                "differs). Run `rag-pipeline reindex --full`."
            )
        if cached is not None:
            with contextlib.suppress(OSError):  # a full disk makes the next read slower, not this one wrong
                _write(cached, data)
        return data

    def intact(self, manifest: Manifest) -> bool:
        """Whether every file that the manifest names is there with the right bytes; True when it names none.

        All of them are read, from the place itself and not from the cache.

        Raises:
            StoreUnavailableError: It could not be found out: the place cannot be reached or read.
        """
        for name, wanted in manifest.artifacts.items():
            with self._explained("read"):
                try:
                    data = (self._base / manifest.collection / name).read_bytes()
                except _ABSENT:
                    return False
            if _digest(data) != wanted:
                return False
        return True

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the copy of a version's manifest."""
        with self._explained("written"):
            _write(self._base / manifest.collection / MANIFEST, manifest.to_json().encode())

    def manifests(self) -> list[Manifest]:
        """The copies of all manifests, ordered by collection; unreadable ones are left out."""
        found = []
        for path in (folder / MANIFEST for folder in self._entries()):
            with self._explained("read"):
                try:
                    found.append(Manifest.from_json(path.read_text(encoding="utf-8"), where=str(path)))
                except (OSError, ValueError, RecursionError, StoreUnavailableError):
                    continue
        return found

    def remove(self, collection: str) -> None:
        """Remove a version's files and what killed writes left among them; nothing happens when there are none.

        The manifest goes last: until then `manifests` lists the version, so that a removal that was killed is found.
        """
        folder = self._base / collection
        with self._explained("removed"):
            if not folder.exists():
                return
            for entry in sorted(folder.iterdir(), key=lambda path: path.name):
                if entry.is_dir():
                    entry.rmdir(recursive=True)
                elif entry.name != MANIFEST:
                    entry.unlink(missing_ok=True)
            (folder / MANIFEST).unlink(missing_ok=True)
            with contextlib.suppress(*_ABSENT):  # an object store has no empty folders
                folder.rmdir(recursive=True)

    def collections(self) -> list[str]:
        """Names of the versions that have any file here."""
        with self._explained("read"):
            return [path.name for path in self._entries() if path.is_dir()]

    def write_promoted(self, alias: str, collection: str) -> None:
        """Repeat what an alias points to."""
        with self._explained("written"):
            _write(self._base / f"{alias}.promoted.json", json.dumps({"collection": collection}).encode())

    def read_promoted(self, alias: str) -> str:
        """What the alias pointed to when it was last moved from here; blank when unknown."""
        with self._explained("read"):
            try:
                text = (self._base / f"{alias}.promoted.json").read_text(encoding="utf-8")
                collection = json.loads(text)["collection"]
            except (*_ABSENT, ValueError, KeyError, TypeError, RecursionError):
                return ""
        return collection if isinstance(collection, str) else ""

    def _entries(self) -> list[UPath]:
        with self._explained("read"):
            if not self._base.exists():
                return []
            return sorted(self._base.iterdir(), key=lambda path: path.name)

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        """Give a failure of the file system or of its fsspec driver a type of this project and a next step."""
        place = f"The place of the artefacts, {masked(str(self._base))} (index.artifacts_uri),"
        try:
            yield
        except RagPipelineError:
            raise
        except ImportError as error:
            extra = _EXTRAS.get(self._base.protocol)
            how = f"Install the extra: pip install 'rag-pipeline[{extra}]'" if extra else "Install that package"
            raise ConfigurationError(
                f"{place} needs a package that is missing: {error}. {how}, or name another place."
            ) from None
        except ValueError as error:
            raise ConfigurationError(
                f"{place} is none that fsspec can open: {masked(str(error))}. Name a folder or another URI."
            ) from None
        except OSError as error:
            raise StoreUnavailableError(
                f"{place} cannot be {done}: {masked(str(error))}. Check that the disk is not full and that it may be "
                "written, then run the command again."
            ) from None
        except Exception as error:
            if _is_local(self._base):
                raise
            # A driver's own errors (no credentials, no such host) derive from nothing in common.
            raise StoreUnavailableError(
                f"{place} cannot be {done}: {type(error).__name__}: {masked(str(error))}. Check the address, the "
                "network and the credentials."
            ) from None


def _write(path: UPath, data: bytes) -> None:
    """Replace a file as a whole: its new bytes are written aside, under a name of this write alone, and moved there."""
    with contextlib.suppress(*_ABSENT):
        if path.read_bytes() == data:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.aside"
    try:
        if _is_local(path):
            local = Path(aside.path)
            _write_through(local, data)
            local.replace(path.path)
            _sync_folder(local.parent)
        else:
            aside.write_bytes(data)
            aside.rename(path)
    except BaseException:
        with contextlib.suppress(Exception):
            aside.unlink(missing_ok=True)
        raise


def _is_local(path: UPath) -> bool:
    return path.protocol in ("", "file", "local")


def _write_through(path: Path, data: bytes) -> None:
    with path.open("xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot; then the move is as durable as they make it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cached(path: UPath, wanted: str) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if _digest(data) == wanted else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
