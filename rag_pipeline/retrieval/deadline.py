"""One time limit for a whole lookup, and a way to stop waiting for a call that does not keep to its own."""

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rag_pipeline.errors import StoreUnavailableError

T = TypeVar("T")


class Deadline:
    """A point in time that all calls of one lookup share.

    Args:
        limit_s: Seconds from now.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at = time.monotonic() + limit_s

    @property
    def limit_s(self) -> float:
        """The whole limit."""
        return self._limit_s

    def left(self) -> float:
        """Seconds left, at least a millisecond: a call with no time left fails at once by its own limit."""
        return max(self._ends_at - time.monotonic(), 0.001)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._ends_at

    def extend(self, seconds: float) -> None:
        """Leave ``seconds`` out of the count (a model was loaded)."""
        self._ends_at += seconds


class Running(Generic[T]):
    """A call in a daemon thread of its own. One that is given up goes on; what it returns is dropped.

    Args:
        what: Names the call in the message.
        function: Called in the context of the caller.
    """

    def __init__(self, what: str, function: Callable[[], T]) -> None:
        self._what = what
        self._value: T | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()

        def run() -> None:
            try:
                self._value = context.run(function)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=f"lookup: {what}", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> bool:
        """Wait for at most ``limit_s`` seconds; whether the call has ended."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def result(self, limit_s: float) -> T:
        """What the call returned.

        Args:
            limit_s: How long it was waited for, for the message.

        Raises:
            StoreUnavailableError: It has not returned yet.
            BaseException: Whatever the function raised.
        """
        if self._thread.is_alive():
            raise StoreUnavailableError(
                f"{self._what} has not answered within {limit_s:.1f} s. `rag-pipeline doctor` looks into the store; "
                "retrieval.timeout_s is the limit of a whole lookup."
            )
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def call_within(limit_s: float, what: str, function: Callable[[], T]) -> T:
    """Call ``function`` in a thread of its own and wait for it for at most ``limit_s`` seconds.

    Raises:
        StoreUnavailableError: It has not returned in time.
        BaseException: Whatever the function raises.
    """
    running = Running(what, function)
    running.wait(limit_s)
    return running.result(limit_s)
