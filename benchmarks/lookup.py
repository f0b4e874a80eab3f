"""Times a lookup: cold import, cold first lookup, and warm lookups stage by stage, on both retrieval paths.

    python -m benchmarks.lookup [--state .rag] [--rounds 5] [--warm 200]

It needs a promoted version in the state folder (``make demo`` or ``rag-pipeline reindex``). Cold figures are medians of
fresh processes that take turns with their reference, warm ones are p50 and p95 over lookups of the knowledge base's own
headings, alternately on each path. Each line gives milliseconds and the quotient to the reference named in it, measured
in the same run: on a shared machine only the quotients tell something.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.settings import load_settings
from rag_pipeline.workspace import Workspace

IMPORT = "import rag_pipeline.lookup_knowledge"
FIRST = """
from pathlib import Path
from rag_pipeline.retrieval.pipeline import KnowledgeLookup
from rag_pipeline.settings import load_settings
settings = load_settings(flags={{"state_dir": Path({state!r}), "retrieval.vector_store.mode": {mode!r}}})
with KnowledgeLookup(settings, record=False) as lookup:
    assert lookup.lookup("pod keeps restarting with exit code 137").retrieval_trace["attempts"]
"""
EMBED = """
from pathlib import Path
from rag_pipeline.index.embedding import Embedder
from rag_pipeline.settings import load_settings
from rag_pipeline.workspace import Workspace
Embedder(Workspace(load_settings(flags={{"state_dir": Path({state!r})}})).model, threads=1).embed_query("warm")
"""


def seconds_of(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - started


def cold(rounds: int, state: str) -> None:
    measured = {
        "python starts (reference)": "pass",
        "import pymilvus": "import pymilvus",
        "import rag_pipeline.lookup_knowledge": IMPORT,
        "load the model and embed one query": EMBED.format(state=state),
        "first lookup, sdk": FIRST.format(state=state, mode="sdk"),
        "first lookup, auto": FIRST.format(state=state, mode="auto"),
    }
    times: dict[str, list[float]] = {name: [] for name in measured}
    for code in measured.values():
        seconds_of(code)  # byte code and file cache
    for _ in range(rounds):
        for name, code in measured.items():
            times[name].append(seconds_of(code))
    start = statistics.median(times["python starts (reference)"])
    model = statistics.median(times["load the model and embed one query"])
    print("Cold, fresh processes")
    for name, found in times.items():
        median = statistics.median(found)
        print(
            f"  {name:<38} {median * 1000:8.0f} ms   {median / start:6.1f} x python starts   "
            f"{median / model:5.2f} x loading the model"
        )


def queries_of(ws: Workspace, most: int) -> list[str]:
    from rag_pipeline.index.artifacts import CHUNKS
    from rag_pipeline.tables import from_parquet

    manifest = ws.versions.promoted()
    assert manifest is not None
    chunks = from_parquet(ws.artifacts.read(manifest, CHUNKS))
    headings = [" ".join(breadcrumb[-2:]) for breadcrumb in chunks["breadcrumb"] if len(breadcrumb)]
    return list(itertools.islice(dict.fromkeys(headings), most))


def warm(state: Path, most: int) -> None:
    modes = ("sdk", "langchain")
    lookups = {
        mode: KnowledgeLookup(load_settings(flags={"state_dir": state, "retrieval.vector_store.mode": mode}))
        for mode in modes
    }
    queries = queries_of(Workspace(load_settings(flags={"state_dir": state})), most)
    stages: dict[str, dict[str, list[float]]] = {mode: {} for mode in modes}
    for query in queries[:5]:
        for lookup in lookups.values():
            lookup.lookup(query)
    for number, query in enumerate(queries):
        for mode in modes if number % 2 else modes[::-1]:
            # The other path has embedded this query with a model of its own, so each one embeds it once.
            started = time.perf_counter()
            result = lookups[mode].lookup(query)
            called = (time.perf_counter() - started) * 1000.0
            assert result.evidence_status != "retrieval_unavailable", result.message
            for name, ms in {**result.retrieval_trace["duration_ms"], "call, recording included": called}.items():
                stages[mode].setdefault(name, []).append(ms)
    print(f"\nWarm, {len(queries)} lookups on each path, milliseconds (p50 / p95)")
    for name in stages["sdk"]:
        cells = []
        for mode in modes:
            found = sorted(stages[mode].get(name, [0.0]))
            cells.append(f"{statistics.median(found):8.2f} /{found[int(len(found) * 0.95) - 1]:8.2f}")
        print(f"  {name:<26} sdk {cells[0]}   langchain {cells[1]}")
    whole = {mode: statistics.median(stages[mode]["whole"]) for mode in modes}
    own = {
        mode: statistics.median(
            whole - embed - search
            for whole, embed, search in zip(
                stages[mode]["whole"], stages[mode]["embed"], stages[mode]["vector_search"], strict=True
            )
        )
        for mode in modes
    }
    search = {mode: statistics.median(stages[mode]["vector_search"]) for mode in modes}
    print(f"  langchain / sdk, vector search: {search['langchain'] / search['sdk']:.2f}")
    print(f"  langchain - sdk, vector search: {search['langchain'] - search['sdk']:.2f} ms")
    print(
        f"  all but embedding and vector search / the whole lookup: {own['sdk'] / whole['sdk']:.2f} "
        f"({own['sdk']:.2f} ms p50, sdk)"
    )
    for lookup in lookups.values():
        lookup.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path(".rag"))
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes a figure")
    parser.add_argument("--warm", type=int, default=200, help="warm lookups a path")
    parser.add_argument("--skip-cold", action="store_true")
    chosen = parser.parse_args(arguments)
    state = chosen.state.absolute()
    if not chosen.skip_cold:
        cold(chosen.rounds, json.loads(json.dumps(str(state))))
    warm(state, chosen.warm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
