"""What must hold of documents, chunks, embeddings and the staged collection before a version may be promoted.

A seeded defect fails the one check it concerns: a vector with NaN has no norm to judge, and neither has one of the
wrong dimension. `rag_pipeline.verdicts` says how a check is judged and what happens when it cannot be.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import pandas as pd

from rag_pipeline.index.embedding import embedding_digest
from rag_pipeline.verdicts import (
    CHUNK_BREADCRUMBS_PRESENT,
    CHUNK_CONTENT_PRESENT,
    CHUNK_IDS_UNIQUE,
    CHUNK_TOKENS_WITHIN_LIMIT,
    CHUNKS_PRESENT,
    COLLECTION_PARITY,
    COLLECTION_SELF_RETRIEVAL,
    DOCUMENTS_HAVE_CHUNKS,
    DOCUMENTS_IN_TAXONOMY,
    DOCUMENTS_NOT_REJECTED,
    DOCUMENTS_PRESENT,
    DOCUMENTS_TITLED,
    EMBEDDING_DIMENSION,
    EMBEDDINGS_COMPLETE,
    EMBEDDINGS_CURRENT,
    EMBEDDINGS_DISTINCT,
    EMBEDDINGS_FINITE,
    EMBEDDINGS_UNIT_NORM,
    NOT_BLANK,
    UNIQUE,
    CheckResult,
    between,
    failure,
    guarded,
    judge,
    one_of,
    result,
)
from rag_pipeline.visibility import first_heading_line, has_visible_text

NORM_TOLERANCE = 1e-3
_BLOCK = 4096  # vectors looked at together: 6 MB at 384 dimensions


def check_documents(
    documents: pd.DataFrame, issues: pd.DataFrame, *, taxonomy: Sequence[str] = ()
) -> list[CheckResult]:
    """Check the tables of documents and issues; without ``taxonomy`` any category passes."""

    def files() -> pd.DataFrame:
        rejected = issues[issues["rejected"].astype(bool)].drop_duplicates("source")
        return pd.DataFrame(
            {
                "source": [*documents["source"], *rejected["source"]],
                "value": [*[0] * len(documents), *[1] * len(rejected)],
                "detail": [*[""] * len(documents), *(str(reason).rstrip(".") for reason in rejected["reason"])],
            }
        )

    def present() -> CheckResult:
        if len(documents):
            return result(DOCUMENTS_PRESENT, f"There are {len(documents)} documents.", checked=len(documents))
        rejected = issues.loc[issues["rejected"].astype(bool), "source"].drop_duplicates().tolist()
        return failure(
            DOCUMENTS_PRESENT,
            "Every file was rejected" if rejected else "No document was found",
            rejected,
            advice="The check documents_not_rejected gives the reasons."
            if rejected
            else "Check `knowledge.roots`: the folders must hold .md or .markdown files that are not hidden.",
            checked=len(rejected),
            failing=max(1, len(rejected)),
        )

    def categories() -> pd.DataFrame:
        value = _text(documents["category"])
        return documents.assign(value=value, detail=[f"category {category!r}" for category in value])

    return [
        judge(
            DOCUMENTS_NOT_REJECTED,
            files,
            one_of([0]),
            finding="files were rejected and are not in the index",
            advice="Mend them and reindex; the other documents are not affected.",
        ),
        guarded(DOCUMENTS_PRESENT, present),
        judge(
            DOCUMENTS_TITLED,
            lambda: documents.assign(value=_text(documents["title"]).str.strip()),
            NOT_BLANK,
            finding="documents have no title",
            advice="Give each a `title` in its front matter or a first heading.",
        ),
        judge(
            DOCUMENTS_IN_TAXONOMY,
            categories,
            one_of(taxonomy),
            finding="documents have a category that is not in the taxonomy",
            advice="Correct `category` in the front matter, or add the category to `knowledge.taxonomy`.",
        )
        if taxonomy
        else result(DOCUMENTS_IN_TAXONOMY, "`knowledge.taxonomy` is empty, so every category is allowed."),
    ]


def check_chunks(
    chunks: pd.DataFrame, documents: pd.DataFrame, *, max_tokens: int, recount: Sequence[int] | None = None
) -> list[CheckResult]:
    """Check the table of chunks against the documents they were cut from.

    Args:
        chunks: Rows in any order.
        documents: Rows in any order; each source once.
        max_tokens: The most tokens of a whole model input, prefix and special tokens included.
        recount: Tokens of each chunk's whole input, counted anew in the order of ``chunks``: the larger of it and
            ``token_count`` is judged.
    """

    def tokens() -> pd.DataFrame:
        # An unknown count proves nothing: it becomes 0, which is outside the limits too.
        counts = pd.to_numeric(chunks["token_count"]).fillna(0).to_numpy(dtype=np.int64)
        if recount is not None:
            counts = np.maximum(counts, np.asarray(recount, dtype=np.int64))
        return chunks.assign(value=counts, detail=[f"{count} tokens" for count in counts])

    def present() -> CheckResult:
        # No documents, or some with text and without chunks, are for other checks to find.
        if len(chunks) or not len(documents) or _any_visible_text(documents):
            return result(CHUNKS_PRESENT, f"There are {len(chunks)} chunks.", checked=len(documents))
        return failure(
            CHUNKS_PRESENT,
            f"None of {len(documents)} documents has any text, so nothing could be found",
            documents["source"].tolist(),
            advice="Are the files empty, after a failed copy for instance?",
            checked=len(documents),
            failing=len(documents),
        )

    def chunk_counts() -> pd.DataFrame:
        of_source = Counter(chunks["source"])
        counts = [
            float(of_source[source]) if source in of_source or has_visible_text(text, body_start=int(start)) else np.nan
            for source, text, start in zip(documents["source"], documents["text"], documents["body_start"], strict=True)
        ]
        return documents.assign(value=counts)

    def bare_under_heading() -> pd.DataFrame:
        bare = chunks["breadcrumb"].map(len) == 0
        texts = documents[documents["source"].isin(chunks.loc[bare, "source"])]
        headings = {
            source: first_heading_line(text, body_start=int(start))
            for source, text, start in zip(texts["source"], texts["text"], texts["body_start"], strict=True)
        }
        lines = [headings.get(source) or np.inf for source in chunks["source"]]
        return chunks.assign(
            value=(bare & (lines <= chunks["line_start"])).astype(int),
            detail=[f"line {line}" for line in chunks["line_start"]],
        )

    return [
        guarded(CHUNKS_PRESENT, present),
        judge(
            CHUNK_IDS_UNIQUE,
            lambda: chunks.assign(value=_text(chunks["id"])),
            UNIQUE,
            finding="chunks share their id with another chunk, so one would overwrite the other",
            advice="The chunker is at fault: please report it with the document.",
        ),
        judge(
            CHUNK_CONTENT_PRESENT,
            lambda: chunks.assign(value=_text(chunks["content"]).str.strip()),
            NOT_BLANK,
            finding="chunks hold no text",
            advice="The chunker is at fault: please report it with the document.",
        ),
        judge(
            CHUNK_TOKENS_WITHIN_LIMIT,
            tokens,
            between(1, max_tokens),
            finding=f"chunks do not have 1 to {max_tokens} tokens, so the model would cut off their end",
            advice="Lower `chunking.hard_tokens`, or choose a model with a longer input.",
        ),
        judge(
            DOCUMENTS_HAVE_CHUNKS,
            chunk_counts,
            between(1),
            finding="documents with visible text have no chunk, so nothing of them can be found",
            advice="The chunker is at fault: please report it with the document.",
        ),
        judge(
            CHUNK_BREADCRUMBS_PRESENT,
            bare_under_heading,
            one_of([0]),
            finding="chunks stand under a heading and have no breadcrumb, so they are found less well",
            advice="The chunker is at fault: please report it with the document.",
        ),
    ]


def _any_visible_text(documents: pd.DataFrame) -> bool:
    rows = zip(documents["text"], documents["body_start"], strict=True)
    return any(has_visible_text(text, body_start=int(start)) for text, start in rows)


def check_embeddings(embeddings: pd.DataFrame, chunks: pd.DataFrame, *, dimension: int) -> list[CheckResult]:
    """Check the table of embeddings against the chunks; ``dimension`` is the model's."""
    embeddings = embeddings.reset_index(drop=True)

    @cache
    def facts() -> pd.DataFrame:
        return _vector_facts(embeddings["vector"], dimension=dimension)

    def with_fact(name: str, unit: str) -> pd.DataFrame:
        value = facts()[name]
        return embeddings.assign(value=value, detail=[f"{fact:.6g} {unit}" for fact in value])

    def surplus() -> pd.DataFrame:
        chunk_rows, vector_rows = chunks["id"].value_counts(), embeddings["id"].value_counts()
        ids = chunk_rows.index.union(vector_rows.index)
        value = vector_rows.reindex(ids, fill_value=0) - chunk_rows.reindex(ids, fill_value=0)
        sources = pd.concat([chunks[["id", "source"]], embeddings[["id", "source"]]]).drop_duplicates("id")
        return pd.DataFrame(
            {
                "id": ids,
                "source": sources.set_index("id")["source"].reindex(ids).to_numpy(),
                "value": value.to_numpy(),
                "detail": [f"{abs(extra)} {'too many' if extra > 0 else 'missing'}" for extra in value],
            }
        )

    def stale() -> pd.DataFrame:
        texts = chunks.drop_duplicates("id", keep=False).set_index("id")["embedding_text"]
        wanted = embeddings["id"].map(texts)
        pairs = zip(wanted, embeddings["embedding_digest"], strict=True)
        # A vector without its one chunk, or a chunk without text, is for other checks to find.
        value = [float(embedding_digest(text) != digest) if isinstance(text, str) else None for text, digest in pairs]
        return embeddings.assign(value=pd.Series(value, dtype=float))

    def shared() -> pd.DataFrame:
        rows = pd.DataFrame({"key": facts()["digest"], "text": embeddings["embedding_digest"]})
        texts = rows.dropna(subset="key").drop_duplicates()["key"].value_counts()
        return embeddings.assign(
            value=rows["key"].map(texts).astype(float), detail=[f"vector {str(key)[:8]}" for key in rows["key"]]
        )

    return [
        judge(
            EMBEDDING_DIMENSION,
            lambda: with_fact("size", "numbers"),
            one_of([dimension]),
            finding=f"vectors do not have the model's {dimension} dimensions",
            advice="The cached vectors belong to another model: clear the embedding cache and reindex.",
        ),
        judge(
            EMBEDDINGS_FINITE,
            lambda: with_fact("not_finite", "bad numbers"),
            between(0, 0),
            finding="vectors hold NaN or infinity, so their distances mean nothing",
            advice="Clear the embedding cache and reindex; if it stays, the model is broken.",
        ),
        judge(
            EMBEDDINGS_UNIT_NORM,
            lambda: with_fact("norm", "long"),
            between(1 - NORM_TOLERANCE, 1 + NORM_TOLERANCE),
            finding=f"vectors are not of length 1 (within {NORM_TOLERANCE:g}), so distances are not cosines",
            advice="The model's profile must normalise; clear the embedding cache and reindex.",
        ),
        judge(
            EMBEDDINGS_COMPLETE,
            surplus,
            between(0, 0),
            finding="ids do not have exactly one vector for one chunk",
            advice="Materialize the embeddings again from the present chunks.",
        ),
        judge(
            EMBEDDINGS_CURRENT,
            stale,
            one_of([0]),
            finding="vectors were made from another text than their chunk has now",
            advice="Materialize the embeddings again from the present chunks.",
        ),
        judge(
            EMBEDDINGS_DISTINCT,
            shared,
            between(1, 1),
            finding="vectors are equal to that of another text, so a search cannot tell them apart",
            advice="Look at the texts: the model may know none of their words, or cut off where they differ.",
        ),
    ]


def check_collection(
    *,
    expected_ids: Collection[str],
    stored_ids: Collection[str],
    stored_count: int,
    self_retrieval_misses: Sequence[str],
    sampled: int,
) -> list[CheckResult]:
    """Check a staged collection; sets and counts need no table, so Great Expectations has no part in it.

    Args:
        expected_ids: Ids of the chunks that were to be written.
        stored_ids: Ids read back with strong consistency.
        stored_count: ``count(*)`` of the collection.
        self_retrieval_misses: Sampled ids whose own vector did not find them; ids that are not stored at all are
            left to `COLLECTION_PARITY`.
        sampled: How many vectors were searched for; 0 fails when something is stored, since it proves nothing.
    """

    def parity() -> CheckResult:
        expected, stored = set(expected_ids), set(stored_ids)
        faults = [f"{id_} (missing)" for id_ in sorted(expected - stored)]
        faults += [f"{id_} (unexpected)" for id_ in sorted(stored - expected)]
        faults += [f"{id_} (stored twice)" for id_, n in sorted(Counter(stored_ids).items()) if n > 1]
        counts = f"{len(expected)} ids were expected and the collection counts {stored_count}"
        metadata: dict[str, int | float | str] = {"expected": len(expected), "stored": stored_count}
        if not faults and stored_count == len(expected):
            return result(COLLECTION_PARITY, f"{counts}: they are the same.", checked=len(expected), **metadata)
        return failure(
            COLLECTION_PARITY,
            f"{counts}; {len(faults)} ids differ",
            faults,
            advice="Build the version again; if it stays, look for a full disk or another writer.",
            checked=len(expected),
            failing=max(len(faults), abs(stored_count - len(expected))),
            **metadata,
        )

    def self_retrieval() -> CheckResult:
        stored = set(stored_ids)
        misses = [id_ for id_ in self_retrieval_misses if id_ in stored]
        if not stored:
            return result(COLLECTION_SELF_RETRIEVAL, "Nothing is stored, so there was no vector to search for.")
        if sampled > 0 and not misses:
            return result(COLLECTION_SELF_RETRIEVAL, f"{sampled} sampled vectors found themselves.", checked=sampled)
        return failure(
            COLLECTION_SELF_RETRIEVAL,
            f"{len(misses)} of {sampled} sampled vectors did not find themselves"
            if sampled > 0
            else "No vector was sampled, so nothing shows that the collection can be searched",
            misses,
            advice="Build the version again; if it stays, check metric, index type and search parameters.",
            checked=sampled,
            failing=len(misses),
        )

    return [guarded(COLLECTION_PARITY, parity), guarded(COLLECTION_SELF_RETRIEVAL, self_retrieval)]


def _text(column: pd.Series) -> pd.Series:
    return column.astype(object).where(column.notna(), "").astype(str)


def _vector_facts(vectors: pd.Series, *, dimension: int) -> pd.DataFrame:
    """For each vector: size, count of numbers that are not finite, norm and digest.

    The norm is NaN where dimension or numbers are wrong, the digest (of the bytes) also where the norm is.
    """
    sizes, bad, norms = (
        np.zeros(len(vectors), np.int64),
        np.zeros(len(vectors), np.int64),
        np.full(len(vectors), np.nan),
    )
    digests: list[str | None] = [None] * len(vectors)
    for start in range(0, len(vectors), _BLOCK):
        block = [_vector(value) for value in vectors.iloc[start : start + _BLOCK]]
        for row, vector in enumerate(block, start):
            sizes[row] = vector.size
            bad[row] = vector.size - np.isfinite(vector).sum()
            if vector.size == dimension and not bad[row]:
                norms[row] = np.linalg.norm(vector.astype(np.float64))
                if abs(norms[row] - 1) <= NORM_TOLERANCE:
                    # Adding zero makes -0.0 and 0.0 the same bytes.
                    digests[row] = hashlib.blake2b((vector + np.float32(0)).tobytes(), digest_size=16).hexdigest()
    return pd.DataFrame({"size": sizes, "not_finite": bad, "norm": norms, "digest": digests})


def _vector(value: object) -> np.ndarray:
    if value is None or isinstance(value, float):
        return np.empty(0, np.float32)
    return np.asarray(value, dtype=np.float32).ravel()
