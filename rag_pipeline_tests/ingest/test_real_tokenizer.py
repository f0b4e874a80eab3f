"""The limits hold for the default model's own tokenizer, and the counts it is given are the exact ones."""

from pathlib import Path

import pytest

from rag_pipeline.ingest.chunking import chunk_document
from rag_pipeline.ingest.documents import parse_document
from rag_pipeline.records import ChunkBudget, TokenCounter
from rag_pipeline_tests.ingest.counting import check_invariants, document

pytestmark = pytest.mark.model

BUDGETS = [ChunkBudget(), ChunkBudget(soft_tokens=60, hard_tokens=90), ChunkBudget(soft_tokens=500, hard_tokens=512)]


@pytest.fixture(scope="module")
def counter(model_cache_dir: Path) -> TokenCounter:
    from rag_pipeline.index.models import load_token_counter, resolve_model

    return load_token_counter(resolve_model("bundled:multilingual-e5-small", cache_dir=model_cache_dir))


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: str(budget.hard_tokens))
@pytest.mark.parametrize(
    "text",
    [
        "# 磁盘\n\n" + "磁盘空间不足时请清理日志。" * 200,
        "# T\n\n" + "\U0001d4d0" * 20_000,
        "# T\n\n" + "a" + " " * 50_000 + "b",
        "# T\n\n" + "supercalifragilistic" * 500,
        "# T\n\n```yaml\n" + "key: [value, 值]\n" * 400 + "```\n",
        "# T\n\n| a | b |\n|---|---|\n" + "| 行 | cell text |\n" * 300,
        "# T\n\n" + "🔥👩‍🚒ด้ว\u0301" * 500,
    ],
    ids=["zh", "unknown", "spaces", "word", "fence", "table", "joined"],
)
def test_limits_hold(text: str, budget: ChunkBudget, counter: TokenCounter) -> None:
    parsed = document(text)
    chunks = chunk_document(parsed, tokens=counter, budget=budget)
    check_invariants(parsed, chunks, tokens=counter, hard=budget.hard_tokens)
    assert len(chunks) > 1


@pytest.mark.data
@pytest.mark.parametrize("corpus", ["k8s_runbooks_zh", "thanos_tables_en"])
def test_real_documents_lose_nothing(corpus: str, data_dir: Path, counter: TokenCounter) -> None:
    paths = sorted((data_dir / corpus / "docs").rglob("*.md"))
    assert paths
    for path in paths:
        parsed, _ = parse_document(path.name, path.read_bytes())
        assert parsed is not None
        chunks = chunk_document(parsed, tokens=counter, budget=ChunkBudget())
        check_invariants(parsed, chunks, tokens=counter, hard=480)
