"""What a lookup returns: evidence blocks, the context pack, traces; typed here, camelCase on the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rag_pipeline.records import RelevanceLevel

EvidenceStatus = Literal["evidence", "already_provided", "no_evidence", "retrieval_unavailable"]
CompletenessHint = Literal["complete", "partial", "truncated", "none"]
RetrievalLayer = Literal["L0+L1", "L1", "L0", "none"]


@dataclass(frozen=True, slots=True)
class EvidenceBlock:
    """Text of one section of one document that answers the query, with where it stands and why it was found.

    Attributes:
        source: The document, a POSIX path below its knowledge folder.
        title: The document's title, blank when it has none.
        breadcrumb: The section's headings from outermost to innermost; empty before the first heading.
        category: The document's category, blank when it has none.
        section: Identity of the section in its version; with ``source`` the identity of the block.
        retrieval_layer: ``L1``, or ``L0+L1`` when an L0 hint is among the hit reasons.
        content: The chunks' text in document order, or ``(given before: …)`` for a repeat in a session.
        score: Squared L2 distance of the best chunk, 0 to 4, smaller is nearer.
        raw_score: What the path itself reports: the distance, or the cosine.
        score_label: How to read ``raw_score``: ``l2_distance`` or ``similarity``.
        similarity: Normalised similarity of the best chunk, 0 to 1.
        evidence_score: Calibrated relevance, 0 to 1, that ``relevance_level`` is cut from.
        relevance_level: ``highly_relevant`` or ``reference``.
        hit_reasons: Why it was found: the vector, then L0 hints and rules, strongest first.
        chunk_ids: The chunks in ``content``, in document order.
        expanded_ids: Those of them that only complete a list or a code block.
        line_start: 1-based first line in the file.
        line_end: 1-based last line (inclusive).
        complete: Whether ``content`` is the whole section.
        also_in: Other documents that say nearly the same and were dropped for it.
        given_before: Invocation that gave this block to the session, blank when it is new.
    """

    source: str
    title: str
    breadcrumb: tuple[str, ...]
    category: str
    section: str
    retrieval_layer: RetrievalLayer
    content: str
    score: float
    raw_score: float
    score_label: str
    similarity: float
    evidence_score: float
    relevance_level: RelevanceLevel
    hit_reasons: tuple[str, ...]
    chunk_ids: tuple[str, ...]
    expanded_ids: tuple[str, ...] = ()
    line_start: int = 0
    line_end: int = 0
    complete: bool = True
    also_in: tuple[str, ...] = ()
    given_before: str = ""

    @property
    def breadcrumb_text(self) -> str:
        """The breadcrumb as ``A > B > C``."""
        return " > ".join(self.breadcrumb)

    def summary(self) -> dict[str, Any]:
        """Everything but the content, for the trace."""
        found = _fields(self)
        del found["content"]
        found["content_chars"] = len(self.content)
        return found


@dataclass(frozen=True, slots=True)
class ContextPack:
    """The evidence as one text for a prompt.

    Attributes:
        text: Numbered, delimited blocks in the order of the evidence blocks; blank without any.
        budget: Most units of ``text``.
        unit: ``tokens`` or ``characters``.
        used: Units of ``text``.
        included: Number, source, breadcrumb and whether its content was cut, for each block in ``text``.
        omitted: Source and breadcrumb of blocks that did not fit.
    """

    text: str = ""
    budget: int = 0
    unit: str = "tokens"
    used: int = 0
    included: tuple[Mapping[str, Any], ...] = ()
    omitted: tuple[Mapping[str, Any], ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether content was cut or a block left out."""
        return bool(self.omitted) or any(block["truncated"] for block in self.included)

    def summary(self) -> dict[str, Any]:
        """Everything but the text, for the trace."""
        found = _fields(self)
        del found["text"]
        found["truncated"] = self.truncated
        return found


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The answer to one lookup.

    Attributes:
        found: Whether there is usable evidence (also when the session was given all of it before).
        message: One sentence for the agent.
        evidence_blocks: Best first.
        retrieval_trace: How retrieval went: invocation, version, hints, attempts with their candidates, timings.
        rerank_trace: The top candidates in final order, each with what every rule contributed.
        relevance_level: Of the best block; ``low`` when there were only unusable candidates, ``none`` without any.
        completeness_hint: ``truncated`` when the pack cut or left out something, ``partial`` when a block is not its
            whole section, ``none`` without evidence.
        dedup_reason: Why candidates were merged, dropped or not repeated, comma separated; blank if none was.
        retrieved_domains_this_session: Categories of all evidence of this session, this lookup included, sorted.
    """

    found: bool
    message: str
    evidence_status: EvidenceStatus
    evidence_blocks: tuple[EvidenceBlock, ...]
    context_pack: ContextPack
    retrieval_trace: Mapping[str, Any] = field(default_factory=dict)
    rerank_trace: Sequence[Mapping[str, Any]] = ()
    relevance_level: RelevanceLevel = "none"
    completeness_hint: CompletenessHint = "none"
    retrieval_layer: RetrievalLayer = "none"
    dedup_reason: str = ""
    retrieved_domains_this_session: tuple[str, ...] = ()

    @property
    def invocation_id(self) -> str:
        """Id of the record of this lookup in ``tool_invocation``."""
        return str(self.retrieval_trace.get("invocation_id", ""))

    @property
    def index_fingerprint(self) -> str:
        """Fingerprint of the version that was read, blank when none could be."""
        return str(self.retrieval_trace.get("index_fingerprint", ""))

    def to_dict(self) -> dict[str, Any]:
        """The wire contract: camelCase keys, JSON values only."""
        return {_camel(name): wire(value) for name, value in _fields(self).items()}


def wire(value: Any) -> Any:
    """A value as JSON takes it, with the keys of every mapping in camelCase."""
    if isinstance(value, Mapping):
        return {_camel(str(key)): wire(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [wire(item) for item in value]
    if isinstance(value, EvidenceBlock | ContextPack):
        return wire(_fields(value))
    return value


def plain(value: Any) -> Any:
    """A value as JSON takes it, keys as they are."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _fields(record: "EvidenceBlock | ContextPack | LookupResult") -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)
