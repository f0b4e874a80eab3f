"""Run a recorded lookup again: the recorded version, settings and session state, nothing recorded."""

from dataclasses import dataclass
from typing import Any

from rag_pipeline.errors import ConfigurationError, StoreUnavailableError
from rag_pipeline.invocations.records import Invocation
from rag_pipeline.invocations.secret_patterns import REDACTED
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.query_transform import AlertPayload
from rag_pipeline.retrieval.recording import result_digest
from rag_pipeline.retrieval.results import LookupResult
from rag_pipeline.retrieval.session import SessionState
from rag_pipeline.setting_groups import RetrievalSettings
from rag_pipeline.settings import Settings


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded lookup and what it gives now.

    Attributes:
        recorded: The record.
        result: The answer now.
        same: Whether everything but times and ids is equal to what was answered then.
        differences: What differs, by the record's summary; empty when ``same``, or when only texts differ.
    """

    recorded: Invocation
    result: LookupResult
    same: bool
    differences: tuple[str, ...]


def replay(settings: Settings, recorded: Invocation) -> Replay:
    """Run a recorded lookup again.

    Args:
        settings: Say where the stores are; what retrieval does comes from the record.

    Raises:
        ConfigurationError: The record lacks what a replay needs, or its query was redacted.
        StoreUnavailableError: The recorded version is gone, or the store does not answer.
    """
    details, params = recorded.retrieval_details, recorded.input_params
    if unreadable := {"input_params", "retrieval_details"} & set(recorded.unreadable):
        raise ConfigurationError(
            f"What the database holds as {' and '.join(sorted(unreadable))} of invocation {recorded.id} cannot be "
            "read; it cannot be run again."
        )
    trace = details.get("retrieval_trace")
    query, collection = (
        str(params.get("query", "")),
        str((trace if isinstance(trace, dict) else {}).get("collection", "")),
    )
    if REDACTED in query:
        raise ConfigurationError(f"The query of invocation {recorded.id} was redacted; it cannot be run again.")
    if params.get("query_chars"):
        raise ConfigurationError(
            f"Only the first {len(query)} of {params['query_chars']} characters of the query of invocation "
            f"{recorded.id} were recorded; it cannot be run again as it was."
        )
    if not collection and query.strip():
        raise StoreUnavailableError(f"Invocation {recorded.id} was answered by no version; there is nothing to repeat.")
    try:
        values = {**details["settings"], "milvus": settings.retrieval.milvus}
        as_recorded = settings.model_copy(update={"retrieval": RetrievalSettings(**values)})
        payload = AlertPayload.parse(params["payload"]) if "payload" in params else None
        state = SessionState.from_dict(details["session_state"])
        _blocks(details)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"Invocation {recorded.id} was recorded by another version of this program ({type(error).__name__}: "
            f"{error}); it cannot be run again."
        ) from None
    with KnowledgeLookup(as_recorded, version=collection, record=False) as lookup:
        result = lookup.lookup(query, payload=payload, session_state=state)
    if result.evidence_status == "retrieval_unavailable" and recorded.success:
        raise StoreUnavailableError(result.message)
    same = result_digest(result) == details.get("result_digest")
    return Replay(recorded, result, same, () if same else tuple(_differences(details, recorded, result)))


def _blocks(details: dict[str, Any]) -> list[tuple[str, str]]:
    return [(block["source"], " > ".join(block["breadcrumb"])) for block in details.get("evidence_blocks", [])]


def _differences(details: dict[str, Any], recorded: Invocation, result: LookupResult) -> list[str]:
    then = _blocks(details)
    now = [(block.source, block.breadcrumb_text) for block in result.evidence_blocks]
    pairs = (
        ("evidence status", recorded.evidence_status, result.evidence_status),
        ("relevance level", recorded.relevance_level, result.relevance_level),
        ("retrieval layer", recorded.retrieval_layer, result.retrieval_layer),
        ("evidence blocks", then, now),
    )
    return [f"{name}: {before} then, {after} now" for name, before, after in pairs if before != after]
