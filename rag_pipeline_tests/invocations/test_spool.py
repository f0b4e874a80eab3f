"""The spool folder: whole lines, one owner a segment, nothing lost between two processes."""

import fcntl
import os
import signal
import stat
from pathlib import Path

import pytest

from rag_pipeline.invocations import spool as spool_module
from rag_pipeline.invocations.spool import Spool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def claimed(spool: Spool) -> list[bytes]:
    """The lines of all that can be claimed, which is deleted."""
    lines = []
    for segment in spool.claim():
        lines += segment.lines()
        segment.delete()
    return lines


def test_lines_come_back_in_their_order_and_only_once(folder: Path) -> None:
    spool = Spool(folder)
    for number in range(3):
        spool.append(b"line %d" % number)
    assert claimed(spool) == []  # its own active segment is not yet for taking
    spool.rotate()
    assert spool.waiting() == 1
    assert claimed(spool) == [b"line 0", b"line 1", b"line 2"]
    assert claimed(spool) == []
    assert list(folder.iterdir()) == []


def test_only_the_owner_may_read_the_files(folder: Path) -> None:
    spool = Spool(folder)
    spool.append(b"secret")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


def test_the_active_segment_of_a_living_process_is_left_alone(folder: Path) -> None:
    living = Spool(folder)
    living.append(b"mine")
    assert claimed(Spool(folder)) == []
    living.append(b"mine, too")
    living.rotate()
    assert claimed(Spool(folder)) == [b"mine", b"mine, too"]
    assert living.owed() == set()


def test_the_active_segment_of_a_process_that_died_is_taken_over(folder: Path) -> None:
    pid = os.fork()
    if pid == 0:
        Spool(folder).append(b"last words")
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert [path.suffix for path in folder.iterdir()] == [".active"]
    assert claimed(Spool(folder)) == [b"last words"]


def test_a_segment_is_claimed_by_one_at_a_time(folder: Path) -> None:
    spool = Spool(folder)
    spool.append(b"a")
    spool.rotate()
    first = spool.claim()
    assert next(first).path.suffix == ".ready"
    assert list(Spool(folder).claim()) == []
    first.close()
    assert claimed(Spool(folder)) == [b"a"]


def test_a_released_segment_stays_for_another_time(folder: Path) -> None:
    spool = Spool(folder)
    spool.append(b"a")
    spool.rotate()
    for _ in spool.claim():
        pass
    assert len(spool.owed()) == 1
    assert claimed(spool) == [b"a"]


def test_a_child_that_is_forked_meanwhile_does_not_keep_the_segments_locked(folder: Path) -> None:
    spool = Spool(folder)
    spool.append(b"a")
    spool.rotate()
    spool.append(b"b")
    claims = spool.claim()
    next(claims)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        claims.close()
        spool.rotate()
        assert claimed(Spool(folder)) == [b"a", b"b"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_new_segment_that_is_taken_between_making_and_locking_is_not_written_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process sees the new file, finds it unlocked, and deletes it as a dead process's."""
    real, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            for path in folder.iterdir():
                path.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(spool_module.fcntl, "flock", flock)
    spool = Spool(folder)
    spool.append(b"kept")
    spool.rotate()
    assert claimed(Spool(folder)) == [b"kept"]
    assert len(calls) > 1


def test_a_folder_that_is_deleted_under_it_is_made_again(folder: Path) -> None:
    import shutil

    spool = Spool(folder)
    spool.append(b"gone with the folder")
    shutil.rmtree(folder)
    spool.append(b"kept")
    spool.rotate()
    assert claimed(spool) == [b"kept"]


def test_a_write_that_was_cut_short_leaves_no_part_of_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(folder)
    spool.append(b"before")
    real = os.write
    monkeypatch.setattr(spool_module.os, "write", lambda descriptor, data: real(descriptor, data[:5]))
    with pytest.raises(OSError, match="only 5 of"):
        spool.append(b"cut in two")
    monkeypatch.setattr(spool_module.os, "write", real)
    spool.append(b"after")
    spool.rotate()
    assert claimed(spool) == [b"before", b"after"]


def test_a_part_that_cannot_be_taken_back_spoils_no_other_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(folder)
    spool.append(b"before")
    real = os.write

    def broken(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(spool_module.os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    monkeypatch.setattr(spool_module.os, "ftruncate", broken)
    with pytest.raises(OSError, match="only 3 of"):
        spool.append(b"cut in two")
    monkeypatch.setattr(spool_module.os, "write", real)
    spool.append(b"after")
    spool.rotate()
    assert claimed(spool) == [b"before", b"cut", b"after"]


def test_a_large_segment_is_closed_and_another_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "_SEGMENT_BYTES", 10)
    spool = Spool(folder)
    for _ in range(3):
        spool.append(b"0123456789")
    assert sorted(path.suffix for path in folder.iterdir()) == [".ready"] * 3
    assert len(claimed(spool)) == 3


def test_what_is_no_segment_is_left_alone(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("not ours\n")
    (folder / "link.ready").symlink_to(outside)
    (folder / "folder.ready").mkdir()
    (folder / "notes.txt").write_text("mine\n")
    assert claimed(Spool(folder)) == []
    assert outside.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["folder.ready", "link.ready", "notes.txt"]


def test_expiry_deletes_what_is_old_and_not_in_use(folder: Path) -> None:
    spool = Spool(folder)
    spool.append(b"old")
    spool.rotate()
    for segment in spool.claim():
        segment.keep_aside([b"odd"])
    spool.append(b"in use")
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))
    assert spool.expire(999) == 0
    assert spool.expire(1001) == 2
    assert [path.suffix for path in folder.iterdir()] == [".active"]


def test_expiry_leaves_what_another_process_is_just_writing(folder: Path) -> None:
    spool = Spool(folder)
    spool.append(b"old")
    spool.rotate()
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))
    others = Spool(folder).claim()
    next(others)
    assert spool.expire(2000) == 0
    others.close()
    assert spool.expire(2000) == 1


def test_lines_kept_aside_are_whole_however_little_is_written_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(folder)
    spool.append(b"a")
    spool.rotate()
    real, room = os.write, [3, 2]
    for segment in spool.claim():
        segment.keep_aside([b"first"])

        def write(descriptor: int, data: bytes) -> int:
            if not room:
                raise OSError("no space left")
            return real(descriptor, data[: room.pop()])

        with monkeypatch.context() as patch:
            patch.setattr(spool_module.os, "write", write)
            with pytest.raises(OSError, match="no space"):
                segment.keep_aside([b"second", b"third"])
        with monkeypatch.context() as patch:
            patch.setattr(spool_module.os, "write", lambda descriptor, data: real(descriptor, data[:2]))
            segment.keep_aside([b"second", b"third"])
    (aside,) = folder.glob("*.refused")
    assert aside.read_bytes() == b"first\nsecond\nthird\n"
