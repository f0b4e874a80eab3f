"""Pack evidence blocks into one text under a budget, so that an agent can cite them by number.

A block is its number, title, source, breadcrumb and hit reasons, then its content between two fences. The fence is
longer than any run of backticks in that content, so that no content can close it. When the budget runs out, content is
cut at a line end, never what is around it; a block of which less than a few lines would be left is omitted, as are all
after it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

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
        The pack; its ``used`` is at most ``budget``.
    """
    pack = _pack(blocks, budget, count)
    room = budget
    while count(pack[0]) > budget:  # a tokenizer may see more in the whole than in its parts
        room = max(0, room - max(1, count(pack[0]) - budget))
        pack = _pack(blocks, room, count)
    text, included, omitted = pack
    return ContextPack(
        text=text, budget=budget, unit=unit, used=count(text) if text else 0,
        included=tuple(included), omitted=tuple(omitted),
    )  # fmt: skip


_Packed = tuple[str, list[dict[str, Any]], list[dict[str, Any]]]


def _pack(blocks: Sequence[EvidenceBlock], budget: int, count: Callable[[str], int]) -> _Packed:
    parts: list[str] = []
    included: list[dict[str, Any]] = []
    omitted: list[dict[str, Any]] = []
    used = 0
    for number, block in enumerate(blocks, 1):
        place = {"source": block.source, "title": block.title, "breadcrumb": block.breadcrumb_text}
        if omitted:
            omitted.append(place)
            continue
        fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", block.content)), default=0))
        head = f"{_header(number, block)}\n{fence}evidence {number}\n"
        tail = f"\n{fence}\n"
        separator = "\n" if parts else ""
        frame = count(separator + head + tail)
        room = budget - used - frame
        content, cut = _fitted(block.content, room, count)
        if not content or (cut and count(content) < min(_LEAST_CONTENT, count(block.content))):
            omitted.append(place)
            continue
        part = separator + head + content + tail
        used += count(part)
        parts.append(part)
        included.append({"number": number, **place, "hit_reasons": block.hit_reasons, "truncated": cut})
    return "".join(parts), included, omitted


def _header(number: int, block: EvidenceBlock) -> str:
    facts = [("title", block.title), ("source", block.source), ("section", block.breadcrumb_text)]
    facts.append(("found by", "; ".join(block.hit_reasons)))
    return "\n".join([f"[{number}]", *(f"{name}: {_one_line(value)}" for name, value in facts if value)])


def _one_line(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _fitted(content: str, room: int, count: Callable[[str], int]) -> tuple[str, bool]:
    """As many whole lines of ``content`` as fit ``room`` units, and whether any is missing."""
    if count(content) <= room:
        return content, False
    room -= count("\n" + CUT)
    if room <= 0:
        return "", True
    lines = content.split("\n")
    low, high = 0, len(lines)  # the first `low` lines fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count("\n".join(lines[:middle])) <= room else (low, middle)
    kept = "\n".join(lines[:low]).rstrip()
    if not kept:  # a first line that alone is too long is cut within
        line, low, high = lines[0], 0, len(lines[0])
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if count(line[:middle]) <= room else (low, middle)
        kept = line[:low].rstrip()
    return (f"{kept}\n{CUT}" if kept else ""), True
