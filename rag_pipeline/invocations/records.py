"""What is recorded of one tool invocation, and the text form of it that a spool file holds."""

import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

ID_LENGTH = 32

JsonValue = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
_Kind = TypeVar("_Kind")

# MariaDB takes 40 levels of JSON; what is deeper than this becomes text.
MAX_DEPTH = 30
# PostgreSQL takes no NUL in a text, and no database a lone surrogate.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_ID = re.compile(r"[0-9a-f]{32}")
_LARGEST_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One call of a tool.

    Attributes:
        id: 32 hex digits, unique; later ones sort after earlier ones. See `new_invocation_id`.
        session_id: The caller's session; blank for none.
        tool_name: ``lookup_knowledge``.
        input_params: The arguments of the call.
        output_preview: Beginning of what was answered.
        retrieval_layer: ``L0+L1``, ``L1``, ``L0`` or ``none``.
        l0_match_count: L0 hints.
        l1_match_count: Candidates of L1.
        retrieval_details: Everything else worth knowing later, as JSON.
        relevance_level: ``highly_relevant``, ``reference``, ``low`` or ``none``.
        evidence_status: ``evidence``, ``already_provided``, ``no_evidence`` or ``retrieval_unavailable``.
        dedup_reason: Why blocks were left out, blank when none was.
        duration_ms: The whole call.
        stage_ms: Each stage by its name.
        success: False when the call failed.
        index_fingerprint: The version that answered; blank when none did.
        created_at: When the call began, in UTC, cut to milliseconds.
        unreadable: The fields whose stored value could not be read, and which are empty here; never stored.
    """

    id: str
    tool_name: str
    created_at: datetime
    session_id: str = ""
    input_params: dict[str, Any] = field(default_factory=dict)
    output_preview: str = ""
    retrieval_layer: str = "none"
    l0_match_count: int = 0
    l1_match_count: int = 0
    retrieval_details: dict[str, Any] = field(default_factory=dict)
    relevance_level: str = "none"
    evidence_status: str = ""
    dedup_reason: str = ""
    duration_ms: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=dict)
    success: bool = True
    index_fingerprint: str = ""
    unreadable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "created_at", utc_milliseconds(self.created_at))

    def to_json_line(self) -> str:
        """One line of ASCII, without the newline at its end; values that JSON does not know become text."""
        try:
            return self._dumped()
        except (ValueError, TypeError, RecursionError):  # not finite, a cycle, a key that is no text
            return self.storable()._dumped()

    @classmethod
    def from_json_line(cls, line: str | bytes) -> "Invocation":
        """The invocation of a line that `to_json_line` made; names of a later version are left out.

        Raises:
            ValueError: No JSON object, no valid id or time, or a field of the wrong kind.
        """
        try:
            values = json.loads(line)
        except RecursionError:
            raise ValueError("the line is nested too deeply") from None
        if not isinstance(values, dict) or not _ID.fullmatch(str(values.get("id", ""))):
            raise ValueError("the line holds no invocation")
        values["created_at"] = datetime.fromisoformat(_of_kind(str, values.get("created_at")))
        _of_kind(str, values.get("tool_name"))
        known = {name: value for name, value in values.items() if name in cls.__slots__ and name != "unreadable"}
        model = cls(id="", tool_name="", created_at=values["created_at"])
        for name, value in known.items():
            _of_kind(type(getattr(model, name)), value)
        return replace(model, **known)

    def _dumped(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "unreadable"}
        values["created_at"] = self.created_at.isoformat(timespec="milliseconds")
        return json.dumps(values, default=str, allow_nan=False)

    def storable(self) -> "Invocation":
        """This invocation with every value as it comes back from a database: see `storable_text`."""
        values: dict[str, Any] = {
            name: storable_value(getattr(self, name))
            for name in self.__slots__
            if name not in {"created_at", "unreadable"}
        }
        values["l0_match_count"] = _count(self.l0_match_count)
        values["l1_match_count"] = _count(self.l1_match_count)
        values["duration_ms"] = self.duration_ms if math.isfinite(self.duration_ms) else 0.0
        return replace(self, **values)


_AMENDS = b'{"amends":'


@dataclass(frozen=True, slots=True)
class Amendment:
    """What became known of an invocation after it was recorded.

    Attributes:
        id: Of the invocation.
        details: Replaces the values of the same names in its ``retrieval_details``, and adds the others.
    """

    id: str
    details: dict[str, Any]

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"{self.id!r:.100} is no id of an invocation")

    def to_json_line(self) -> str:
        """One line of ASCII that no invocation's begins like, without the newline at its end."""
        return json.dumps({"amends": self.id, "details": storable_value(self.details)}, allow_nan=False)

    @classmethod
    def from_json_line(cls, line: str | bytes) -> "Amendment":
        """The amendment of a line that `to_json_line` made.

        Raises:
            ValueError: The line is none.
        """
        try:
            values = json.loads(line)
        except RecursionError:
            raise ValueError("the line is nested too deeply") from None
        if not isinstance(values, dict):
            raise ValueError("the line holds no amendment")
        return cls(_of_kind(str, values.get("amends")), _of_kind(dict, values.get("details")))

    def amended(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """``retrieval_details`` with this amendment; amending twice changes nothing more."""
        return {**details, **self.details}


def spooled(line: bytes) -> Invocation | Amendment:
    """What a line of the spool holds.

    Raises:
        ValueError: Neither an invocation nor an amendment.
    """
    return Amendment.from_json_line(line) if line.startswith(_AMENDS) else Invocation.from_json_line(line)


def new_invocation_id() -> str:
    """A new id: a UUID of version 7 in hex; ids made one after the other sort in that order, to about 250 ns."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = (rest << 12) // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | secrets.randbits(62)
    return f"{value:032x}"


def utc_milliseconds(moment: datetime) -> datetime:
    """``moment`` in UTC, cut to milliseconds; one without a time zone is taken for UTC."""
    if moment.tzinfo is not UTC:
        try:
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except OverflowError:
            raise ValueError(f"{moment} is no time that UTC can tell") from None
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def storable_text(text: str) -> str:
    """``text`` with U+FFFD in place of what a database refuses: NUL and lone surrogates."""
    return _UNSTORABLE.sub("\ufffd", text)


def storable_value(value: object, *, depth: int = 0) -> JsonValue:
    """``value`` as JSON that every database takes.

    Texts are storable, keys are texts, numbers that are not finite become ``None``, tuples and sets become lists, and
    anything else, or anything deeper than 30 levels, becomes text.
    """
    if isinstance(value, str):
        return storable_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= MAX_DEPTH:
        return "(nested too deeply to be recorded)"
    if isinstance(value, Mapping):
        return {storable_text(str(key)): storable_value(item, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [storable_value(item, depth=depth + 1) for item in value]
    return storable_text(str(value))


def _of_kind(kind: type[_Kind], value: object) -> _Kind:
    number = kind is float and isinstance(value, int)
    if (not isinstance(value, kind) and not number) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r:.100} is no {kind.__name__}")
    return value  # type: ignore[return-value]


def _count(value: int) -> int:
    return max(-_LARGEST_COUNT, min(_LARGEST_COUNT, value))
