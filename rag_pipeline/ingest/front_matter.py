"""Read YAML (``---``) or TOML (``+++``) front matter into a few typed fields, bounded in size and time.

Rules:

- Front matter begins at the very first character. It ends at the next line that is the same delimiter, unindented
  (YAML: ``...`` as well). Without such a line there is none, and the text is all body.
- YAML is read with every scalar as text (``1.10`` stays ``1.10``); aliases are references and never expanded, merge
  keys have no effect. TOML is read with `tomllib`.
- A field is a scalar or a list of scalars; deeper values are ignored. At most 64 values a field are kept, each on one
  line and cut to 200 characters (and by UTF-8 bytes: a category to 512, anything else to 1,000), never inside a
  character; every field that was cut is reported with its line.
- A keyword that begins with a slash is left out: Hugo's aliases are old addresses, not words.
- A block that cannot be read is reported and left out of the body; unless it does not look like front matter at all
  (its first line is no ``key:`` or ``key =``), then it is body.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date

import yaml

MAX_FRONT_MATTER_CHARACTERS = 64 * 1024
MAX_VALUES = 64
MAX_VALUE_CHARACTERS = 200
MAX_VALUE_BYTES = 1000
# The collection's field: `rag_pipeline.index.milvus.CATEGORY_BYTES`, which this package must not import. A longer one
# would fail the whole version when its rows are written.
MAX_CATEGORY_BYTES = 512

_YAML_END = re.compile(r"^(?:---|\.\.\.)[ \t]*$", re.MULTILINE)
_TOML_END = re.compile(r"^\+\+\+[ \t]*$", re.MULTILINE)
_YAML_KEY = re.compile(r"\s*(?:#.*\n\s*)*[\"']?[A-Za-z_][\w .-]*[\"']?[ \t]*:")
_TOML_KEY = re.compile(r"\s*(?:#.*\n\s*)*(?:\[|[\"']?[A-Za-z_][\w.-]*[\"']?[ \t]*=)")
_TOML_LINE = re.compile(r"at line (\d+)")
_BLANKS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """The typed fields of a document's front matter; blank or empty when absent.

    Attributes:
        body_start: Code points that the front matter takes, its closing line end included; 0 when there is none.
        fault: What is wrong with it (a full sentence), blank when it was read.
        fault_line: 1-based line of the fault in the file, 0 without one.
        cuts: 1-based line and a full sentence for each field that was cut, in the order of the fields above.
    """

    body_start: int = 0
    title: str = ""
    category: str = ""
    keywords: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    service: str = ""
    severity: str = ""
    owner: str = ""
    language: str = ""
    updated: str = ""
    fault: str = ""
    fault_line: int = 0
    cuts: tuple[tuple[int, str], ...] = ()


def read_front_matter(text: str) -> FrontMatter:
    """Read the front matter of a decoded document (newlines are LF).

    Returns:
        Its fields; all blank with ``body_start`` 0 when there is none.
    """
    opening, newline, _ = text[:64].partition("\n")
    marker = opening.rstrip(" \t")
    if not newline or marker not in ("---", "+++"):
        return FrontMatter()
    start = len(opening) + 1
    end = (_YAML_END if marker == "---" else _TOML_END).search(text, start)
    if end is None:
        return FrontMatter()
    block = text[start : end.start()]
    body_start = min(len(text), end.end() + 1)
    looks_right = (_YAML_KEY if marker == "---" else _TOML_KEY).match(block) is not None
    if len(block) > MAX_FRONT_MATTER_CHARACTERS:
        if not looks_right:
            return FrontMatter()
        fault = (
            f"The front matter is longer than {MAX_FRONT_MATTER_CHARACTERS} characters and was not read; shorten it."
        )
        return FrontMatter(body_start=body_start, fault=fault, fault_line=1)
    try:
        values = _load_yaml(block) if marker == "---" else tomllib.loads(block)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, ValueError, TypeError, RecursionError) as error:
        if not looks_right:
            return FrontMatter()
        fault, line = _describe(error, kind="YAML" if marker == "---" else "TOML")
        return FrontMatter(body_start=body_start, fault=fault, fault_line=line)
    if values is None or values == "":
        return FrontMatter(body_start=body_start)
    if not isinstance(values, Mapping):
        return FrontMatter()
    return _typed(values, block, body_start=body_start)


def _load_yaml(block: str) -> object:
    # BaseLoader builds text, lists and mappings only: no objects, no merge keys, no dates that can be out of range.
    return yaml.load(block, Loader=yaml.BaseLoader)  # noqa: S506 - the base loader is the safest one


def _describe(error: Exception, *, kind: str) -> tuple[str, int]:
    """Say what is wrong, with the 1-based line in the file (the block begins in line 2)."""
    line = 1
    problem = str(error).partition("\n")[0]
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 2 if mark else 1
        problem = " ".join(part for part in (error.context, error.problem) if part)
    elif match := _TOML_LINE.search(problem):
        line = int(match[1]) + 1
    elif isinstance(error, RecursionError):
        problem = "it is nested too deeply"
    return f"The front matter is not valid {kind}: {problem}. Mend it; the text below it is indexed without it.", line


def _typed(values: Mapping[object, object], block: str, *, body_start: int) -> FrontMatter:
    lower = {str(key).strip().lower(): value for key, value in values.items() if isinstance(key, str)}
    cuts: list[tuple[int, str]] = []

    def texts(name: str, limit: int) -> Iterator[str]:
        for text in _texts(lower.get(name)):
            kept = cut_to_bytes(text[:MAX_VALUE_CHARACTERS].rstrip(), limit)
            if kept != text and not any(f"`{name}`" in reason for _, reason in cuts):
                sentence = (
                    f"A value of `{name}` in the front matter is over {MAX_VALUE_CHARACTERS} characters or {limit} "
                    f"bytes and was cut to {kept[:40]!r}…; shorten it."
                )
                cuts.append((_line_of(name, block), sentence))
            yield kept

    def first(*names: str, limit: int = MAX_VALUE_BYTES) -> str:
        return next((text for name in names for text in texts(name, limit)), "")

    def several(*names: str) -> tuple[str, ...]:
        found = (
            part.strip() for name in names for text in texts(name, MAX_VALUE_BYTES) for part in re.split("[,，]", text)
        )
        return tuple(dict.fromkeys(part for part in found if part and not part.startswith("/")))[:MAX_VALUES]

    return FrontMatter(
        body_start=body_start,
        title=first("title"),
        category=first("category", "domain", "categories", limit=MAX_CATEGORY_BYTES),
        keywords=several("keywords", "tags", "aliases"),
        alerts=several("alerts"),
        service=first("service"),
        severity=first("severity"),
        owner=first("owner"),
        language=first("language").lower(),
        updated=first("updated"),
        cuts=tuple(cuts),
    )


def _line_of(name: str, block: str) -> int:
    """1-based line in the file of a field (the block begins in line 2); 1 when it is written in an unusual way."""
    match = re.search(rf"^[ \t]*[\"']?{name}[\"']?[ \t]*[:=]", block, re.MULTILINE | re.IGNORECASE)
    return block.count("\n", 0, match.start()) + 2 if match else 1


def cut_to_bytes(text: str, limit: int) -> str:
    """``text`` cut to ``limit`` bytes of UTF-8, never inside a code point, without white space at the cut."""
    raw = text.encode("utf-8", errors="replace")
    return text if len(raw) <= limit else raw[:limit].decode("utf-8", errors="ignore").rstrip()


def _texts(value: object) -> Iterator[str]:
    """The non-blank scalars of ``value``, a scalar or a list of scalars, as text on one line, a little long at most."""
    items = value[:MAX_VALUES] if isinstance(value, list) else [value]
    for item in items:
        if item is None or isinstance(item, list | Mapping):
            continue
        if isinstance(item, date):
            text = item.isoformat()
        else:
            text = str(item).lower() if isinstance(item, bool) else str(item)
        if text not in _BLANKS and (text := " ".join(text[: 4 * MAX_VALUE_CHARACTERS].split())):
            # YAML escapes can write NUL and lone surrogates, which no sink takes.
            yield text.replace("\x00", "\ufffd").encode("utf-8", errors="replace").decode("utf-8")
