"""A folder of segment files that hold what is not in the database yet; it outlives the process that wrote them.

A segment has one line for each record. It begins as ``<id>.active``, locked (flock) by the one process that appends to
it; renamed to ``<id>.ready`` it only waits for the database. Whoever can lock a segment may write it to the database
and delete it: an active one whose process has died (the lock goes with it, even by ``kill -9``) or a ready one. What
cannot be written stays in ``<id>.refused`` for a person to look at.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rag_pipeline.invocations.records import new_invocation_id

# One process appends to a segment for as long as the database is down; this keeps the files handy.
_SEGMENT_BYTES = 16 * 2**20


class Segment:
    """A segment that is locked by this object until `release` or `delete`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._process = os.getpid()

    def lines(self) -> Iterator[bytes]:
        """The lines, without their newlines; a last one without newline was cut off, and is given as it is.

        Raises:
            OSError: The file cannot be read.
        """
        with self.path.open("rb") as file:
            for line in file:
                yield line.removesuffix(b"\n")

    def keep_aside(self, lines: Sequence[bytes]) -> None:
        """Keep lines for a person to look at.

        Raises:
            OSError: It cannot be written.
        """
        descriptor = os.open(self.path.with_suffix(".refused"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            before = os.fstat(descriptor).st_size
            left = b"".join(line + b"\n" for line in lines)
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, before)  # the attempt is made again
                raise
        finally:
            os.close(descriptor)

    def delete(self) -> None:
        """Delete the file: everything in it is in the database, or kept aside."""
        self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Unlock the segment and leave it for another time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if self._process == os.getpid():
                # A child that was forked meanwhile has the descriptor, too: closing would not unlock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class Spool:
    """The spool folder as one process uses it. Not safe in threads by itself: the recorder's lock is around it.

    Args:
        folder: Made at the first append, for its owner only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path: Path | None = None
        self._descriptor = -1
        self._size = 0
        self._own: set[Path] = set()

    def append(self, line: bytes) -> None:
        """Add a line by a single write.

        Raises:
            OSError: It could not be written; no part of it is left behind that could spoil another line.
        """
        if self._path is None or os.fstat(self._descriptor).st_nlink == 0:  # the folder was deleted under it
            self._open()
        data = line + b"\n"
        written = 0
        try:
            written = os.write(self._descriptor, data)
        finally:
            if written != len(data):
                self._take_back()
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes could be written to {self._path}")
        self._size += len(data)
        if self._size >= _SEGMENT_BYTES:
            self.rotate()

    def rotate(self) -> None:
        """Make this process's active segment a ready one.

        Raises:
            OSError: It could not be renamed.
        """
        if self._path is None:
            return
        if os.fstat(self._descriptor).st_nlink:
            ready = self._path.with_suffix(".ready")
            self._path.rename(ready)
            self._own.add(ready)
        self._close(unlock=True)

    def claim(self) -> Iterator[Segment]:
        """Lock, one after the other and oldest first, every segment that nobody else holds.

        Each is released when the next one is asked for, or when the caller leaves the loop.
        """
        for name in self._names():
            if (path := self.folder / name) == self._path:
                continue
            segment = _lock(path)
            if segment is None:
                continue
            try:
                yield segment
            finally:
                segment.release()

    def older_than(self, segment: Segment) -> bool:
        """Whether a segment that was begun before this one is still to be written by somebody."""
        names = [name for name in self._names() if name.endswith(".ready") and name < segment.path.name]
        return any(_can_be_opened(self.folder / name) for name in names)

    def owed(self) -> set[Path]:
        """The ready segments that this process has filled and that are still there."""
        self._own = {path for path in self._own if path.exists()}
        return set(self._own)

    def waiting(self) -> int:
        """How many segments lie in the folder, of all processes."""
        return len(self._names())

    def expire(self, older_than: float) -> int:
        """Delete what nobody holds and nobody has written to since ``older_than`` (seconds since 1970)."""
        deleted = 0
        try:
            old = [
                entry
                for entry in os.scandir(self.folder)
                if entry.name.endswith((".ready", ".refused"))
                and entry.is_file(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_mtime < older_than
            ]
        except OSError:
            return 0
        for entry in old:
            # Somebody may be writing it to the database just now.
            if (segment := _lock(Path(entry.path))) is not None:
                with contextlib.suppress(OSError):
                    segment.delete()
                    deleted += 1
                segment.release()
        return deleted

    def forget(self) -> None:
        """In a forked child: the segments are the parent's, and so is the lock."""
        self._close(unlock=False)
        self._own = set()

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.folder) if name.endswith((".active", ".ready")))  # noqa: PTH208
        except OSError:
            return []

    def _open(self) -> None:
        self._close(unlock=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            path = self.folder / f"{new_invocation_id()}.active"
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
            if _try_lock(descriptor) and _is_at(descriptor, path):
                self._path, self._descriptor, self._size = path, descriptor, 0
                return
            os.close(descriptor)  # taken for a dead process's, between the two calls

    def _close(self, *, unlock: bool) -> None:
        descriptor = self._descriptor
        self._path, self._descriptor, self._size = None, -1, 0
        if descriptor >= 0:
            if unlock:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            # The part of a line ends this segment; readers set it aside.
            self.rotate()


def _lock(path: Path) -> Segment | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # just written by somebody else, or another user's
        return None
    segment = Segment(path, descriptor)
    try:
        if _try_lock(descriptor) and _is_at(descriptor, path):
            if path.suffix == ".active":
                segment.path = path.with_suffix(".ready")
                path.rename(segment.path)
            return segment
    except OSError:
        pass
    segment.release()
    return None


def _can_be_opened(path: Path) -> bool:
    """Whether a segment may be claimed, now or when it is let go; not another user's, nor a link."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NOFOLLOW))
    except OSError:
        return False
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked is still the one of this name."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
