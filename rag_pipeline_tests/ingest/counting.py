"""Deterministic token counters for tests: one like a real tokenizer, one whose counts do not add up."""

import re
from collections.abc import Sequence

from rag_pipeline.records import Chunk, ChunkBudget, Document, TokenCounter

_PIECE = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]|[a-zA-Z0-9_]{1,6}|[^\W\d_]{1,4}|[^\w\s]|\w")


class WordCounter:
    """One token for six letters of a word, for a Chinese character and for a sign; three around every input."""

    reserved_tokens = 3
    max_tokens = 512

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(self.offsets(text)) for text in texts]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in _PIECE.finditer(text)]

    def count_inputs(self, embedding_texts: Sequence[str]) -> list[int]:
        return [count + self.reserved_tokens for count in self.count(embedding_texts)]


class OddCounter(WordCounter):
    """Counts that do not add: every seventh token of a text costs one more, runs of unknown letters and spaces none."""

    def count_inputs(self, embedding_texts: Sequence[str]) -> list[int]:
        return [self.reserved_tokens + count + count // 7 for count in super().count(embedding_texts)]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(r"[^\W\d_]+|\d+|[^\w\s]+", text)]


def document(text: str, **fields: object) -> Document:
    """A document as `parse_document` makes it, with fields replaced."""
    from dataclasses import replace

    from rag_pipeline.ingest.documents import parse_document

    parsed, _ = parse_document("folder/file.md", text.encode())
    assert parsed is not None
    return replace(parsed, **fields)  # type: ignore[arg-type]


def chunks_of(
    text: str | Document, *, soft: int = 300, hard: int = 480, tokens: TokenCounter | None = None
) -> list[Chunk]:
    from rag_pipeline.ingest.chunking import chunk_document

    parsed = document(text) if isinstance(text, str) else text
    return chunk_document(
        parsed, tokens=tokens or WordCounter(), budget=ChunkBudget(soft_tokens=soft, hard_tokens=hard)
    )


def check_invariants(parsed: Document, chunks: Sequence[Chunk], *, tokens: TokenCounter, hard: int) -> None:
    """What holds for the chunks of any document."""
    from rag_pipeline_tests.ingest.visible import lost_words, uncovered, visible_words

    assert len({chunk.id for chunk in chunks}) == len(chunks)
    position = parsed.body_start
    for index, chunk in enumerate(chunks):
        assert chunk.chunk_index == index
        assert position <= chunk.char_start < chunk.char_end <= len(parsed.text)
        position = chunk.char_end
        assert chunk.line_start == parsed.text.count("\n", 0, chunk.char_start) + 1
        assert chunk.line_end == parsed.text.count("\n", 0, chunk.char_end - 1) + 1
        assert chunk.content.strip()
        assert len(chunk.content) <= 16_384
        assert len(chunk.content.encode()) <= 60_000
        assert chunk.content in chunk.embedding_text
        assert chunk.prev_id == (chunks[index - 1].id if index else "")
        assert chunk.next_id == (chunks[index + 1].id if index + 1 < len(chunks) else "")
        assert all(heading and len(heading) <= 200 and "\n" not in heading for heading in chunk.breadcrumb)
    counts = tokens.count_inputs([chunk.embedding_text for chunk in chunks])
    assert [chunk.token_count for chunk in chunks] == counts
    assert max(counts, default=0) <= hard
    assert lost_words(parsed, chunks) == []
    if chunks or visible_words(parsed):
        assert uncovered(parsed, chunks) == ""
