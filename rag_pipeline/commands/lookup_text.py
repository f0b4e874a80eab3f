"""Lookups and their records for people (with colours on a terminal) and as JSON."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rag_pipeline.printable import printable

if TYPE_CHECKING:
    from rich.text import Text

    from rag_pipeline.invocations.records import Invocation
    from rag_pipeline.retrieval.results import LookupResult

_QUERY_CHARS = 60
_LEVEL_STYLES = {"highly_relevant": "green", "reference": "yellow", "low": "red", "none": "red"}


def show(text: "Text") -> None:
    """Print a text; colours only on a terminal, and not with ``NO_COLOR``."""
    from rich.console import Console

    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(file=sys.stdout, no_color=not coloured, force_terminal=coloured, highlight=False)
    if coloured:
        console.print(text, soft_wrap=True)
    else:
        print(text.plain)


def result_text(result: "LookupResult") -> "Text":
    """A lookup's answer: the message, the blocks as an agent cites them, and how they were found."""
    from rich.text import Text

    text = Text()
    text.append(f"{result.evidence_status}", style="bold")
    text.append(f"  {result.relevance_level}", style=_LEVEL_STYLES[result.relevance_level])
    text.append(f"  {result.completeness_hint}  {printable(result.message)}\n")
    for number, block in enumerate(result.evidence_blocks, 1):
        text.append(f"\n[{number}] {printable(block.breadcrumb_text or block.title)}\n", style="bold cyan")
        text.append(f"    {printable(block.source)}:{block.line_start}-{block.line_end}  ", style="dim")
        text.append(block.relevance_level, style=_LEVEL_STYLES[block.relevance_level])
        text.append(
            f"  evidence {block.evidence_score:.2f}  similarity {block.similarity:.2f}  "
            f"{block.score_label} {block.raw_score:.4f}\n",
            style="dim",
        )
        text.append(f"    {printable('; '.join(block.hit_reasons))}\n", style="dim")
        text.append("\n".join(f"    {line}" for line in printable(block.content).split("\n")) + "\n")
    trace = result.retrieval_trace
    pack = result.context_pack
    facts = [
        f"invocation {result.invocation_id}",
        f"layer {result.retrieval_layer}",
        f"path {trace['path'] or 'none'}",
        *([f"retried: {trace['fallback_reason']}"] if trace["fallback_reason"] else []),
        *([f"dropped: {result.dedup_reason}"] if result.dedup_reason else []),
        f"context {pack.used}/{pack.budget} {pack.unit}",
        f"{trace['duration_ms']['whole']:.0f} ms",
        f"version {trace['collection'] or 'none'}",
    ]
    text.append("\n" + printable("  ".join(facts)), style="dim")
    return text


def invocations_text(found: Sequence["Invocation"]) -> "Text":
    """One line a record."""
    from rich.text import Text

    if not found:
        return Text("no lookups recorded yet")
    text = Text()
    for number, item in enumerate(found):
        query = " ".join(str(item.input_params.get("query", "")).split())
        shown = query if len(query) <= _QUERY_CHARS else f"{query[:_QUERY_CHARS]}…"
        text.append("\n" if number else "")
        text.append(f"{item.id}", style="bold")
        text.append(f"  {item.created_at:%Y-%m-%d %H:%M:%S}  {item.evidence_status:<21}  ", style="dim")
        text.append(f"{item.relevance_level:<15}", style=_LEVEL_STYLES.get(item.relevance_level, ""))
        text.append(f"  {item.duration_ms:6.0f} ms  {printable(shown)}")
        if item.unreadable:
            text.append(f"  (unreadable: {', '.join(item.unreadable)})", style="bold red")
    return text


def invocation_text(item: "Invocation") -> "Text":
    """One record with its trace; what of it cannot be read is left out, and said."""
    try:
        return _invocation_text(item)
    except (AttributeError, KeyError, TypeError, ValueError):  # JSON, but not of this program
        odd = tuple(dict.fromkeys((*item.unreadable, "retrieval_details", "stage_ms")))
        return _invocation_text(replace(item, retrieval_details={}, stage_ms={}, unreadable=odd))


def _invocation_text(item: "Invocation") -> "Text":
    from rich.text import Text

    details = item.retrieval_details
    transform, trace = details.get("query_transform", {}), details.get("retrieval_trace", {})
    hints = transform.get("l0", {})
    text = Text()
    for name, value in (
        ("invocation", item.id),
        ("unreadable", f"{', '.join(item.unreadable)}: what is stored there cannot be read, and is left out"
         if item.unreadable else ""),
        ("time", f"{item.created_at:%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"),
        ("session", item.session_id or "none"),
        ("query", str(item.input_params.get("query", ""))),
        ("answer", f"{item.evidence_status}, {item.relevance_level}, {details.get('message', '')}"),
        ("layer", f"{item.retrieval_layer}: {item.l0_match_count} L0 matches, {item.l1_match_count} L1 candidates"),
        ("titles", "; ".join(hints.get("matched_titles", []))),
        ("keywords", "; ".join(hints.get("matched_keywords", []))),
        ("entities", "; ".join(hints.get("entities", []))),
        ("domains", "; ".join(hints.get("domains", []))),
        ("fallback", details.get("fallback_reason", "")),
        ("dropped", item.dedup_reason),
        ("unavailable", trace.get("unavailable", "")),
        ("version", f"{trace.get('collection', '')} ({item.index_fingerprint})" if item.index_fingerprint else ""),
        ("sidecar", _sidecar(details.get("sidecar", {}))),
        ("time spent", "  ".join(f"{name} {ms:.1f}" for name, ms in item.stage_ms.items())
         + f"  whole {item.duration_ms:.1f} ms"),
    ):  # fmt: skip
        if value:
            text.append(f"{name + ':':<12}", style="bold")
            text.append(f" {printable(str(value))}\n")
    for attempt in trace.get("attempts", []):
        category = f", category {attempt['category_filter']}" if attempt["category_filter"] else ""
        marked = " (selected)" if attempt["name"] == trace.get("selected_attempt") else ""
        paths = ", ".join(f"{trial['path']} {trial['outcome']}" + (f": {trial['reason']}" if trial["reason"] else "")
                          for trial in attempt["paths"])  # fmt: skip
        text.append(printable(f"\nattempt {attempt['name']}{category}{marked}; {paths}\n"), style="bold cyan")
        for candidate in attempt["candidates"]:
            text.append(
                printable(
                    f"  {candidate['evidence_score']:.2f}  similarity {candidate['similarity']:.2f}  "
                    f"{candidate['score_label']} {candidate['raw_score']:.4f}  {candidate['source']}  "
                    f"{' > '.join(candidate['breadcrumb'])}\n"
                )
            )
    text.append("\nrerank\n", style="bold cyan")
    for entry in details.get("rerank_trace", []):
        added = "  ".join(f"{rule} +{value:.3f}" for rule, value in entry["contributions"].items())
        place = f"  {entry['rank']}. {entry['final_score']:.3f} = {entry['base_similarity']:.3f}  {added}"
        text.append(printable(f"{place}  {entry['source']}\n"))
    return text


def _sidecar(status: dict[str, Any]) -> str:
    if status.get("status", "disabled") == "disabled":
        return ""
    return f"{status['status']} ({status.get('mode', '')}) {status.get('reason', '')}".rstrip()


def invocation_record(item: "Invocation", *, details: bool) -> dict[str, Any]:
    """A record as JSON; without details, those are left out."""
    found = {name: getattr(item, name) for name in type(item).__dataclass_fields__}
    found["created_at"] = item.created_at.isoformat(timespec="milliseconds")
    if not details:
        del found["retrieval_details"]
    return found
