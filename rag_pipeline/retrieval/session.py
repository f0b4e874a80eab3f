"""What a session was given before: such blocks come back without their content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rag_pipeline.index.manifest import digest_of
from rag_pipeline.retrieval.results import ContextPack, EvidenceBlock

if TYPE_CHECKING:
    from rag_pipeline.invocations.session_memory import SessionMemory


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session had been given when a lookup began.

    Attributes:
        given: Evidence key (`evidence_key`) to the invocation that gave it.
        domains: Categories of its evidence so far.
        failure: Why this could not be read; blank otherwise.
    """

    given: Mapping[str, str]
    domains: tuple[str, ...] = ()
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For the record, so that a replay starts from the same state."""
        return {"given": dict(self.given), "domains": list(self.domains)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SessionState":
        """What `to_dict` gave."""
        return cls(dict(values.get("given", {})), tuple(values.get("domains", ())))


NEW_SESSION = SessionState({})


class Sessions:
    """Session memory as a lookup uses it: it helps when it answers in time and is done without otherwise.

    Args:
        memory: ``None``: no session is remembered.
    """

    def __init__(self, memory: "SessionMemory | None") -> None:
        self._memory = memory
        self._prepared = False

    def prepare(self, session_id: str) -> None:
        """Connect in the background before the first session's memory is asked for, which has little time then."""
        if session_id and self._memory is not None and not self._prepared:
            self._prepared = True
            self._memory.prepare()

    def recall(self, session_id: str) -> SessionState:
        """What the session was given; an empty state for a blank id."""
        if not session_id or self._memory is None:
            return NEW_SESSION
        recalled = self._memory.recall(session_id)
        if recalled.state is None:
            return SessionState({}, failure=f"session memory could not be read: {recalled.failure}")
        return SessionState(recalled.state.given, recalled.state.domains)

    def remember(
        self,
        session_id: str,
        invocation_id: str,
        *,
        blocks: Sequence[EvidenceBlock],
        pack: ContextPack,
        domains: Sequence[str],
    ) -> str:
        """Note what the session is given; returns why that failed, blank otherwise.

        What the pack cut or left out was not given in full, so the session gets it again.
        """
        if not session_id or self._memory is None or not blocks:
            return ""
        whole = {item["number"] for item in pack.included if not item["truncated"]}
        keys = [evidence_key(block) for n, block in enumerate(blocks, 1) if n in whole and not block.given_before]
        remembered = self._memory.remember(session_id, invocation_id, keys, domains)
        return "" if remembered.written else f"session memory could not be written: {remembered.failure}"


def without_repeats(blocks: Sequence[EvidenceBlock], state: SessionState) -> tuple[EvidenceBlock, ...]:
    """Blocks in their order; those that the session was given before point to that invocation."""
    return tuple(
        given_before(block, state.given[key]) if (key := evidence_key(block)) in state.given else block
        for block in blocks
    )


def evidence_key(block: EvidenceBlock) -> str:
    """Identity of what a session is given: source, section and content, 64 hex digits."""
    return digest_of(block.source, block.section, block.content)


def given_before(block: EvidenceBlock, invocation_id: str) -> EvidenceBlock:
    """A block without its content, for a session that has it."""
    return replace(block, content=f"(given before: invocation {invocation_id})", given_before=invocation_id)
