"""The agent's tool: ``lookup_knowledge(query)`` gives traceable evidence from the promoted version.

```python
from rag_pipeline.lookup_knowledge import lookup_knowledge

result = lookup_knowledge("Redis 连接数打满，怎么排查？", session_id="incident-4711")
result.found, result.evidence_blocks, result.context_pack.text
result.to_dict()  # the wire contract, camelCase
```

Importing this needs neither Dagster nor a model. The first lookup of a process loads the model; the functions here
share one `KnowledgeLookup` that reads the settings of the working directory and the environment. Whoever needs other
settings, or several, makes a `KnowledgeLookup` of their own.
"""

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any

from rag_pipeline.retrieval.pipeline import KnowledgeLookup, SearchResult
from rag_pipeline.retrieval.query_transform import build_knowledge_retrieval_query
from rag_pipeline.retrieval.results import ContextPack, EvidenceBlock, LookupResult

__all__ = [
    "ContextPack",
    "EvidenceBlock",
    "KnowledgeLookup",
    "LookupResult",
    "SearchResult",
    "alookup_knowledge",
    "build_knowledge_retrieval_query",
    "lookup_for_alert",
    "lookup_knowledge",
]

_lock = threading.Lock()
_shared: tuple[int, KnowledgeLookup] | None = None


def lookup_knowledge(query: str, *, session_id: str = "") -> LookupResult:
    """Look up evidence for a query in the operations knowledge base.

    Args:
        query: What to look for, in Chinese or English.
        session_id: Evidence that was given to this session before is not repeated; blank for no session.

    Returns:
        The evidence and how it was found. A store that is down gives ``evidence_status="retrieval_unavailable"``.

    Raises:
        ConfigurationError: The settings are wrong (at the first call).
        TypeError: The query or the session id is not text.
    """
    return _shared_lookup().lookup(query, session_id=session_id)


async def alookup_knowledge(query: str, *, session_id: str = "") -> LookupResult:
    """`lookup_knowledge` in a thread, so that an event loop goes on meanwhile."""
    return await asyncio.to_thread(lookup_knowledge, query, session_id=session_id)


def lookup_for_alert(payload: Mapping[str, Any], *, session_id: str = "") -> LookupResult:
    """Look up evidence for an alert.

    Args:
        payload: ``alertName, service, severity, description, summary, timeRange, userRequest``, as far as known.
        session_id: See `lookup_knowledge`.

    Raises:
        ConfigurationError: The payload has no field to make a query of, or the settings are wrong.
    """
    return _shared_lookup().lookup_for_alert(payload, session_id=session_id)


def _shared_lookup() -> KnowledgeLookup:
    global _shared  # noqa: PLW0603 (the one shared object)
    with _lock:
        # A forked child makes its own: neither threads nor connections survive a fork.
        if _shared is None or _shared[0] != os.getpid():
            _shared = (os.getpid(), KnowledgeLookup())
        return _shared[1]
