"""The time limit of a lookup, and calls that do not keep to it."""

import contextvars
import threading
import time

import pytest

from rag_pipeline.errors import StoreUnavailableError
from rag_pipeline.retrieval.deadline import Deadline, call_within


def test_a_call_in_time_gives_its_value_in_the_caller_s_context() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    assert call_within(10.0, "The store", variable.get) == "set"


def test_an_error_of_the_call_is_the_caller_s() -> None:
    def fail() -> None:
        raise ZeroDivisionError("of the call")

    with pytest.raises(ZeroDivisionError, match="of the call"):
        call_within(10.0, "The store", fail)


def test_a_call_that_hangs_is_left_behind() -> None:
    let_go = threading.Event()
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=r"The store has not answered within 0\.1 s"):
        call_within(0.1, "The store", lambda: let_go.wait(60))
    assert time.monotonic() - started < 30
    let_go.set()


def test_what_a_model_takes_to_load_is_left_out() -> None:
    deadline = Deadline(0.0)
    assert deadline.passed
    deadline.extend(60.0)
    assert not deadline.passed
    assert 50 < deadline.left() <= 60
