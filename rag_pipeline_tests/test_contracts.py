"""Each seeded defect fails the one check it concerns; what cannot be checked is errored, never passed."""

import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import pytest

from rag_pipeline import verdicts, visibility
from rag_pipeline.contracts import check_chunks, check_collection, check_documents
from rag_pipeline.contracts import check_embeddings as check_embeddings_of
from rag_pipeline.index.embedding import embedding_digest
from rag_pipeline.records import Chunk, Document, Issue
from rag_pipeline.tables import (
    CHUNK_COLUMNS,
    DOCUMENT_COLUMNS,
    EMBEDDING_COLUMNS,
    ISSUE_COLUMNS,
    chunks_table,
    documents_table,
    embeddings_table,
    from_parquet,
    issues_table,
    to_parquet,
)
from rag_pipeline.verdicts import CHECKS, ERROR_CHECKS, CheckResult

DIMENSION = 4
MAX_TOKENS = 512


def document(source: str, text: str, **values: object) -> Document:
    return Document(
        source=source,
        digest="d",
        text=text,
        **{"title": source, "category": "redis", **values},  # type: ignore[arg-type]
    )


def chunk(id_: str, source: str, **values: object) -> Chunk:
    given = {
        "title": source, "breadcrumb": ("A",), "category": "redis", "chunk_index": int(id_[-1]), "content": "text",
        "embedding_text": f"text of {id_}", "token_count": 9, "char_start": 0, "char_end": 4, "line_start": 1,
        "line_end": 2,
        "prev_id": "", "next_id": "", "section_id": "s", "language": "en", "content_digest": "c",
    }  # fmt: skip
    return Chunk(id=id_, source=source, **{**given, **values})  # type: ignore[arg-type]


def documents_of(documents: list[Document]) -> pd.DataFrame:
    return documents_table(documents, [], [])


class Tables:
    """Tables without a fault; a test breaks one thing in them."""

    def __init__(self) -> None:
        self.documents = documents_of(
            [
                document("a.md", "# A\n\none\n\n## B\n\ntwo\n"),
                document("b.md", "lead\n\n# Later\n\nthree\n"),
                document("empty.md", "---\ntitle: x\n---\n<!-- nothing -->\n", body_start=17),
            ]
        )
        self.issues = issues_table([Issue("a.md", 3, "The key `ownr` is unknown.", rejected=False)])
        self.chunks = chunks_table(
            [
                chunk("a0", "a.md"),
                chunk("a1", "a.md", line_start=5, line_end=7),
                chunk("b0", "b.md", breadcrumb=()),
                chunk("b1", "b.md", breadcrumb=("Later",), line_start=3, line_end=5),
            ],
            recipe="r",
        )
        vectors = np.eye(DIMENSION, dtype=np.float32)
        digests = [embedding_digest(text) for text in self.chunks["embedding_text"]]
        self.embeddings = embeddings_table(self.chunks, digests, vectors, model_fingerprint="m")
        self.taxonomy: Sequence[str] = ("redis", "mysql")
        ids = list(self.chunks["id"])
        self.collection: dict[str, object] = {
            "expected_ids": ids,
            "stored_ids": ids[::-1],
            "stored_count": 4,
            "self_retrieval_misses": [],
            "sampled": 3,
        }

    def set(self, table: str, row: int, column: str, value: object) -> None:
        frame: pd.DataFrame = getattr(self, table)
        values = list(frame[column])
        values[row] = value
        setattr(self, table, frame.assign(**{column: pd.Series(values, index=frame.index)}))

    def results(self) -> dict[str, CheckResult]:
        found = [
            *check_documents(self.documents, self.issues, taxonomy=self.taxonomy),
            *check_chunks(self.chunks, self.documents, max_tokens=MAX_TOKENS),
            *check_embeddings_of(self.embeddings, self.chunks, dimension=DIMENSION),
            *check_collection(**self.collection),  # type: ignore[arg-type]
        ]
        assert [result.name for result in found] == [spec.name for spec in CHECKS]
        return {result.name: result for result in found}


def failing(results: dict[str, CheckResult]) -> list[str]:
    return [name for name, result in results.items() if not result.passed]


def _reject(tables: Tables) -> None:
    tables.issues = issues_table([Issue("bad.md", 0, "It is not text.", rejected=True)])


def _no_documents(tables: Tables) -> None:
    tables.documents = tables.documents.iloc[:0]
    tables.chunks = tables.chunks.iloc[:0]
    tables.embeddings = tables.embeddings.iloc[:0]


def _blank_documents(tables: Tables) -> None:
    tables.documents = tables.documents.assign(text="<!-- nothing -->", body_start=0)
    tables.chunks = tables.chunks.iloc[:0]
    tables.embeddings = tables.embeddings.iloc[:0]
    tables.collection |= {"expected_ids": [], "stored_ids": [], "stored_count": 0, "sampled": 0}


def _duplicate_id(tables: Tables) -> None:
    """A chunker's collision, seen by every later step too."""
    tables.set("chunks", 1, "id", "a0")
    tables.set("embeddings", 1, "id", "a0")
    tables.collection |= {"expected_ids": ["a0", "a0", "b0", "b1"], "stored_ids": ["a0", "b0", "b1"], "stored_count": 3}


def _lost_document(tables: Tables) -> None:
    tables.documents = documents_of(
        [document("z.md", "# Only a heading\n"), *(document(s, "# A") for s in ("a.md", "b.md"))]
    )
    tables.set("chunks", 2, "breadcrumb", ["A"])


def _vector(row: int, values: Sequence[float] | None) -> Callable[[Tables], None]:
    def seed(tables: Tables) -> None:
        tables.set("embeddings", row, "vector", None if values is None else np.array(values, np.float32))

    return seed


def _two_nan_vectors(tables: Tables) -> None:
    _vector(0, [np.nan, 0, 0, 0])(tables)
    _vector(1, [np.nan, 0, 0, 0])(tables)


def _two_zero_vectors(tables: Tables) -> None:
    _vector(0, [0, 0, 0, 0])(tables)
    _vector(1, [0, 0, 0, 0])(tables)


def _drop_vector(tables: Tables) -> None:
    tables.embeddings = tables.embeddings.iloc[1:]


def _second_vector(tables: Tables) -> None:
    tables.embeddings = pd.concat([tables.embeddings, tables.embeddings.iloc[:1]])


def _stray_vector(tables: Tables) -> None:
    _second_vector(tables)
    tables.embeddings = tables.embeddings.reset_index(drop=True)
    tables.set("embeddings", 4, "id", "gone")


def _cell(table: str, row: int, column: str, value: object) -> Callable[[Tables], None]:
    return lambda tables: tables.set(table, row, column, value)


def _collection(**values: object) -> Callable[[Tables], None]:
    return lambda tables: tables.collection.update(values)


DEFECTS: list[tuple[str, Callable[[Tables], None], str, str]] = [
    (
        "rejected file",
        _reject,
        verdicts.DOCUMENTS_NOT_REJECTED,
        "1 of 4 files were rejected and are not in the index: bad.md (It is not text).",
    ),
    ("no documents", _no_documents, verdicts.DOCUMENTS_PRESENT, "No document was found. Check `knowledge.roots`"),
    (
        "blank title",
        _cell("documents", 1, "title", " "),
        verdicts.DOCUMENTS_TITLED,
        "1 of 3 documents have no title: b.md.",
    ),
    (
        "null title",
        _cell("documents", 1, "title", None),
        verdicts.DOCUMENTS_TITLED,
        "1 of 3 documents have no title: b.md.",
    ),
    (
        "unknown category",
        _cell("documents", 0, "category", "reids"),
        verdicts.DOCUMENTS_IN_TAXONOMY,
        "a.md (category 'reids')",
    ),
    (
        "duplicate id",
        _duplicate_id,
        verdicts.CHUNK_IDS_UNIQUE,
        "with another chunk, so one would overwrite the other: a.md (id a0); a.md",
    ),
    (
        "blank content",
        _cell("chunks", 3, "content", " \n\u3000"),
        verdicts.CHUNK_CONTENT_PRESENT,
        "1 of 4 chunks hold no text: b.md (id b1).",
    ),
    (
        "too long",
        _cell("chunks", 0, "token_count", 513),
        verdicts.CHUNK_TOKENS_WITHIN_LIMIT,
        "a.md (id a0, 513 tokens)",
    ),
    (
        "never counted",
        _cell("chunks", 0, "token_count", None),
        verdicts.CHUNK_TOKENS_WITHIN_LIMIT,
        "a.md (id a0, 0 tokens)",
    ),
    (
        "document lost",
        _lost_document,
        verdicts.DOCUMENTS_HAVE_CHUNKS,
        "1 of 3 documents with visible text have no chunk, so nothing of them can be found: z.md.",
    ),
    (
        "breadcrumb lost",
        _cell("chunks", 1, "breadcrumb", []),
        verdicts.CHUNK_BREADCRUMBS_PRESENT,
        "a.md (id a1, line 5)",
    ),
    (
        "breadcrumb lost at its heading",
        _cell("chunks", 0, "breadcrumb", []),
        verdicts.CHUNK_BREADCRUMBS_PRESENT,
        "a.md (id a0, line 1)",
    ),
    ("short vector", _vector(0, [1, 0, 0]), verdicts.EMBEDDING_DIMENSION, "a.md (id a0, 3 numbers)"),
    ("short vector of wrong length", _vector(0, [2, 0, 0]), verdicts.EMBEDDING_DIMENSION, "a.md (id a0, 3 numbers)"),
    ("no vector", _vector(0, None), verdicts.EMBEDDING_DIMENSION, "a.md (id a0, 0 numbers)"),
    ("documents without text", _blank_documents, verdicts.CHUNKS_PRESENT, "None of 3 documents has any text"),
    ("NaN", _vector(2, [np.nan, 1, np.inf, 0]), verdicts.EMBEDDINGS_FINITE, "b.md (id b0, 2 bad numbers)"),
    ("two NaN vectors", _two_nan_vectors, verdicts.EMBEDDINGS_FINITE, "2 of 4 vectors hold NaN or infinity"),
    ("not normalised", _vector(1, [3, 4, 0, 0]), verdicts.EMBEDDINGS_UNIT_NORM, "a.md (id a1, 5 long)"),
    (
        "two zero vectors",
        _two_zero_vectors,
        verdicts.EMBEDDINGS_UNIT_NORM,
        "a.md (id a0, 0 long); a.md (id a1, 0 long)",
    ),
    (
        "vector missing",
        _drop_vector,
        verdicts.EMBEDDINGS_COMPLETE,
        "1 of 4 ids do not have exactly one vector for one chunk: a.md (id a0, 1 missing).",
    ),
    ("vector twice", _second_vector, verdicts.EMBEDDINGS_COMPLETE, "a.md (id a0, 1 too many)"),
    (
        "vector of no chunk",
        _stray_vector,
        verdicts.EMBEDDINGS_COMPLETE,
        "1 of 5 ids do not have exactly one vector for one chunk: a.md (id gone, 1 too many).",
    ),
    (
        "vector of an earlier text",
        lambda tables: tables.set("chunks", 2, "embedding_text", "edited since"),
        verdicts.EMBEDDINGS_CURRENT,
        "1 of 4 vectors were made from another text than their chunk has now: b.md (id b0)",
    ),
    (
        "equal vectors",
        _vector(1, [1, -0.0, 0, 0]),
        verdicts.EMBEDDINGS_DISTINCT,
        "2 of 4 vectors are equal to that of another text",
    ),
    (
        "id not stored",
        _collection(stored_ids=["a0", "a1", "b0"], stored_count=3, self_retrieval_misses=["b1"]),
        verdicts.COLLECTION_PARITY,
        "4 ids were expected and the collection counts 3; 1 ids differ: b1 (missing).",
    ),
    (
        "stray id",
        _collection(stored_ids=["a0", "a1", "b0", "b1", "x"], stored_count=5),
        verdicts.COLLECTION_PARITY,
        "x (unexpected)",
    ),
    (
        "stored twice",
        _collection(stored_ids=["a0", "a1", "b0", "b1", "b1"], stored_count=5),
        verdicts.COLLECTION_PARITY,
        "b1 (stored twice)",
    ),
    ("count differs", _collection(stored_count=7), verdicts.COLLECTION_PARITY, "the collection counts 7"),
    (
        "empty collection",
        _collection(stored_ids=[], stored_count=0, sampled=0),
        verdicts.COLLECTION_PARITY,
        "a0 (missing); a1 (missing)",
    ),
    (
        "lost vector",
        _collection(self_retrieval_misses=["a1"]),
        verdicts.COLLECTION_SELF_RETRIEVAL,
        "1 of 3 sampled vectors did not find themselves: a1.",
    ),
    ("nothing sampled", _collection(sampled=0), verdicts.COLLECTION_SELF_RETRIEVAL, "No vector was sampled"),
]


@pytest.mark.parametrize(("seed", "name", "found"), [row[1:] for row in DEFECTS], ids=[row[0] for row in DEFECTS])
def test_a_seeded_defect_fails_exactly_its_check(seed: Callable[[Tables], None], name: str, found: str) -> None:
    tables = Tables()
    seed(tables)
    if name == verdicts.DOCUMENTS_PRESENT:
        tables.collection |= {"expected_ids": [], "stored_ids": [], "stored_count": 0, "sampled": 0}
    results = tables.results()
    assert failing(results) == [name]
    assert not results[name].errored
    assert found in results[name].description
    expected = [results[name]] if name in ERROR_CHECKS else []
    assert verdicts.failed_errors(results.values()) == expected


def test_every_check_has_a_seeded_defect() -> None:
    assert {row[2] for row in DEFECTS} == {spec.name for spec in CHECKS}


def test_tables_without_fault_pass_before_and_after_parquet() -> None:
    tables = Tables()
    assert failing(tables.results()) == []
    for name in ("documents", "issues", "chunks", "embeddings"):
        setattr(tables, name, from_parquet(to_parquet(getattr(tables, name))))
    results = tables.results()
    assert failing(results) == []
    assert results[verdicts.DOCUMENTS_HAVE_CHUNKS].description == (
        "Every document with visible text has a chunk. (2 checked.)"
    )
    assert results[verdicts.COLLECTION_PARITY].metadata == {"checked": 4, "failing": 0, "expected": 4, "stored": 4}


def test_empty_tables_fail_documents_present_only() -> None:
    documents, issues = pd.DataFrame(columns=list(DOCUMENT_COLUMNS)), pd.DataFrame(columns=list(ISSUE_COLUMNS))
    chunks, embeddings = pd.DataFrame(columns=list(CHUNK_COLUMNS)), pd.DataFrame(columns=list(EMBEDDING_COLUMNS))
    results = [
        *check_documents(documents, issues, taxonomy=["redis"]),
        *check_chunks(chunks, documents, max_tokens=512),
        *check_embeddings_of(embeddings, chunks, dimension=384),
    ]
    assert [result.name for result in results if not result.passed] == [verdicts.DOCUMENTS_PRESENT]


def test_without_taxonomy_every_category_passes_and_says_so() -> None:
    tables = Tables()
    tables.taxonomy = ()
    tables.set("documents", 0, "category", "reids")
    result = tables.results()[verdicts.DOCUMENTS_IN_TAXONOMY]
    assert result.passed
    assert result.description == "`knowledge.taxonomy` is empty, so every category is allowed."


def test_a_recount_that_is_larger_than_the_stored_count_is_judged() -> None:
    tables = Tables()
    results = check_chunks(tables.chunks, tables.documents, max_tokens=512, recount=[9, 513, 9, 9])
    failed = [result for result in results if not result.passed]
    assert [result.name for result in failed] == [verdicts.CHUNK_TOKENS_WITHIN_LIMIT]
    assert failed[0].metadata == {"checked": 4, "failing": 1, "examples": "a.md (id a1, 513 tokens)"}


@pytest.mark.parametrize(
    ("table", "column", "errored"),
    [
        ("issues", "rejected", {verdicts.DOCUMENTS_NOT_REJECTED}),
        ("documents", "title", {verdicts.DOCUMENTS_TITLED}),
        ("documents", "text", {verdicts.DOCUMENTS_HAVE_CHUNKS, verdicts.CHUNK_BREADCRUMBS_PRESENT}),
        ("chunks", "token_count", {verdicts.CHUNK_TOKENS_WITHIN_LIMIT}),
        ("chunks", "content", {verdicts.CHUNK_CONTENT_PRESENT}),
        ("chunks", "breadcrumb", {verdicts.CHUNK_BREADCRUMBS_PRESENT}),
        ("chunks", "embedding_text", {verdicts.EMBEDDINGS_CURRENT}),
        ("embeddings", "embedding_digest", {verdicts.EMBEDDINGS_DISTINCT, verdicts.EMBEDDINGS_CURRENT}),
        ("embeddings", "id", {verdicts.EMBEDDINGS_COMPLETE, verdicts.EMBEDDINGS_CURRENT}),
    ],
)
def test_a_missing_column_is_errored_and_not_passed(table: str, column: str, errored: set[str]) -> None:
    tables = Tables()
    setattr(tables, table, getattr(tables, table).drop(columns=column))
    results = tables.results()
    assert set(failing(results)) == errored
    for name in errored:
        assert results[name].errored
        assert results[name].description == (
            f"The check could not be carried out, so nothing is known: the column '{column}' is missing."
        )
    assert {result.name for result in verdicts.failed_errors(results.values())} == errored & ERROR_CHECKS


def test_an_exception_inside_great_expectations_is_errored() -> None:
    rows = pd.DataFrame({"source": ["a.md", "b.md"], "value": ["text", 3]})
    result = verdicts.judge(
        verdicts.EMBEDDINGS_UNIT_NORM, lambda: rows, verdicts.between(0, 1), finding="x", advice="y"
    )
    assert (result.passed, result.errored) == (False, True)
    assert "must either be None or of the same type" in result.description

    result = verdicts.judge(
        verdicts.EMBEDDINGS_UNIT_NORM, lambda: rows, ("ExpectNoSuchThing", {}), finding="x", advice="y"
    )
    assert (result.passed, result.errored) == (False, True)
    assert "ExpectNoSuchThing" in result.description


def test_a_column_that_only_great_expectations_misses_is_errored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other shape of ``exception_info``: one entry a metric."""
    with pytest.raises(RuntimeError, match='column "value" in BatchData does not exist'):
        verdicts._validate(pd.DataFrame({"other": [1]}), verdicts.between(0, 1))


def test_at_most_five_examples_are_named() -> None:
    documents = documents_of([document(f"{n}.md", "text", title="") for n in range(7)])
    result = check_documents(documents, issues_table([]))[2]
    assert result.description == (
        "7 of 7 documents have no title: 0.md; 1.md; 2.md; 3.md; 4.md; …. "
        "Give each a `title` in its front matter or a first heading."
    )
    assert result.metadata == {"checked": 7, "failing": 7, "examples": "0.md; 1.md; 2.md; 3.md; 4.md"}


@pytest.mark.parametrize(
    ("text", "visible", "heading"),
    [
        ("", False, None),
        ("<!-- a\n\nb -->\n\n[x]: http://y\n", False, None),
        ("<script>\nlet a\n</script>\n<style>b</style>\n", False, None),
        ("<div>\n<b>word</b>\n</div>\n", True, None),
        ("<!-- never closed\n\n# text\n", False, None),
        ("\u200b\n", False, None),
        ('{{< glossary term="x"\n length="all" >}}\n', False, None),
        ('## {{% heading "x" %}}\n\n{{< a\n>}}\n# B\n', True, 5),
        ("```\n# code\n```\n", True, None),
        ("> # quoted\n\n- # item\n", True, None),
        ("#\n\n# ![](x.png)\n\n## `B`\n", True, 5),
        ("lead\n\nTitle\n=====\n", True, 3),
    ],
)
def test_visible_text_and_the_first_heading(text: str, visible: bool, heading: int | None) -> None:
    front = "---\na: 1\n---\n"
    assert visibility.has_visible_text(text) is visible
    assert visibility.first_heading_line(text) == heading
    assert visibility.has_visible_text(front + text, body_start=len(front)) is visible
    assert visibility.first_heading_line(front + text, body_start=len(front)) == (heading and heading + 3)


def test_fifty_thousand_vectors_at_fault_are_judged_by_number_and_not_row_by_row() -> None:
    rows = 50_000
    vectors = np.random.default_rng(0).normal(size=(rows, 384)).astype(np.float32)
    ids = [f"{n:032x}" for n in range(rows)]
    chunks = pd.DataFrame({"id": ids, "source": "a.md", "embedding_text": ids})
    embeddings = embeddings_table(chunks, [embedding_digest(text) for text in ids], vectors, model_fingerprint="m")
    results = check_embeddings_of(embeddings, chunks, dimension=384)
    assert [result.name for result in results if not result.passed] == [verdicts.EMBEDDINGS_UNIT_NORM]
    assert results[2].metadata["failing"] == rows


def test_great_expectations_is_imported_by_a_check_only_and_without_analytics() -> None:
    code = (
        "import os, sys, rag_pipeline.contracts as c, pandas as pd\n"
        "assert 'great_expectations' not in sys.modules\n"
        "table = pd.DataFrame({'source': ['a'], 'title': ['t']})\n"
        "c.check_documents(table, pd.DataFrame(columns=['source', 'rejected', 'reason']))\n"
        "assert 'great_expectations' in sys.modules\n"
        "print(os.environ['GX_ANALYTICS_ENABLED'])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "false\n", "")
