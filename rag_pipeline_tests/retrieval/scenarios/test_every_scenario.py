"""Each scenario of the retrieval specification has exactly one test in this package, named after it."""

import importlib
import pkgutil
import re
from collections.abc import Callable

from rag_pipeline_tests.retrieval import scenarios

SCENARIOS = (
    # Knowledge retrieval SHALL keep L0 as a hint provider
    "L0 produces traceable hint data",
    "L0 does not bypass semantic retrieval",
    "L0 hints do not become normal evidence",
    # … SHALL use L0 domain as optional L1 filter
    "Single domain filter",
    "Ambiguous domain fallback",
    # … SHALL persist L0 hints
    "Retrieval details include L0 hints",
    "Retrieval layer reflects cooperating retrieval",
    # … SHALL return structured evidence blocks
    "Evidence block contains source metadata",
    "Evidence blocks are the primary evidence contract",
    # … SHALL deduplicate evidence blocks
    "Duplicate source deduplication",
    "Postprocess count tracking",
    # … SHALL persist evidence block summaries
    "Evidence summaries are persisted",
    "Full content is not duplicated into retrieval details",
    # … SHALL support a disabled-by-default sidecar
    "Sidecar disabled by default",
    "Sidecar failure does not break main retrieval",
    # … SHALL normalize sidecar results for comparison
    "Comparable result metadata",
    "Score semantics are explicit",
    # … SHALL prefer the framework's VectorStore when configured
    "VectorStore mode uses Spring AI",
    "Auto mode prefers VectorStore",
    # … SHALL preserve SDK fallback
    "SDK mode bypasses VectorStore",
    "Auto fallback uses SDK",
    # … SHALL keep score semantics explicit
    "SDK score remains L2 distance",
    "VectorStore score is mapped without changing tool contract",
    # … SHALL reuse the existing Milvus collection
    "Existing field mapping",
    # … SHALL use a modular RAG pipeline
    "Pipeline components execute in order",
    "Tool boundary remains explicit",
    # … SHALL retry without L0 filter when filtered L1 is low quality
    "Filtered retrieval succeeds",
    "Filtered retrieval returns no evidence",
    "Filtered retrieval is below reference quality",
    "Both retrieval attempts fail",
    # … SHALL return an evidence-first result contract
    "Evidence result contains context and traces",
    "No-evidence result keeps traceability",
    # … SHALL pack evidence context for Agent consumption
    "Context pack preserves source metadata",
    "Context pack respects budget",
    # … SHALL rerank evidence with traceable rule signals
    "Rerank trace records score contributions",
    "Query hints influence rerank without becoming evidence",
    # Lookup knowledge SHALL persist modular RAG trace details
    "Evidence lookup persists modular detail keys",
    "Fallback lookup persists fallback reason",
    "No-evidence lookup still preserves trace",
)

_PREFIX = "Scenario: "


def _tests() -> list[tuple[str, Callable[..., object]]]:
    found = []
    for module in pkgutil.iter_modules(scenarios.__path__):
        if module.name.startswith("test_") and module.name != "test_every_scenario":
            loaded = importlib.import_module(f"{scenarios.__name__}.{module.name}")
            found += [(name, test) for name, test in vars(loaded).items() if name.startswith("test_")]
    return found


def test_every_scenario_has_one_test() -> None:
    assert len(SCENARIOS) == len(set(SCENARIOS)) == 39
    named = {}
    for name, test in _tests():
        first = (test.__doc__ or "").partition("\n")[0]
        assert first.startswith(_PREFIX), f"{name} names no scenario"
        scenario = first.removeprefix(_PREFIX).partition(".")[0]
        assert scenario not in named, f"{scenario!r} has two tests: {named[scenario]} and {name}"
        named[scenario] = name
    assert sorted(named) == sorted(SCENARIOS)
    for scenario, name in named.items():
        assert name == "test_" + re.sub(r"[^a-z0-9]+", "_", scenario.lower())
