"""What a data engineer reads on an asset's page: changes as lists, faults and times as tables, column docs."""

import inspect
import re
from collections.abc import Iterable, Sequence
from functools import cache

import dagster as dg
import pandas as pd

from rag_pipeline.index.changes import Changes
from rag_pipeline.index.manifest import digest_of
from rag_pipeline.records import Chunk, Document, Issue, SourceFile

_LISTED = 50


def data_version(table: pd.DataFrame) -> dg.DataVersion:
    """Equal for equal tables, also when one of them was read from Parquet."""
    return dg.DataVersion(digest_of(table.to_json(orient="records", force_ascii=False)))


def changes_markdown(changes: Changes, *, since: str) -> dg.MarkdownMetadataValue:
    """Every changed document by what happened to it, at most 50 of a kind."""
    parts = {
        "added": changes.added,
        "edited": changes.edited,
        "removed": changes.removed,
        "renamed": tuple(f"{before} → {after}" for before, after in changes.renamed),
        "unreadable, so the version before is kept": changes.kept,
    }
    lists = "\n\n".join(f"**{name}** ({len(names)})\n\n{_listing(names)}" for name, names in parts.items() if names)
    return dg.MetadataValue.md(f"Compared with {since}:\n\n{lists or 'nothing changed.'}")


def change_counts(changes: Changes) -> dict[str, int]:
    """How many documents were added, edited, removed and renamed: trend lines in the UI."""
    return {name: len(getattr(changes, name)) for name in ("added", "edited", "removed", "renamed")}


def _listing(names: Sequence[str]) -> str:
    more = [f"- … and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return "\n".join([*(f"- `{name}`" for name in names[:_LISTED]), *more])


def issues_listing(issues: Sequence[Issue]) -> dg.TableMetadataValue | dg.TextMetadataValue:
    """Faults in documents: file, line, what is wrong and what to do; at most 50."""
    if not issues:
        return dg.MetadataValue.text("none")
    return _table(
        {"document": "string", "line": "int", "rejected": "bool", "reason": "string"},
        [(issue.source, issue.line, issue.rejected, issue.reason) for issue in issues[:_LISTED]],
    )


def slowest_table(slowest: Iterable[tuple[str, float]]) -> dg.TableMetadataValue:
    """Documents and the milliseconds they took, as given."""
    return _table({"document": "string", "milliseconds": "float"}, [(name, round(s * 1000, 1)) for name, s in slowest])


def _table(columns: dict[str, str], rows: Sequence[tuple[str | int | float | bool, ...]]) -> dg.TableMetadataValue:
    return dg.MetadataValue.table(
        records=[dg.TableRecord(dict(zip(columns, row, strict=True))) for row in rows],
        schema=dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns.items()]),
    )


def column_schema(table: pd.DataFrame) -> dg.TableSchema:
    """A table's columns, described by the docstrings of the records they come from."""
    described = _described()
    return dg.TableSchema(
        columns=[
            dg.TableColumn(str(name), type=str(dtype), description=described.get(str(name)))
            for name, dtype in table.dtypes.items()
        ]
    )


@cache
def _described() -> dict[str, str]:
    found = {
        "raw_digest": "SHA-256 of the file as it lies there; blank when it could not be read.",
        "indexed": "False: the document is not in the index; all other columns but `issues` are blank.",
        "issues": "What a person should mend: line and reason.",
        "embedding_digest": "SHA-256 of the text that was embedded; the key of the embedding cache.",
        "vector": "float32, of length 1.",
        "term": "The normalised term by which a query is matched.",
        "surface": "The term as it is written in the document.",
        "kind": "Where the term comes from: title, keyword, alert, heading, …",
        "collection": "The version's physical collection in Milvus.",
        "fingerprint": "Digest of everything that decides the version's contents.",
    }
    for record in (Document, SourceFile, Chunk):
        doc = re.sub(r"\n\s{8,}", " ", inspect.cleandoc(record.__doc__ or "").replace("\n        ", " "))
        found.update(re.findall(r"^ {4}(\w+): (.+)$", doc, re.MULTILINE))
    return found
