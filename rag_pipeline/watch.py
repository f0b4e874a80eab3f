"""Tells people about the steps of a run, and times them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Progress = Callable[[str, int, int], None]
"""Called with the step's name, what is done and what there is to do."""


@dataclass(slots=True)
class Watch:
    """Is told what a run does.

    Attributes:
        say: Takes one line for people.
        progress: See `Progress`.
        at_step: Called with a step's name when it begins; the fault tests kill the process here.
        seconds: Wall seconds by step.
        documents: Wall seconds by step and document, where a step goes document by document.
    """

    say: Callable[[str], None] = lambda _line: None
    progress: Progress = lambda _step, _done, _total: None
    at_step: Callable[[str], None] = lambda _step: None
    seconds: dict[str, float] = field(default_factory=dict)
    documents: dict[str, dict[str, float]] = field(default_factory=dict)

    def document(self, step: str, source: str, seconds: float) -> None:
        """Note how long a step took for one document."""
        self.documents.setdefault(step, {})[source] = seconds

    def slowest(self, step: str, number: int) -> list[tuple[str, float]]:
        """The documents that a step took longest for, slowest first."""
        return sorted(self.documents.get(step, {}).items(), key=lambda item: (-item[1], item[0]))[:number]

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Time a step; gives the callback for its progress."""
        self.at_step(name)
        start = time.monotonic()
        try:
            yield lambda done, total: self.progress(name, done, total)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
