"""Keeps vectors between runs: one SQLite file a model fingerprint, shared by any number of processes."""

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import filelock
import numpy as np
import numpy.typing as npt

_BUSY_SECONDS = 30.0
_KEYS_AT_ONCE = 500
_LAYOUT = 1
_NORM_TOLERANCE = 1e-3
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class EmbeddingCache:
    """Vectors by the digest of their embedding text; may be used by threads and processes at once.

    A cache never fails a run: a damaged file is set aside as ``<fingerprint>.sqlite.corrupt`` and begun anew, and where
    nothing can be written (or the disk is full) the run goes on without a cache; each is told once in the log.

    Args:
        directory: Where the file lies; created when missing.
        fingerprint: Of the model, see `rag_pipeline.index.models.ResolvedModel`.
        dimension: Length of its vectors; a stored vector of another length counts as missing.
    """

    def __init__(self, directory: Path, *, fingerprint: str, dimension: int) -> None:
        self._path = directory / f"{fingerprint}.sqlite"
        self._dimension = dimension
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self._path

    def get_many(self, digests: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
        """The vectors that are there, by digest; a digest without one is absent.

        A stored value that is no unit vector of the right length (a damaged page may still read) counts as missing.
        """
        return self._run(lambda connection: self._read(connection, digests), otherwise={})

    def put_many(self, items: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Stores vectors in one transaction, replacing those of equal digest."""
        if items:
            self._run(lambda connection: self._write(connection, items), otherwise=None)

    def close(self) -> None:
        """Closes the file; the cache opens it again when used again."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                self._connection = None

    def _read(self, connection: sqlite3.Connection, digests: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
        keys = list(dict.fromkeys(digests))
        names: list[str] = []
        blobs: list[bytes] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = keys[start : start + _KEYS_AT_ONCE]
            marks = ",".join("?" * len(part))
            rows = connection.execute(
                f"SELECT digest, vector FROM vectors WHERE digest IN ({marks})",  # noqa: S608 - only question marks
                [bytes.fromhex(key) for key in part],
            )
            for digest, blob in rows:
                if isinstance(blob, bytes) and len(blob) == 4 * self._dimension:
                    names.append(bytes(digest).hex())
                    blobs.append(blob)
        vectors = np.frombuffer(b"".join(blobs), "<f4").astype(np.float32).reshape(len(blobs), self._dimension)
        with np.errstate(all="ignore"):
            sound = np.abs(np.linalg.norm(vectors, axis=1) - 1.0) < _NORM_TOLERANCE
        return {name: vectors[row] for row, name in enumerate(names) if sound[row]}

    def _write(self, connection: sqlite3.Connection, items: Mapping[str, npt.NDArray[np.float32]]) -> None:
        rows = [(bytes.fromhex(digest), np.asarray(vector, "<f4").tobytes()) for digest, vector in items.items()]
        with connection:
            connection.executemany("INSERT OR REPLACE INTO vectors (digest, vector) VALUES (?, ?)", rows)

    def _run(self, work: Callable[[sqlite3.Connection], _T], *, otherwise: _T) -> _T:
        """The work's result; a damaged file gets one fresh start, any other failure ends the use of the cache."""
        with self._lock:
            for attempt in range(2):
                if self._given_up:
                    break
                try:
                    return work(self._open())
                except (sqlite3.Error, OSError) as error:
                    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                    if code in _DAMAGED and attempt == 0:
                        self._set_aside(error)
                    else:
                        self._give_up(error)
        return otherwise

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Taken before opening: when another process replaces the file in between, the new one is not blamed.
            before = self._path.stat().st_ino if self._path.exists() else None
            connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, check_same_thread=False)
            self._connection = connection
            self._inode = self._path.stat().st_ino if before is None else before
            connection.execute("PRAGMA journal_mode=WAL")
            # A lost last transaction after a power cut costs embedding some texts again, and no damage.
            connection.execute("PRAGMA synchronous=NORMAL")
            layout = connection.execute("PRAGMA user_version").fetchone()[0]
            if layout not in {0, _LAYOUT}:
                raise sqlite3.OperationalError(f"its layout is {layout}; this version of rag-pipeline knows {_LAYOUT}")
            with connection:
                connection.execute("CREATE TABLE IF NOT EXISTS vectors (digest BLOB PRIMARY KEY, vector BLOB NOT NULL)")
                connection.execute(f"PRAGMA user_version={_LAYOUT}")
        return self._connection

    def _set_aside(self, error: Exception) -> None:
        self.close()
        try:
            with filelock.FileLock(self._path.with_suffix(".lock"), timeout=_BUSY_SECONDS):
                # Another process may have replaced the file since this one opened it.
                if self._path.exists() and self._path.stat().st_ino == self._inode:
                    aside = self._path.with_name(self._path.name + ".corrupt")
                    self._path.replace(aside)
                    for ending in ("-wal", "-shm"):
                        self._path.with_name(self._path.name + ending).unlink(missing_ok=True)
                    _log.warning(
                        "The embedding cache %s is damaged (%s); it was set aside as %s and begins anew.",
                        self._path,
                        error,
                        aside.name,
                    )
        except (OSError, filelock.Timeout) as failure:
            self._give_up(failure)

    def _give_up(self, error: Exception) -> None:
        self.close()
        self._given_up = True
        _log.warning(
            "The embedding cache %s cannot be used (%s): this run embeds without it. Make the folder writable, with "
            "room for it, or choose another cache folder.",
            self._path,
            error,
        )
