"""Complete a hit whose list or code block was cut: chunks beside it in the same section join it."""

import re
from collections.abc import Callable, Mapping, Sequence

from rag_pipeline.records import Candidate

Fetch = Callable[[list[str]], Mapping[str, Candidate]]
"""Chunks of the same version by id; those that are not there are left out."""

_ITEM = re.compile(r"\s{0,12}(?:(?:[-*+•]|\d{1,4}[.)])\s|\d{1,4}、)")
_FENCE = re.compile(r"[ >]*(`{3,}|~{3,})(.*)")


def with_neighbours(chunks: Sequence[Candidate], *, most: int, fetch: Fetch) -> tuple[list[Candidate], tuple[str, ...]]:
    """Add the chunks that continue a list or code block of ``chunks``.

    Args:
        chunks: Of one section, in document order, at least one.
        most: The most chunks that may be added.
        fetch: Asked for neighbours only where a block was cut.

    Returns:
        All chunks in document order, and the ids of those that were added.

    Raises:
        Exception: What ``fetch`` raises.
    """
    found = list(chunks)
    added: list[str] = []
    for forward in (True, False):
        while len(added) < most:
            edge = found[-1] if forward else found[0]
            neighbour_id = _neighbour_id(edge, forward=forward)
            if not neighbour_id or not _may_be_cut(edge.content, forward=forward):
                break
            neighbour = fetch([neighbour_id]).get(neighbour_id)
            if neighbour is None or neighbour.metadata.get("section") != edge.metadata.get("section"):
                break
            before, after = (edge, neighbour) if forward else (neighbour, edge)
            if not continues(before.content, after.content):
                break
            found.insert(len(found) if forward else 0, neighbour)
            added.append(neighbour.id)
    return found, tuple(added)


def continues(before: str, after: str) -> bool:
    """Whether a list or a code block goes on from the end of one chunk to the beginning of the next.

    A code block that was cut carries its fence in both chunks, a list its lead-in (see `ingest.chunking`).
    """
    first, last = _lines(after), _lines(before)
    if not first or not last:
        return False
    opening, closing = _FENCE.match(first[0]), _FENCE.match(last[-1])
    if opening and closing and not closing[2].strip():
        # The block that ends `before`: its opening line is the last fence above.
        fences = [match for line in last[:-1] if (match := _FENCE.match(line))]
        return bool(fences) and fences[-1][1] == opening[1] and fences[-1][2].strip() == opening[2].strip()
    if first[0] in last and first[0].rstrip().endswith((":", "：")):  # the repeated lead-in
        first = first[1:]
    if not first:
        return False
    if not _ITEM.match(first[0]) and not first[0].startswith((" ", "\t")) and not (opening and _ends_in_item(last)):
        return False
    return _ends_in_item(last) and not _starts_anew(first[0])


def _ends_in_item(lines: Sequence[str]) -> bool:
    """Whether the last paragraph belongs to a list: an item, or indented below one."""
    for line in reversed(lines):
        if _ITEM.match(line):
            return True
        if not line.startswith((" ", "\t")) and not _FENCE.match(line):
            return False
    return False


def _starts_anew(line: str) -> bool:
    return re.match(r"\s{0,3}1(?:[.)]\s|、)", line) is not None


def _neighbour_id(chunk: Candidate, *, forward: bool) -> str:
    part, parts = chunk.metadata.get("section_part", 1), chunk.metadata.get("section_parts", 1)
    if not isinstance(part, int) or not isinstance(parts, int):
        return ""
    if forward:
        return str(chunk.metadata.get("next_id", "")) if part < parts else ""
    return str(chunk.metadata.get("prev_id", "")) if part > 1 else ""


def _may_be_cut(content: str, *, forward: bool) -> bool:
    """Whether a block at this edge can be part of a list or code block, by the chunk alone."""
    lines = _lines(content)
    if not lines:
        return False
    if forward:
        return _ends_in_item(lines) or bool(_FENCE.match(lines[-1]))
    return any(_ITEM.match(line) or _FENCE.match(line) or line.startswith((" ", "\t")) for line in lines[:2])


def _lines(content: str) -> list[str]:
    return [line for line in content.split("\n") if line.strip()]
