"""What a session was given before, read and written within a hard limit of time.

The database may be locked, hung or gone: the caller waits for `timeout_ms` and no longer. Few workers do the waiting;
while all of them hang, every call fails at once.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rag_pipeline.errors import RagPipelineError
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.forking import reset_in_forks
from rag_pipeline.invocations.redaction import Redactor

_WORKERS = 4
_MOST_QUEUED = 64


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session was given.

    Attributes:
        given: Keys of evidence to the id of the invocation that gave it first.
        domains: The domains of all that was given, sorted.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    domains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recall:
    """The outcome of a `SessionMemory.recall`.

    Attributes:
        state: What the session was given; ``None`` when that cannot be told.
        failure: Why not; blank otherwise.
    """

    state: SessionState | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The outcome of a `SessionMemory.remember`.

    Attributes:
        written: True when other processes see it from now on.
        failure: Why not; blank otherwise.
    """

    written: bool
    failure: str = ""


class _Job:
    """One piece of work that its caller may give up on."""

    def __init__(self, work: "Callable[[_Job], object]") -> None:
        self._work = work
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.result: object = None
        self.failure = ""
        self.abandoned = False

    def run(self) -> None:
        try:
            self.result = self._work(self)
        except RagPipelineError as error:
            self.failure = str(error)
        except Exception as error:  # the caller is told, whatever it is
            self.failure = f"{type(error).__name__}: {error}"
        self.done.set()

    def commit_or_stop(self) -> None:
        """Leave the transaction if the caller was told already that it failed."""
        if self.abandoned:
            raise _AbandonedError


@dataclass(frozen=True, slots=True)
class _Failed:
    failure: str
    result: None = None


class _AbandonedError(Exception):
    """Nobody waits for this any more."""


class SessionMemory:
    """The tables ``session_evidence`` and ``session_domain``. Safe in threads and in forked children; never raises.

    Args:
        database: Where the tables are.
        timeout_ms: What a call takes at most, whatever the database does.
        patterns: As for the recorder: a session id that holds a secret is stored as its digest.
    """

    def __init__(self, database: Database, *, timeout_ms: int = 50, patterns: Sequence[str] = ()) -> None:
        self._database = database
        self._timeout_s = timeout_ms / 1000
        self._redactor = Redactor(patterns)
        self.after_fork()
        reset_in_forks(self)

    def prepare(self) -> None:
        """Load the database library and connect in the background, so that the first call need not."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._connect, name="session-memory-start", daemon=True).start()

    def recall(self, session_id: str) -> Recall:
        """What the session was given so far, by any process; nothing for a blank id."""
        session = self._redactor.session_id(session_id)
        if not session:
            return Recall(SessionState())
        job = self._do(lambda _: self._read(session))
        return Recall(job.result if isinstance(job.result, SessionState) else None, job.failure)

    def remember(self, session_id: str, invocation_id: str, keys: Sequence[str], domains: Sequence[str]) -> Remembered:
        """Note what the session was given; of a key that it was given before, the first invocation stays.

        With a blank id, or nothing to note, nothing is written and that counts as success.
        """
        session = self._redactor.session_id(session_id)
        if not session or not (keys or domains):
            return Remembered(written=True)
        job = self._do(lambda job: self._write(session, invocation_id, sorted(set(keys)), sorted(set(domains)), job))
        return Remembered(not job.failure, job.failure)

    def after_fork(self) -> None:
        """Begin without workers: they are the parent's."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._workers = 0
        self._idle = 0
        self._running: set[_Job] = set()

    def _do(self, work: Callable[[_Job], object]) -> "_Job | _Failed":
        # The first call of a process loads SQLAlchemy, which is no fault of the database.
        import rag_pipeline.invocations.tables  # noqa: F401

        deadline = time.monotonic() + self._timeout_s
        job = _Job(work)
        with self._lock:
            hung = sum(running.abandoned for running in self._running)
            if hung >= _WORKERS or self._jobs.qsize() >= _MOST_QUEUED:
                return _Failed(f"the database has not answered {hung} earlier calls yet")
            if self._workers < _WORKERS and self._idle <= self._jobs.qsize():
                try:
                    self._start_worker()
                except RuntimeError as error:  # no more threads
                    return _Failed(str(error))
            self._jobs.put(job)
        if job.done.wait(max(0.0, deadline - time.monotonic())):
            return job
        job.abandoned = True
        return _Failed(f"the database did not answer within {self._timeout_s * 1000:.0f} ms")

    def _start_worker(self) -> None:
        threading.Thread(target=self._serve, args=(self._jobs,), name="session-memory", daemon=True).start()
        self._workers += 1

    def _serve(self, jobs: "queue.SimpleQueue[_Job]") -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = jobs.get()
            with self._lock:
                self._idle -= 1
                self._running.add(job)
            if not job.abandoned:
                job.run()
            with self._lock:
                self._running.discard(job)

    def _connect(self) -> None:
        with contextlib.suppress(RagPipelineError), self._database.transaction(wait_s=self._timeout_s):
            pass

    def _read(self, session: str) -> SessionState:
        import sqlalchemy as sa

        from rag_pipeline.invocations.tables import session_domain, session_evidence

        evidence = sa.select(session_evidence.c.evidence_key, session_evidence.c.invocation_id)
        domains = sa.select(session_domain.c.domain).where(session_domain.c.session_id == session)
        with self._database.transaction(wait_s=self._timeout_s) as connection:
            rows = connection.execute(evidence.where(session_evidence.c.session_id == session)).all()
            names = connection.execute(domains).scalars().all()
        return SessionState({str(row[0]): str(row[1]) for row in rows}, tuple(sorted(names)))

    def _write(self, session: str, invocation_id: str, keys: Sequence[str], domains: Sequence[str], job: _Job) -> None:
        from rag_pipeline.invocations.tables import digest, insert_absent, now, session_domain, session_evidence

        common = {"session_id": session, "created_at": now()}
        given = [
            {**common, "evidence_digest": digest(key), "evidence_key": key, "invocation_id": invocation_id}
            for key in keys
        ]
        names = [{**common, "domain_digest": digest(domain), "domain": domain} for domain in domains]
        with self._database.transaction(writes=True, wait_s=self._timeout_s) as connection:
            insert_absent(connection, session_evidence, given)
            insert_absent(connection, session_domain, names)
            job.commit_or_stop()
