"""How L0 terms and queries are compared, and the rows of the published knowledge index; without pandas, for readers."""

import json
import unicodedata
from typing import NamedTuple

from rag_pipeline.errors import StoreUnavailableError

KNOWLEDGE_INDEX_VERSION = "1"  # changes with the rules of `knowledge_index` and with the format of its `to_json`

# `unicodedata.normalize` takes quadratic time on a run of combining marks, so that it never sees more than this.
_PIECE_CHARS = 2048
_CUT_CHARS = 256


class TermRow(NamedTuple):
    """One row of the knowledge index: ``term`` names the document ``source`` in the way of ``kind``."""

    term: str
    surface: str
    kind: str
    source: str
    title: str
    category: str


def normalise(text: str) -> str:
    """NFKC, case folded, white space collapsed to single spaces and trimmed: how terms and queries are compared.

    Takes linear time. A run of more than `_CUT_CHARS` combining marks may be ordered in pieces.
    """
    if text.isascii():
        return " ".join(text.lower().split())
    folded = "".join(_nfkc(_nfkc(piece).casefold()) for piece in _pieces(text))
    return " ".join(folded.split())


def rows_from_json(data: bytes) -> list[TermRow]:
    """The rows that `knowledge_index.to_json` wrote, by term, kind and source.

    Raises:
        StoreUnavailableError: Not such a file, or one of another version.
    """
    try:
        found = json.loads(data)
        version, columns, rows = found["version"], found["columns"], found["rows"]
        if version == KNOWLEDGE_INDEX_VERSION and columns == list(TermRow._fields):
            return sorted((TermRow(*row) for row in rows), key=lambda row: (row.term, row.kind, row.source))
    except (ValueError, KeyError, TypeError) as error:
        raise StoreUnavailableError(
            f"The knowledge index cannot be read ({type(error).__name__}: {error}): reindex to publish it again."
        ) from None
    raise StoreUnavailableError(
        f"The knowledge index has version {version!r} and this program reads version "
        f"{KNOWLEDGE_INDEX_VERSION!r}: reindex needed."
    )


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = start + _PIECE_CHARS
        # Nothing before an ASCII character or an ideograph composes with it.
        cut = next((at for at in range(end, end - _CUT_CHARS, -1) if text[at] < "\x80" or "㐀" <= text[at] < "ꀀ"), end)
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]
