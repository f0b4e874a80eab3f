"""Patterns of the settings: what they replace, what is refused, and that none takes long."""

import re
import time

import pytest

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.linear_patterns import compiled
from rag_pipeline.settings import load_settings


@pytest.mark.parametrize(
    ("pattern", "text", "left"),
    [
        (r"EMP-\d+", "ask EMP-4711 or EMP-1", "ask [r] or [r]"),
        ("内部.{2}", "关于 内部代号😀，内部", "关于 [r]😀，内部"),
        ("(?i)acme", "Acme ACME", "[r] [r]"),
        ("z", "", ""),
    ],
)
def test_each_match_is_replaced(pattern: str, text: str, left: str) -> None:
    assert compiled(pattern)("[r]", text) == left


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(unclosed", r"missing \)"),
        ("(?<=a)b", r"lookaround.*invalid perl operator: \(\?<="),
        ("(?!x)y", r"invalid perl operator: \(\?!"),
        (r"(a)\1", r"invalid escape sequence: \\1"),
        ("((a{100}){100}){100}", "re"),
        ("x*", "matches the empty text"),
        (r"a\C", r"by \\C"),
        ("\ud800", "utf-8"),
    ],
)
def test_what_the_engine_lacks_is_refused_with_the_reason_when_settings_are_read(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compiled(pattern)
    with pytest.raises(ConfigurationError, match=r"invocations\.redact") as caught:
        load_settings(flags={"invocations.redact": [pattern]})
    assert re.search(reason, str(caught.value))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*a){20}b", "a.*z|a", r"\S+@\S+", "(a?){50}a{50}", r"\b|a"])
def test_no_pattern_takes_long(pattern: str) -> None:
    """Python's own engine takes from seconds to centuries for these."""
    replaced = compiled(pattern) if pattern != "(a?){50}a{50}" else compiled("(?:a?){50}a{50}")
    for text in ("a" * 100_000 + "!", "a " * 50_000):
        begin = time.process_time()
        replaced("[r]", text)
        assert time.process_time() - begin < 5


def test_after_a_thousand_matches_the_rest_is_replaced_with_the_last() -> None:
    assert compiled("a")("[r]", "ab" * 2000) == "[r]b" * 999 + "[r]" * 2
    assert compiled("a")("[r]", "ab" * 999) == "[r]b" * 999
