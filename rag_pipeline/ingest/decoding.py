"""Turn the raw bytes of a Markdown file into text, or say why that cannot be done with confidence."""

import codecs
from dataclasses import dataclass

from charset_normalizer import from_bytes

_BOMS = (
    # UTF-32 first: its little-endian mark begins with that of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CANDIDATES = ["gb18030", "big5", "cp932", "euc_kr", "cp1252", "cp1251"]
_MAX_BAD_SHARE = 0.01
_MAX_CONTROL_SHARE = 0.3
_MAX_CHAOS = 0.1
_CHAOS_TIE = 0.02
_DETECTOR_BYTES = 256 * 1024
_PRINTABLE_CONTROLS = b"\t\n\x0b\x0c\r\x1b\x1c\x1d\x1e\x1f\x85"
_CONTROLS = bytes(sorted(set(range(32)) - set(_PRINTABLE_CONTROLS)))


@dataclass(frozen=True, slots=True)
class Decoded:
    """The text of a file.

    Attributes:
        text: Byte order mark removed, newlines are LF, NUL is U+FFFD.
        encoding: Python codec name.
        warning: What a person should mend, blank when all is well.
        line: 1-based line of the first doubtful byte, 0 without a warning.
    """

    text: str
    encoding: str
    warning: str = ""
    line: int = 0


def normalise_newlines(text: str) -> str:
    """Make CRLF and lone CR to LF and NUL to U+FFFD; no other character is a line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "\ufffd")


def decode(raw: bytes) -> Decoded | str:
    """Decode ``raw``: a mark, else UTF-8, else UTF-8 with isolated bad bytes, else a detected encoding.

    Returns:
        The decoded text, or the reason (a full sentence) why no encoding fits with confidence.
    """
    for mark, encoding in _BOMS:
        if raw.startswith(mark):
            return _decode_marked(raw, encoding)
    if sum(map(raw.count, _controls())) > _MAX_CONTROL_SHARE * len(raw):
        return (
            "The file looks binary, or like UTF-16 without a byte order mark: more than "
            f"{_MAX_CONTROL_SHARE:.0%} of its bytes are control characters. Save it as UTF-8 or remove it."
        )
    try:
        return Decoded(normalise_newlines(raw.decode("utf-8")), "utf-8")
    except UnicodeDecodeError as error:
        line = _line_of(raw, error.start)
    damaged = raw.decode("utf-8", errors="replace")
    bad = damaged.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
    if bad <= max(1, int(_MAX_BAD_SHARE * len(raw))):
        return Decoded(
            normalise_newlines(damaged),
            "utf-8",
            f"{bad} byte sequence(s) are not valid UTF-8 and were replaced by U+FFFD; save the file as UTF-8.",
            line,
        )
    return _decode_detected(raw, line)


def _controls() -> list[bytes]:
    return [bytes([value]) for value in _CONTROLS]


def _line_of(raw: bytes, position: int) -> int:
    before = raw[:position]
    return before.count(b"\n") + before.count(b"\r") - before.count(b"\r\n") + 1


def _decode_marked(raw: bytes, encoding: str) -> Decoded | str:
    try:
        return Decoded(normalise_newlines(raw.decode(encoding)), encoding)
    except UnicodeDecodeError as error:
        line = error.start and _line_of(raw, error.start)
    damaged = raw.decode(encoding, errors="replace")
    bad = damaged.count("\ufffd")
    if bad > max(1, int(_MAX_BAD_SHARE * len(raw))):
        return (
            f"The file begins with the byte order mark of {encoding}, but {bad} places are not valid {encoding}. "
            "Save it as UTF-8."
        )
    return Decoded(
        normalise_newlines(damaged),
        encoding,
        f"{bad} byte sequence(s) are not valid {encoding} and were replaced by U+FFFD; save the file as UTF-8.",
        line,
    )


def _decode_detected(raw: bytes, line: int) -> Decoded | str:
    """Ask the detector; GB18030 wins a tie, since Chinese operations teams use it most."""
    sample = raw if len(raw) <= _DETECTOR_BYTES else raw[: raw.rfind(b"\n", 0, _DETECTOR_BYTES) + 1 or _DETECTOR_BYTES]
    matches = [match for match in from_bytes(sample, cp_isolation=_CANDIDATES) if match.chaos <= _MAX_CHAOS]
    if matches:
        least = min(match.chaos for match in matches)
        tied = [match.encoding for match in matches if match.chaos <= least + _CHAOS_TIE]
        encoding = min(tied, key=_CANDIDATES.index)
        try:
            text = normalise_newlines(raw.decode(encoding))
        except UnicodeDecodeError:
            text = ""
        if text and encoding in ("cp1252", "cp1251"):
            return Decoded(
                text,
                encoding,
                f"The file is not UTF-8 and was read as {encoding}, which is a guess; save it as UTF-8.",
                line,
            )
        if text:
            return Decoded(text, encoding)
    return f"The file is not UTF-8 (first bad byte in line {line}) and no other encoding fits. Save it as UTF-8."
