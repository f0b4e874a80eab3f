"""Regular expressions from settings, by an engine whose time is linear in the text whatever the pattern (RE2)."""

import re
from collections.abc import Callable

# Of one pattern, in bytes: nested repetitions multiply.
_MEMORY = 8 * 2**20
# A search is linear, but a pattern may look at the whole rest of the text for each of many short matches.
_MOST_MATCHES = 1000
_ANY_BYTE = re.compile(r"(?<!\\)(?:\\\\)*\\C")


def compiled(pattern: str) -> Callable[[str, str], str]:
    r"""A function of a replacement and a text that gives the text with every match replaced.

    What follows the thousandth match is replaced with it. ``\d``, ``\w``, ``\s`` and ``\b`` know ASCII only.

    Args:
        pattern: In RE2's syntax, which has neither lookaround nor backreferences.

    Raises:
        ValueError: RE2 does not take the pattern; the message says why.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY
    try:
        found = re2.compile(pattern, options)
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else error
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else reason
        raise ValueError(
            f"{pattern!r} is no regular expression of RE2, which has no lookaround and no backreferences: {reason}"
        ) from None

    if _ANY_BYTE.search(pattern):
        raise ValueError(f"{pattern!r} takes characters apart by \\C; write (?s:.) for any character")
    if found.search(""):
        raise ValueError(f"{pattern!r} matches the empty text, which is everywhere")

    def replaced(new: str, text: str) -> str:
        parts: list[str] = []
        end = 0
        for number, match in enumerate(found.finditer(text), 1):
            if match.end() > match.start():
                parts += (text[end : match.start()], new)
                end = match.end()
            if number == _MOST_MATCHES:
                return "".join([*parts, new if end < len(text) else ""])
        return "".join([*parts, text[end:]])

    return replaced
