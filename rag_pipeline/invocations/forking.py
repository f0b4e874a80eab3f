"""Tell objects that their process is a fork: what they hold of threads, locks and connections is the parent's."""

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that must begin anew in a forked child."""

    def after_fork(self) -> None:
        """Forget what belongs to the parent; called in the child, before any other code of it."""


class _Registry:
    def __init__(self) -> None:
        self._members: weakref.WeakSet[Forked] | None = None

    def add(self, member: Forked) -> None:
        if self._members is None:
            self._members = weakref.WeakSet()
            os.register_at_fork(after_in_child=self._tell)
        self._members.add(member)

    def _tell(self) -> None:
        for member in list(self._members or ()):
            member.after_fork()


_registry = _Registry()


def reset_in_forks(member: Forked) -> None:
    """Call ``member.after_fork()`` in every child that this process forks while ``member`` lives."""
    _registry.add(member)
