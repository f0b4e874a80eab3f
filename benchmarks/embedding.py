"""Compares our `Embedder.embed_documents` with bare `SentenceTransformer.encode` on the same texts.

    python benchmarks/embedding.py docs/zh docs/en [--texts 400] [--rounds 3]

The texts are chunks of the folders' Markdown files. Both sides use the same weights, all cores and the document prompt.
Rounds alternate which side goes first, so that a busy machine slows both; the quotient of each round's times is
printed, and the median. Where other programs take turns with it, ``--threads 1`` and the quotient of CPU seconds are
the ones to trust: threads that wait for each other spin.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rag_pipeline.index.embedding import Embedder, plan_batches
from rag_pipeline.index.models import DEFAULT_MODEL, load_token_counter, resolve_model
from rag_pipeline.ingest.chunking import chunk_document
from rag_pipeline.ingest.documents import parse_document
from rag_pipeline.records import ChunkBudget, TokenCounter


def texts_of(folders: Sequence[Path], *, counter: TokenCounter, most: int, seed: int) -> list[str]:
    """Embedding texts of the chunks that the project itself makes of the Markdown files.

    Drawn with a fixed seed and the same number from each folder, so that a mixed set stays mixed.
    """
    draw = random.Random(seed)
    texts: list[str] = []
    for folder in folders:
        paths = sorted(folder.rglob("*.md"))
        draw.shuffle(paths)
        found: dict[str, None] = {}
        for path in paths:
            document, _ = parse_document(path.relative_to(folder).as_posix(), path.read_bytes())
            if document is not None:
                chunks = chunk_document(document, tokens=counter, budget=ChunkBudget())
                found |= dict.fromkeys(chunk.embedding_text for chunk in chunks)
            # Chunking a whole large folder is not what is measured here.
            if len(found) > 5 * most:
                break
        texts.extend(draw.sample(list(found), min(len(found), most // len(folders))))
    draw.shuffle(texts)
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of Markdown files, best one a language")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--cache", type=Path, default=Path(".rag/cache/models"), help="where the model is unpacked")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=None, help="of both sides; all cores when left out")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(arguments)

    model = resolve_model(options.model, cache_dir=options.cache)
    counter = load_token_counter(model)
    texts = texts_of(options.folders, counter=counter, most=options.texts, seed=options.seed)
    if not texts:
        print(f"No Markdown text in {', '.join(map(str, options.folders))}.", file=sys.stderr)
        return 2

    import torch
    from sentence_transformers import SentenceTransformer

    if options.threads:
        torch.set_num_threads(options.threads)
    bare = SentenceTransformer(str(model.path), local_files_only=True, model_kwargs={"dtype": "float32"})
    prompt = model.profile.document_prompt
    ours = Embedder(model, threads=options.threads, batch_tokens=options.batch_tokens)
    counts = counter.count_inputs(texts)
    chinese = sum(any("\u4e00" <= c <= "\u9fff" for c in text) for text in texts)
    print(
        f"{len(texts)} texts ({chinese} with Chinese), {sum(counts)} tokens, longest {max(counts)}; "
        f"padded to {_padded_by_characters(texts, counts, model.profile.max_tokens)} by characters in batches of 32, "
        f"to {_padded_by_tokens(counts, options.batch_tokens, model.profile.max_tokens)} by tokens"
    )

    def run_bare() -> np.ndarray:
        return bare.encode(texts, prompt=prompt, show_progress_bar=False)

    def run_ours() -> np.ndarray:
        return ours.embed_documents(texts)

    ours.embed_documents(texts[:2])
    bare.encode(texts[:2])
    quotients, cpu_quotients = [], []
    for round_number in range(options.rounds):
        sides = [("bare", run_bare), ("ours", run_ours)]
        seconds, cpu, vectors = {}, {}, {}
        for name, run in sides if round_number % 2 == 0 else reversed(sides):
            started, cpu_started = time.perf_counter(), time.process_time()
            vectors[name] = run()
            seconds[name], cpu[name] = time.perf_counter() - started, time.process_time() - cpu_started
        quotients.append(seconds["bare"] / seconds["ours"])
        cpu_quotients.append(cpu["bare"] / cpu["ours"])
        difference = float(np.abs(vectors["bare"] - vectors["ours"]).max())
        print(
            f"round {round_number + 1}: bare {len(texts) / seconds['bare']:.1f} texts/s, ours "
            f"{len(texts) / seconds['ours']:.1f} texts/s (counting included), {quotients[-1]:.2f} times as fast "
            f"({cpu_quotients[-1]:.2f} by CPU seconds), largest difference {difference:.1e}",
            flush=True,
        )
    print(
        f"median: {statistics.median(quotients):.2f} times as fast, "
        f"{statistics.median(cpu_quotients):.2f} by CPU seconds"
    )
    return 0


def _padded_by_characters(texts: Sequence[str], counts: Sequence[int], longest: int) -> int:
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    batches = [order[start : start + 32] for start in range(0, len(order), 32)]
    return sum(len(batch) * min(max(counts[i] for i in batch), longest) for batch in batches)


def _padded_by_tokens(counts: Sequence[int], batch_tokens: int, longest: int) -> int:
    batches = plan_batches(counts, texts=len(counts), batch_tokens=batch_tokens, max_tokens=longest)
    return sum(len(batch) * min(counts[batch[0]], longest) for batch in batches)


if __name__ == "__main__":
    raise SystemExit(main())
