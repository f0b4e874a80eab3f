"""Text that a terminal or a prompt can be given: without the characters that act instead of being read."""

import re

# Controls but tab and newline, halves of surrogate pairs, other line ends, and what turns the direction of writing.
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` with U+FFFD for each character that a terminal would obey; newlines and tabs stay."""
    return _ACTING.sub("\N{REPLACEMENT CHARACTER}", text)
