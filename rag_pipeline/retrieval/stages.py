"""Time of each stage of a lookup."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Milliseconds by stage; a stage that runs twice adds up."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._ms: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of the block for ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._ms[name] = self._ms.get(name, 0.0) + (time.perf_counter() - started) * 1000.0

    def so_far(self) -> dict[str, float]:
        """Milliseconds by stage in order of their first run, and ``whole`` since this object was made."""
        whole = (time.perf_counter() - self._started) * 1000.0
        return {name: round(ms, 3) for name, ms in {**self._ms, "whole": whole}.items()}
