"""A small knowledge base whose ranking can be foreseen: texts are near each other by the words they share.

The house is the fictitious Nordwind Retail. Each document has its part in some scenario, see `DOCUMENTS`.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rag_pipeline.index.models import ResolvedModel
from rag_pipeline.invocations.database import Database
from rag_pipeline.invocations.records import Invocation
from rag_pipeline.invocations.store import InvocationStore
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.retrieval.results import LookupResult
from rag_pipeline.settings import Settings, load_settings
from rag_pipeline_tests.conftest import write
from rag_pipeline_tests.fakes import HashingEmbedder

SettingsOf = Callable[..., Settings]

# Where a reader and where a writer takes its model from.
EMBEDDERS = ("rag_pipeline.retrieval.snapshot.Embedder", "rag_pipeline.index.embedding.Embedder")

DOCUMENTS: Mapping[str, str] = {
    # Named by a title, a keyword, an alert and a service; several sections.
    "cache/redis-clients.md": """---
title: Redis clients
keywords: [maxclients]
alerts: [RedisConnectionsHigh]
service: cart-cache
---
# Redis clients

## Mitigation

When maxclients is reached, close idle sockets of the checkout pool, then raise the ceiling by CONFIG SET.

## Leaking pools

A deploy that forgets to close its pool leaves idle sockets behind, and redis_connected_clients climbs every hour.
""",
    # As near to queries about idle sockets as the one above, in another category and without a term of its own.
    "host/sockets.md": """# Open files

When maxclients is reached, close idle sockets of the checkout pool, then count descriptors by lsof.
""",
    # An exact title match is tempting; but its only text says much else.
    "edge/zephyr.md": """---
title: Zephyr gateway
alerts: [ZephyrHandshakeFailures]
---
Inventory owners: Aaltje, Bjarne, Chiara, Dagny, Eamon, Fiadh, Gudrun, Hamza, Ilkka, Joost, Kirsten, Leif, Maarten,
Noor, Oisin, Petra, Quirin, Runa, Sigrid, Tove, Ulrik, Vasil, Wanda, Xaver, Ylva, Zoltan, Anouk, Brecht, Corentin.
""",
    # Only hints: it has no text, so that its category has no chunk at all.
    "vault/seal.md": "---\ntitle: Sealkeeper quorum\nkeywords: [sealkeeper]\n---\n",
    "database/failover.md": """---
title: Standby promotion
---
# Standby promotion

## Steps

Promotion stalls while the standby waits for quorum: fence the old primary, replay remaining journal segments, then
promote.
""",
    # One section of several chunks, with an identifier in each of two.
    "messaging/broker.md": """---
title: Broker backlog
keywords: [backlog]
---
# Broker backlog

## Drain

Partitions drain slowly when consumer_group_alpha rebalances too frequently: pin static membership, widen the session
window, stop the flapping deployment, wait until rebalancing settles, then compare committed offsets against the log
end offset of every partition before closing the incident.

Partitions drain slowly when consumer_group_omega decodes oversized payloads: lower the fetch ceiling, add two more
instances, move poison records aside into the quarantine topic, wait until throughput recovers, then replay what was
moved aside, oldest record first, and watch the decoder for errors.
""",
    "messaging/retention.md": """# Segment retention

Segments outlive their retention when the cleaner thread died; restart the broker process and watch segments vanish.
""",
    "storage/quotes.md": """---
title: Quoted volumes
category: 'odd "name" with \\back\\slash'
keywords: [quotedvolume]
---
A quotedvolume detaches when its label holds a quotation mark; relabel it and attach it again.
""",
}


class WordEmbedder(HashingEmbedder):
    """The deterministic ranking in the place of the model of a real folder, whose tokenizer still counts."""

    def __init__(self, model: ResolvedModel, **_: object) -> None:
        super().__init__(dimension=model.profile.dimension)
        self._model = model


def settings_of(state: Path, knowledge: Path, model: Path, **flags: object) -> Settings:
    """Settings over a state folder; ``retrieval__top_k=3`` sets ``retrieval.top_k``."""
    values: dict[str, object] = {
        "state_dir": state,
        "knowledge.roots": [str(knowledge)],
        "embedding.model": str(model),
        "chunking.soft_tokens": 240,
        "chunking.hard_tokens": 400,
        "retrieval.milvus.lite_idle_s": 60.0,
        "retrieval.vector_store.mode": "sdk",
        "retrieval.session.timeout_ms": 5000,
        "retrieval.timeout_s": 20.0,
        "retrieval.milvus.timeout_s": 20.0,
        "index.grace_s": 0.0,
        **{name.replace("__", "."): value for name, value in flags.items()},
    }
    return load_settings(flags=values, project_root=state.parent)


@contextmanager
def indexed(documents: Mapping[str, str] | Path, *, model: Path, **built_with: object) -> Iterator[SettingsOf]:
    """Index documents, or a folder of them, ranked by words; gives their settings, and removes all of it at the end."""
    from rag_pipeline import reindex
    from rag_pipeline.index import lite_server
    from rag_pipeline.workspace import Workspace

    folder = Path(tempfile.mkdtemp(prefix="small-base-"))
    knowledge = documents if isinstance(documents, Path) else folder / "docs"
    for source, text in documents.items() if isinstance(documents, Mapping) else ():
        write(knowledge / source, text)

    def settings(**flags: object) -> Settings:
        return settings_of(folder / "state", knowledge, model, **{**built_with, **flags})

    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in EMBEDDERS:
                patch.setattr(name, WordEmbedder)
            assert reindex.reindex(Workspace(settings())).result == "promoted"
        yield settings
    finally:
        lite_server.stop(folder / "state" / "milvus")
        shutil.rmtree(folder, ignore_errors=True)


def recorded(lookup: KnowledgeLookup, invocation_id: str) -> Invocation:
    """The row of a lookup, read back from the database."""
    assert lookup.flush(60.0), "the record is still in the spool"
    database = Database(lookup.settings.database, state=lookup.settings.state)
    try:
        found = InvocationStore(database).get(invocation_id)
    finally:
        database.close()
    assert found is not None, f"{invocation_id} is not in tool_invocation"
    return found


def comparable(result: LookupResult) -> dict[str, Any]:
    """A result's wire form without what differs from call to call: the invocation and the times."""
    values: dict[str, Any] = result.to_dict()
    trace = dict(values["retrievalTrace"])
    del trace["invocationId"], trace["durationMs"]
    trace["attempts"] = [
        {**attempt, "paths": [{**path, "ms": 0} for path in attempt["paths"]]} for attempt in trace["attempts"]
    ]
    return {**values, "retrievalTrace": trace}
