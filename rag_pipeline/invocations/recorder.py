"""Record invocations without ever failing or delaying the caller: first to a spool file, then to the database.

`InvocationRecorder.record` appends a line to a file; a thread moves the lines to the database. What a killed process or
a database that was down has left in the spool is written by whichever recorder comes next. The primary key makes a line
that is written twice one row. What becomes known of an invocation later is a line of its own, an amendment.
"""

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rag_pipeline.errors import RagPipelineError
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.forking import reset_in_forks
from rag_pipeline.invocations.records import Amendment, Invocation, spooled
from rag_pipeline.invocations.redaction import Redactor
from rag_pipeline.invocations.spool import Segment, Spool
from rag_pipeline.invocations.store import InvocationStore

logger = logging.getLogger(__name__)

_AT_EXIT_S = 2.0
_TRY_AGAIN_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# Lookups in quick succession share a transaction.
_GATHER_S = 0.02
# How often an idle process looks for segments of processes that died.
_LOOK_AROUND_S = 30.0
_PURGE_EVERY_S = 3600.0
_MOST_UNSPOOLED = 1000
# MySQL's default `max_allowed_packet` of old is 4 MB, and a statement holds several rows.
_LONGEST_LINE = 2**20
_BATCH = 200
# A century: what is older than that no calendar of a database can be trusted with.
_LONGEST_RETENTION_DAYS = 36500


class InvocationRecorder:
    """The write path of one process. Safe in threads and in forked children.

    Args:
        database: Where the rows end up; it need not be reachable, nor have tables yet.
        spool_folder: Where the lines wait; shared by all processes of a state folder.
        retention_days: Older rows, and lines that wait for longer, are deleted; 0: kept; a century at most.
        patterns: What is redacted beyond the built-in patterns; see `redaction.Redactor`.

    Raises:
        ConfigurationError: A pattern is no regular expression.
    """

    def __init__(
        self, database: Database, *, spool_folder: Path, retention_days: int = 90, patterns: Sequence[str] = ()
    ) -> None:
        self._database = database
        self._store = InvocationStore(database)
        self._redactor = Redactor(patterns)
        self._retention = timedelta(days=min(retention_days, _LONGEST_RETENTION_DAYS))
        self._spool = Spool(spool_folder)
        self.after_fork()
        reset_in_forks(self)
        atexit.register(self._at_exit)

    @property
    def dropped(self) -> int:
        """How many records of this process were lost, since neither spool nor database took them."""
        return self._dropped

    @property
    def last_failure(self) -> str:
        """Why the last attempt to write to the database failed; blank when it did not."""
        return self._failure

    def waiting(self) -> int:
        """How many spool files of all processes, and records in memory, are not known to be in the database."""
        with self._lock:
            return self._spool.waiting() + len(self._unspooled)

    def record(self, invocation: Invocation) -> None:
        """Record ``invocation``, redacted. Never raises, never waits for the database."""
        try:
            self._record(invocation)
        except Exception as error:
            self._drop(f"{type(error).__name__}: {error}")

    def amend(self, invocation_id: str, details: Mapping[str, Any]) -> None:
        """Replace these names in the ``retrieval_details`` of a recorded invocation, redacted.

        As safe as `record`: never raises, never waits for the database. An amendment whose invocation is not there
        (purged, refused by the database) is left out.
        """
        try:
            self._amend(invocation_id, details)
        except Exception as error:
            self._drop(f"{type(error).__name__}: {error}")

    def start(self) -> None:
        """Write what other processes have left in the spool, without waiting for the first record."""
        with self._changed:
            self._urgent = True
            self._start_writer()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that this process has recorded is in the database; True when it is.

        A database that is down is tried again until the time is over. What is not written stays in the spool; what was
        `dropped` does not count.
        """
        return self._wait(timeout_s, tries_again=True)

    def close(self, timeout_s: float = _AT_EXIT_S) -> bool:
        """`flush` with a single attempt, then end the writer; what is recorded later is left for another process."""
        written = self._wait(timeout_s, tries_again=False)
        with self._changed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._spool.rotate()
            self._changed.notify_all()
        atexit.unregister(self._at_exit)
        return written

    def after_fork(self) -> None:
        """Begin with nothing recorded: all that was is the parent's."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._spool.forget()
        self._unspooled: deque[Invocation | Amendment] = deque()
        self._thread: threading.Thread | None = None
        self._recorded = 0
        self._written = 0
        self._attempts = 0
        self._attempting = False
        self._dropped = 0
        self._failure = ""
        self._urgent = False
        self._closed = False
        self._next_purge = 0.0
        self._next_expiry = 0.0

    def _record(self, invocation: Invocation) -> None:
        redacted = _redacted(invocation, self._redactor)
        line = redacted.to_json_line().encode()
        if len(line) > _LONGEST_LINE:
            redacted = _shortened(redacted, length=len(line))
            line = redacted.to_json_line().encode()
        self._keep(redacted, line)

    def _amend(self, invocation_id: str, details: Mapping[str, Any]) -> None:
        amendment = Amendment(invocation_id, dict(self._redactor.mapping(details)))
        line = amendment.to_json_line().encode()
        if len(line) > _LONGEST_LINE:
            omitted = {"omitted": f"the amendment had {len(line)} bytes, more than {_LONGEST_LINE}"}
            amendment = Amendment(invocation_id, dict.fromkeys(amendment.details, omitted))
            line = amendment.to_json_line().encode()
        self._keep(amendment, line)

    def _keep(self, item: Invocation | Amendment, line: bytes) -> None:
        """Put it into the spool, or else into memory."""
        with self._changed:
            try:
                if self._unspooled and isinstance(item, Amendment):
                    raise BlockingIOError("its invocation may be waiting in memory")
                self._spool.append(line)
            except OSError as error:
                if len(self._unspooled) >= _MOST_UNSPOOLED:
                    self._drop(f"neither the spool nor the database takes any: {error}")
                    return
                if not self._unspooled:
                    logger.warning("Invocations are kept in memory: the spool takes none (%s).", error)
                self._unspooled.append(item)
            self._recorded += 1
            if not self._closed:
                self._start_writer()
            self._changed.notify_all()

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        if str(self._dropped).strip("0") == "1":  # the 1st, 10th, 100th …: a log must not fill up, too
            logger.error("%d invocations of this process are lost: %s", self._dropped, reason)

    def _start_writer(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_all, name="invocation-writer", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending: the spool keeps it
                self._thread.start()

    def _wait(self, timeout_s: float, *, tries_again: bool) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            target = self._recorded
            # An attempt that runs now may have begun too early to count.
            last = self._attempts + (2 if self._attempting else 1)
            while self._written < target and (tries_again or self._attempts < last):
                left = deadline - time.monotonic()
                if left <= 0 or self._closed or not (self._thread and self._thread.is_alive()):
                    break
                self._urgent = True
                self._changed.notify_all()
                self._changed.wait(min(left, _TRY_AGAIN_S))
            return self._written >= target

    def _at_exit(self) -> None:
        if self._recorded > self._written:
            self._wait(_AT_EXIT_S, tries_again=False)

    def _write_all(self) -> None:
        """The writer's life."""
        pause = 0.0
        while self._wait_for_work(pause):
            failure = self._attempt()
            if failure and not self._failure:
                logger.warning("Invocations wait in the spool %s: %s", self._spool.folder, failure)
            elif self._failure and not failure:
                logger.info("Invocations are written to the database again.")
            pause = min(pause * 2 or _FIRST_PAUSE_S, _LONGEST_PAUSE_S) if failure else 0.0
            with self._changed:
                self._failure = failure
                self._attempts += 1
                self._attempting = False
                self._changed.notify_all()

    def _wait_for_work(self, pause: float) -> bool:
        """Wait for a record, or after a failure for ``pause`` seconds; False when there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._urgent or (not pause and self._recorded > self._written),
                timeout=pause or _LOOK_AROUND_S,
            )
            self._changed.wait_for(lambda: self._closed or self._urgent, timeout=_GATHER_S)
            self._urgent = False
            self._attempting = not self._closed
            return not self._closed

    def _attempt(self) -> str:
        """Move all that waits to the database; returns why that failed, blank when it did not."""
        try:
            self._expire()
            with self._lock:
                if not self._spool.waiting() and not self._unspooled:
                    self._written = self._recorded
                    return ""
            # What waited already goes first: as long as that fails, the active segment grows rather than their number.
            self._write_segments()
            with self._lock:
                upto = self._recorded
                unspooled = list(self._unspooled)
                self._spool.rotate()
                owed = self._spool.owed()
            self._write_segments()
            if unspooled:
                self._write_unspooled(unspooled)
            with self._lock:
                for _ in unspooled:
                    self._unspooled.popleft()
                if owed & self._spool.owed():
                    return "another process is just writing a segment of this one"
                self._written = max(self._written, upto)
                self._changed.notify_all()
        except (RagPipelineError, OSError) as error:
            self._spool_again()
            return str(error)
        except Exception as error:
            logger.exception("The writer of invocations has met an error it does not know.")
            return f"{type(error).__name__}: {error}"
        self._purge()
        return ""

    def _write_segments(self) -> None:
        waiting: set[str] = set()
        for segment in self._spool.claim():
            aside, amendments = self._write_lines(segment)
            if amendments and not self._write_amendments(segment, amendments, waiting):
                continue  # once more, when what is older has been written: twice does no harm
            # Only now that all others are in: an attempt that fails is made again from the beginning.
            if aside:
                logger.warning("%d lines of %s are no invocations, cut off, or refused.", len(aside), segment.path)
                segment.keep_aside(aside)
            segment.delete()

    def _write_lines(self, segment: Segment) -> tuple[list[bytes], list[Amendment]]:
        """Write a segment's invocations; returns the lines that are not to be written at all, and the amendments."""
        aside: list[bytes] = []
        amendments: list[Amendment] = []
        waiting: dict[str, tuple[Invocation, bytes]] = {}

        def write() -> None:
            refused = self._store.insert([invocation for invocation, _ in waiting.values()])
            self._log_refused(refused)
            aside.extend(waiting[invocation_id][1] for invocation_id in refused)
            waiting.clear()

        for line in segment.lines():
            try:
                item = spooled(line)
            except ValueError:
                aside.append(line)
                continue
            if isinstance(item, Amendment):
                amendments.append(item)
                continue
            waiting[item.id] = item, line
            if len(waiting) >= _BATCH:
                write()
        write()
        return aside, amendments

    def _write_amendments(self, segment: Segment, amendments: list[Amendment], waiting: set[str]) -> bool:
        """Amend what a segment's amendments name; False when a row may still come from an older segment.

        Args:
            waiting: The invocations of which an older segment's amendment waits already; this one's join them.
        """
        # Asked before, so that what is not older any more is in the database.
        may_come = self._spool.older_than(segment)
        due = [amendment for amendment in amendments if amendment.id not in waiting]
        undone = self._store.amend(due)
        absent = {invocation_id for invocation_id, reason in undone.items() if not reason}
        if may_come:
            waiting |= absent
            if any(amendment.id in waiting for amendment in amendments):
                return False
        self._log_unamended(undone)
        return True

    def _write_unspooled(self, items: Sequence[Invocation | Amendment]) -> None:
        self._log_refused(self._store.insert([item for item in items if isinstance(item, Invocation)]))
        self._log_unamended(self._store.amend([item for item in items if isinstance(item, Amendment)]))

    @staticmethod
    def _log_unamended(undone: dict[str, str]) -> None:
        for invocation_id, reason in undone.items():
            logger.warning("Invocation %s is not amended: %s", invocation_id, reason or "there is no such row")

    @staticmethod
    def _log_refused(refused: dict[str, str]) -> None:
        for invocation_id, reason in refused.items():
            logger.error("The database refuses invocation %s: %s", invocation_id, reason)

    def _spool_again(self) -> None:
        """Put what is only in memory into the spool, if that takes it by now."""
        with self._lock, contextlib.suppress(OSError):
            while self._unspooled:
                self._spool.append(self._unspooled[0].to_json_line().encode())
                self._unspooled.popleft()

    def _purge(self) -> None:
        if not self._retention or time.monotonic() < self._next_purge:
            return
        self._next_purge = time.monotonic() + _PURGE_EVERY_S
        try:
            self._store.purge(datetime.now(UTC) - self._retention)
        except Exception as error:  # nothing that was recorded is at stake
            logger.warning("Old invocations are not deleted this time: %s", error)

    def _expire(self) -> None:
        """Delete what has waited for longer than rows are kept, even while the database is down."""
        if not self._retention or time.monotonic() < self._next_expiry:
            return
        self._next_expiry = time.monotonic() + _PURGE_EVERY_S
        if expired := self._spool.expire(time.time() - self._retention.total_seconds()):
            logger.warning("%d spool files older than the retention were deleted.", expired)


def _redacted(invocation: Invocation, redactor: Redactor) -> Invocation:
    return replace(
        invocation,
        session_id=redactor.session_id(invocation.session_id),
        input_params=redactor.mapping(invocation.input_params),
        output_preview=redactor.text(invocation.output_preview),
        retrieval_details=redactor.mapping(invocation.retrieval_details),
        dedup_reason=redactor.text(invocation.dedup_reason),
    )


def _shortened(invocation: Invocation, *, length: int) -> Invocation:
    omitted = {"omitted": f"the record had {length} bytes, more than {_LONGEST_LINE}"}
    return replace(
        invocation, input_params=omitted, retrieval_details=omitted, output_preview=invocation.output_preview[:1000]
    )
