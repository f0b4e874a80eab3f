"""From what the agent asks to what is searched for: a clean text, its L0 hints, the recommended query of an alert.

The recommended query is ``alertName (service, severity): description userRequest timeRange``. This order and wording
was chosen on 277 alerts of public runbook collections (MRR@10 of dense retrieval, three sets): the severity beside the
service gains .01, a time range costs up to .04, and a request such as "how do I fix it?" up to .17, for it draws every
query to the same sections. So the recommended query has both, since agents read it, and what is embedded has neither:
no time range, and of requests only those that say more than "please help".
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.ingest.terms import normalise
from rag_pipeline.records import Hints
from rag_pipeline.retrieval.l0_hints import HintMatcher

MAX_RECOMMENDED_CHARS = 1000
MAX_NAME_CHARS = 200
MAX_FIELD_CHARS = 400
MAX_PAYLOAD_CHARS = 8000

_FIELDS = {
    "alert_name": ("alertName", "alert_name"),
    "service": ("service",),
    "severity": ("severity",),
    "description": ("description",),
    "time_range": ("timeRange", "time_range"),
    "user_request": ("userRequest", "user_request"),
}
_EXPECTED = (
    "An alert payload is a mapping with at least one of alertName, service, description, summary and userRequest "
    "(severity and timeRange may be added), such as "
    '{"alertName": "RedisEvictionsHigh", "service": "redis-cart", "description": "evicted keys above 100/s"}.'
)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_SENTENCES = re.compile(r"(?<=[.!?])\s+|(?<=[。！？；])\s*|\n+")
# A request of nothing but these words says no more than that there is an alert.
_PLEASE_HELP = re.compile(
    r"\b(?:how|do|does|did|i|we|you|to|fix|resolve|solve|handle|it|this|that|the|an?|is|are|was|what|why|should|can|"
    r"could|would|please|help|me|us|my|our|investigate|diagnose|troubleshoot|check|look|into|root|causes?|of|and|or|"
    r"alerts?|issue|problem|incident|happen(?:s|ed|ing)?|wrong|next|steps?|with|analy[sz]e|for|on|in|at|be|done|need|"
    r"want|find|out|give|tell|show|about|mitigat(?:e|ion)|remediat(?:e|ion)|runbook|now|asap|quickly)\b|"
    r"请|帮我|帮忙|一下|怎么|如何|怎样|怎|处理|排查|解决|分析|原因|根因|定位|查看|看看|检查|为什么|为何|什么|是|这个|这条|该|"
    r"告警|报警|问题|故障|应该|需要|我们|我|下一步|步骤|方法|方案|建议|给出|给|并|和|的|了|吗|呢|办|吧|查|看|诊断|恢复|修复|尽快|立即|谢谢"
)


@dataclass(frozen=True, slots=True)
class AlertPayload:
    """What an AIOps alert says of itself; blank where it says nothing.

    Attributes:
        description: The payload's summary and description, without what repeats.
    """

    alert_name: str = ""
    service: str = ""
    severity: str = ""
    description: str = ""
    time_range: str = ""
    user_request: str = ""

    @classmethod
    def parse(cls, payload: object) -> Self:
        """Reads a payload as it comes.

        Args:
            payload: A mapping with ``alertName``, ``service``, ``severity``, ``description``, ``summary``,
                ``timeRange`` (text, or a mapping with ``start`` and ``end``) and ``userRequest``, or their snake_case
                names; camelCase wins. Numbers and truth values become text, ``None`` counts as left out, other keys are
                ignored.

        Raises:
            ConfigurationError: Not a mapping, a field of a wrong type, or nothing that could be searched for.
        """
        if not isinstance(payload, Mapping):
            raise ConfigurationError(f"The alert payload is of type {type(payload).__name__}. {_EXPECTED}")
        values = {
            name: next((text for key in keys if (text := _text(key, payload.get(key)))), "")
            for name, keys in _FIELDS.items()
        }
        values["description"] = _merged(_text("summary", payload.get("summary")), values["description"])
        if not any(values[name] for name in ("alert_name", "service", "description", "user_request")):
            raise ConfigurationError(f"The alert payload has no field to search for. {_EXPECTED}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class TransformedQuery:
    """A query, ready to be searched for.

    Attributes:
        raw: As it was given.
        text: What is embedded: trimmed, without control characters and lone surrogates, of at most the allowed length.
        truncated: Whether something was cut off.
        matching: `normalise`d ``text``: what L0 was matched on.
        variants: Other texts worth searching for; empty unless asked for.
        payload: The alert that the query was built from.
    """

    raw: str
    text: str
    truncated: bool
    matching: str
    hints: Hints = field(default_factory=Hints)
    variants: tuple[str, ...] = ()
    payload: AlertPayload | None = None

    def trace(self) -> dict[str, object]:
        """What ``retrieval_details.query_transform`` keeps; ready for JSON."""
        return {
            "query": self.text,
            "truncated": self.truncated,
            "l0": {
                "matched_titles": list(self.hints.titles),
                "matched_keywords": list(self.hints.keywords),
                "domains": list(self.hints.domains),
                "entities": list(self.hints.entities),
            },
            "variants": list(self.variants),
        }


def build_knowledge_retrieval_query(payload: AlertPayload | Mapping[str, object]) -> str:
    """The recommended query for an alert, see the module's first lines.

    Equal payloads give equal text of at most `MAX_RECOMMENDED_CHARS` characters. The description is cut first;
    alert name and service (each up to `MAX_NAME_CHARS`) always stay, and stand first. A sentence that an earlier field
    has already is left out.

    Raises:
        ConfigurationError: See `AlertPayload.parse`.
    """
    alert = payload if isinstance(payload, AlertPayload) else AlertPayload.parse(payload)
    return _recommended(alert, [alert.user_request, alert.time_range])


def transform(
    query: str,
    *,
    matcher: HintMatcher | None,
    max_chars: int,
    variants: bool = False,
    payload: AlertPayload | None = None,
) -> TransformedQuery:
    """Makes a query ready to be searched for.

    Args:
        query: Any text.
        matcher: Finds the L0 hints; without one there are none.
        max_chars: Length of the embedded text at most.
        variants: Whether to add the L0 terms alone as a second text, where there are some and they say something else.
        payload: The alert that ``query`` was built from. If the query is exactly the recommended one, the embedded text
            leaves out what does not help to find anything.
    """
    asked = query
    if payload is not None and query == build_knowledge_retrieval_query(payload):
        asked = _recommended(payload, [_specific(payload.user_request)])
    text, truncated = _clean(asked, max_chars=max_chars)
    matching = normalise(text)
    hints = matcher.match_normalised(matching) if matcher else Hints()
    found = " ".join({match.term: match.surface for match in hints.matches}.values()) if variants else ""
    return TransformedQuery(
        raw=query,
        text=text,
        truncated=truncated,
        matching=matching,
        hints=hints,
        variants=(found,) if found and normalise(found) != matching else (),
        payload=payload,
    )


def _clean(text: str, *, max_chars: int) -> tuple[str, bool]:
    # Half a surrogate pair is no text that a tokenizer or a store takes.
    text = _CONTROLS.sub(" ", text.encode("utf-8", "replace").decode()).strip()
    return text[:max_chars].rstrip(), len(text) > max_chars


def _text(key: str, value: object) -> str:
    if value is None:
        return ""
    if key in _FIELDS["time_range"] and isinstance(value, Mapping):
        ends = [_text(f"{key}.{end}", value.get(end)) for end in ("start", "end")]
        return " - ".join(end for end in ends if end)
    if not isinstance(value, str | int | float):
        raise ConfigurationError(
            f"The alert payload's {key!r} is of type {type(value).__name__}, not text. {_EXPECTED}"
        )
    return _clean(str(value), max_chars=100_000)[0]


def _recommended(alert: AlertPayload, ending: Iterable[str]) -> str:
    name, service = (_clean(part, max_chars=MAX_NAME_CHARS)[0] for part in (alert.alert_name, alert.service))
    severity = _clean(alert.severity, max_chars=MAX_NAME_CHARS)[0]
    first = name or service
    beside = ", ".join(part for part in (service if name else "", severity) if part and part != first)
    head = f"{first} ({beside})" if first and beside else first or beside
    said = _Said((name, service))
    description = said.new(alert.description)
    tail = " ".join(text for part in ending if (text := said.new(part)[:MAX_FIELD_CHARS].strip()))
    room = MAX_RECOMMENDED_CHARS - len(head) - 2
    tail = tail[:room].strip()
    description = description[: max(0, room - len(tail) - 1)].strip()
    body = " ".join(part for part in (description, tail) if part)
    return f"{head}: {body}" if head and body else head or body


class _Said:
    """Sentences that stand already."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._said = {_bare(text) for text in texts}

    def new(self, text: str) -> str:
        """The text without the sentences that stand already."""
        found = []
        for sentence in _sentences(text):
            if (bare := _bare(sentence)) not in self._said:
                self._said.add(bare)
                found.append(sentence)
        return " ".join(found)


def _merged(summary: str, description: str) -> str:
    """The summary's sentences that the description has not, then the description, each sentence once."""
    whole = normalise(description)
    kept = [sentence for sentence in _sentences(summary) if _bare(sentence) not in whole]
    return _Said(()).new("\n".join([*kept, description]))


def _sentences(text: str) -> list[str]:
    return [clean for part in _SENTENCES.split(text) if (clean := _clean(part, max_chars=len(part))[0])]


def _bare(text: str) -> str:
    return normalise(text).strip(" .:;,!?。：；，！？")


def _specific(request: str) -> str:
    return request if re.search(r"\w", _PLEASE_HELP.sub(" ", normalise(request))) else ""
