"""Chunks whole folders with the default tokenizer and compares the time with markdown-it-py and one tokenization.

    python -m benchmarks.chunking ../shared/data/k8s_docs_zh/docs [--soft 300] [--hard 480] [--model-cache FOLDER]

Prints for each folder: files, chunks, lost characters, characters in no span, chunks over the limit, CPU seconds of
reading, chunking, markdown-it-py alone and one tokenization, and chunking over the sum of the last two.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from rag_pipeline.index.models import load_token_counter, resolve_model
from rag_pipeline.ingest.chunking import chunk_document
from rag_pipeline.ingest.documents import Root, discover, read_document
from rag_pipeline.records import Chunk, ChunkBudget, Document, TokenCounter
from rag_pipeline_tests.ingest.visible import lost_words, uncovered


def timed(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(folder: Path, *, counter: TokenCounter, budget: ChunkBudget) -> dict[str, float]:
    files, _ = discover([Root(folder.name, folder)])
    documents: list[Document] = []
    reading = timed(lambda: documents.extend(d for d, _ in map(read_document, files) if d))
    bodies = [document.text[document.body_start :] for document in documents]
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    parsing = timed(lambda: [parser.parse(body) for body in bodies])
    tokenizing = timed(lambda: counter.count(bodies))
    chunked: list[list[Chunk]] = []
    chunking = timed(lambda: chunked.extend(chunk_document(d, tokens=counter, budget=budget) for d in documents))
    pairs = list(zip(documents, chunked, strict=True))
    return {
        "files": len(documents),
        "chunks": sum(map(len, chunked)),
        "lost": sum(len(word) for document, chunks in pairs for word in lost_words(document, chunks)),
        "uncovered": sum(len(uncovered(document, chunks)) for document, chunks in pairs if chunks),
        "over": sum(chunk.token_count > budget.hard_tokens for chunks in chunked for chunk in chunks),
        "read_s": reading,
        "chunk_s": chunking,
        "markdown_it_s": parsing,
        "tokenize_s": tokenizing,
        "ratio": chunking / (parsing + tokenizing),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--soft", type=int, default=ChunkBudget().soft_tokens)
    parser.add_argument("--hard", type=int, default=ChunkBudget().hard_tokens)
    parser.add_argument("--model-cache", type=Path, default=Path(".rag/cache/models"))
    options = parser.parse_args(arguments)
    counter = load_token_counter(resolve_model("bundled:multilingual-e5-small", cache_dir=options.model_cache))
    budget = ChunkBudget(soft_tokens=options.soft, hard_tokens=options.hard)
    for folder in options.folders:
        row = measure(folder, counter=counter, budget=budget)
        figures = "  ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print(f"{folder}: {figures}")


if __name__ == "__main__":
    main()
