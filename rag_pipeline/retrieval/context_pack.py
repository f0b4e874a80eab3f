"""Pack evidence blocks into one text under a budget, so that an agent can cite them by number.

A block is its number, title, source, breadcrumb and hit reasons, then its content between two fences. The fence is
longer than any run of backticks in that content, so that no content can close it. When the budget runs out, content is
cut at a line end, never what is around it; a block of which less than a few lines would be left is omitted, as are all
after it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rag_pipeline.printable import printable
from rag_pipeline.retrieval.results import ContextPack, EvidenceBlock

CUT = "… (cut to fit the context budget)"
_LEAST_CONTENT = 24


def pack_context(
    blocks: Sequence[EvidenceBlock], *, budget: int, unit: str, count: Callable[[str], int] = len
) -> ContextPack:
    """Pack blocks in their order.

    Args:
        blocks: The evidence, best first.
        budget: Most units of the text.
        unit: What ``count`` counts, for the record: ``tokens`` or ``characters``.
        count: Units of a text; 0 for an empty one.

    Returns:
        The pack; its ``used`` is the sum over its blocks and at most ``budget``.
    """
    parts: list[str] = []
    included: list[dict[str, Any]] = []
    omitted: list[dict[str, Any]] = []
    used = 0
    for number, block in enumerate(blocks, 1):
        place = {"source": block.source, "title": block.title, "breadcrumb": block.breadcrumb_text}
        packed = None if omitted else _packed(number, block, room=budget - used, count=count, first=not parts)
        if packed is None:
            omitted.append(place)
            continue
        part, units, cut = packed
        used += units
        parts.append(part)
        included.append({"number": number, **place, "hit_reasons": block.hit_reasons, "truncated": cut})
    return ContextPack(
        text="".join(parts), budget=budget, unit=unit, used=used, included=tuple(included), omitted=tuple(omitted)
    )


def _packed(
    number: int, block: EvidenceBlock, *, room: int, count: Callable[[str], int], first: bool
) -> tuple[str, int, bool] | None:
    """A block's text, its units and whether its content was cut; ``None`` when too little of it would fit."""
    whole_content = printable(block.content)
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", whole_content)), default=0))
    head = f"{'' if first else chr(10)}{_header(number, block)}\n{fence}evidence {number}\n"
    tail = f"\n{fence}\n"
    whole = head + whole_content + tail
    if (units := count(whole)) <= room:
        return whole, units, False
    content = _first_lines(whole_content, room - count(head + tail), count)
    while content and count(head + content + tail) > room:  # tokens may join differently in the whole
        content = _first_lines(whole_content, count(content) - count("\n" + CUT) - 1, count)
    if not content or count(content) < min(_LEAST_CONTENT, count(whole_content)):
        return None
    part = head + content + tail
    return part, count(part), True


def _header(number: int, block: EvidenceBlock) -> str:
    facts = [("title", block.title), ("source", block.source), ("section", block.breadcrumb_text)]
    facts.append(("found by", "; ".join(block.hit_reasons)))
    return "\n".join([f"[{number}]", *(f"{name}: {_one_line(value)}" for name, value in facts if value)])


def _one_line(text: str) -> str:
    return " ".join(printable(text.replace("`", "'")).split())


def _first_lines(content: str, room: int, count: Callable[[str], int]) -> str:
    """As many whole lines as fit ``room`` units with the note that it was cut; blank when nothing does."""
    room -= count("\n" + CUT)
    if room <= 0:
        return ""
    lines = content.split("\n")
    kept = "\n".join(lines[: _most(len(lines), lambda n: count("\n".join(lines[:n])) <= room)]).rstrip()
    if not kept:  # a first line that alone is too long is cut within
        line = next((line for line in lines if line.strip()), "")
        kept = line[: _most(len(line), lambda n: count(line[:n]) <= room)].rstrip()
    return f"{kept}\n{CUT}" if kept else ""


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, where all smaller ones do; 0 when 1 does not."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
