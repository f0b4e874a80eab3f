"""Invocations as values and as lines."""

import itertools
import json
import math
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_pipeline.invocations.records import Invocation, new_invocation_id, storable_text, storable_value
from rag_pipeline_tests.invocations.samples import START, invocation

TEXTS = st.text(st.characters(codec=None, exclude_categories=()))  # lone surrogates and NUL, too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def test_ids_are_uuids_of_version_7_that_sort_by_time_and_never_repeat() -> None:
    ids = [new_invocation_id() for _ in range(5000)]
    assert len(set(ids)) == 5000
    assert ids == sorted(ids) or sum(a > b for a, b in itertools.pairwise(ids)) < 50  # within 250 ns
    assert {uuid.UUID(value).version for value in ids} == {7}
    assert {len(value) for value in ids} == {32}
    made = datetime.fromtimestamp(int(ids[0][:12], 16) / 1000, UTC)
    assert abs(datetime.now(UTC) - made) < timedelta(minutes=5)


def test_ids_of_two_processes_differ_after_a_fork() -> None:
    script = (
        "import os\nfrom rag_pipeline.invocations.records import new_invocation_id as new\n"
        "new()\npid = os.fork()\nos.write(1, (new()[12:] + chr(10)).encode())\npid and os.wait()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first != second


def test_a_time_is_cut_to_milliseconds_in_utc() -> None:
    elsewhere = datetime(2026, 1, 1, 8, 0, 0, 987_654, tzinfo=timezone(timedelta(hours=8)))
    assert invocation(created_at=elsewhere).created_at == datetime(2026, 1, 1, 0, 0, 0, 987_000, tzinfo=UTC)
    assert invocation(created_at=datetime(2026, 1, 1)).created_at.tzinfo is UTC


@given(TEXTS, JSON)
def test_a_line_gives_back_what_went_into_it(text: str, value: object) -> None:
    before = invocation(session_id=text, output_preview=text, retrieval_details={"any": value}, input_params={text: 1})
    line = before.to_json_line()
    assert line.isascii()
    assert "\n" not in line
    assert Invocation.from_json_line(line.encode()) == before


def test_what_json_does_not_know_becomes_storable_in_a_line() -> None:
    odd = invocation(
        retrieval_details={"nan": math.nan, "set": {1}, "when": START, 5: (1, 2)},
        duration_ms=math.inf,
        l0_match_count=7,
    )
    read = Invocation.from_json_line(odd.to_json_line())
    assert read.retrieval_details == {"nan": None, "set": [1], "when": str(START), "5": [1, 2]}
    assert read.duration_ms == 0.0
    assert read.l0_match_count == 7


def test_a_cycle_and_a_deep_nest_become_text() -> None:
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    deep: object = "bottom"
    for _ in range(100_000):
        deep = [deep]
    read = Invocation.from_json_line(invocation(retrieval_details={"cycle": cycle, "deep": deep}).to_json_line())
    assert "nested too deeply" in json.dumps(read.retrieval_details["cycle"])
    assert "nested too deeply" in json.dumps(read.retrieval_details["deep"])


def test_names_of_a_later_version_are_left_out_and_missing_ones_take_their_default() -> None:
    values = json.loads(invocation().to_json_line())
    values["from_the_future"] = [1]
    del values["dedup_reason"], values["stage_ms"]
    read = Invocation.from_json_line(json.dumps(values))
    assert (read.dedup_reason, read.stage_ms, read.l1_match_count) == ("", {}, 30)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "short"},
        {"id": "X" * 32},
        {"id": None},
        {"created_at": "yesterday"},
        {"created_at": None},
        {"created_at": "0001-01-01T00:00:00+14:00"},
        {"tool_name": 5},
        {"l0_match_count": "3"},
        {"l0_match_count": True},
        {"success": 1},
        {"stage_ms": []},
        {"duration_ms": None},
    ],
    ids=str,
)
def test_a_line_of_the_wrong_kind_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (any message)
        Invocation.from_json_line(json.dumps({**json.loads(invocation().to_json_line()), **change}))


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"null", b'{"id": ', b"\xff\xfe", b"[" * 100_000], ids=lambda line: line[:9]
)
def test_what_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Invocation.from_json_line(line)


@given(TEXTS)
def test_storable_text_is_utf8_without_nul_and_otherwise_the_same(text: str) -> None:
    stored = storable_text(text)
    assert "\x00" not in stored
    stored.encode()
    assert len(stored) == len(text)
    assert all(a == b or b == "\ufffd" for a, b in zip(text, stored, strict=True))


def test_storable_values_have_text_keys_and_finite_numbers() -> None:
    assert storable_value({1: (math.inf, b"x"), "a\x00": True}) == {"1": [None, "b'x'"], "a\ufffd": True}
