"""Take secrets out of what is recorded: well-known kinds, and patterns that the settings add."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.invocations.records import MAX_DEPTH, JsonValue, storable_text, storable_value
from rag_pipeline.linear_patterns import compiled

REDACTED = "[redacted]"
SESSION_ID_LENGTH = 255

_NAMES = (
    r"pass(?:word|wd|phrase)|pwd|secret|token|credentials?|api[_-]?key|access[_-]?key(?:[_-]?id)?|"
    r"secret[_-]?(?:access[_-]?)?key|private[_-]?key|account[_-]?key|密码|口令|密钥|令牌"
)
# Every pattern is linear: what repeats cannot overlap with what follows it, and whatever begins like a secret is one
# (an unclosed quote or key block reaches to the end), so that no start leads to a long search in vain.
_QUOTED = r'\\+"[^"]*(?:"|\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|' r"\\+'[^']*(?:'|\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z)"
_KEY_BLOCK = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
# Each with the texts, in lower case, one of which must occur for it to match: most texts hold none.
_BUILT_IN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (rf"-----BEGIN {_KEY_BLOCK}.*?(?:-----END {_KEY_BLOCK}|\Z)", REDACTED, ("private key",)),
    (
        r"""(?i)(authorization\\*["']?\s*[:=：]\s*\\*["']?)(?:[a-z][a-z0-9-]*[ \t]+)?[^\s"',;\\]+""",
        rf"\g<1>{REDACTED}",
        ("authorization",),
    ),
    (r"(?i)(?<![a-z0-9])(bearer[ \t]+)(?!auth|token)[a-z0-9._~+/-]{8,}=*", rf"\g<1>{REDACTED}", ("bearer",)),
    (
        rf"""(?is)((?:{_NAMES})\\*["'`]?\s*(?:[:：]=?|=>?)\s*)(?!\[redacted\])(?:{_QUOTED}|[^\s"',;&\\]+)""",
        rf"\g<1>{REDACTED}",
        ("pass", "pwd", "secret", "token", "credential", "key", "密码", "口令", "密钥", "令牌"),
    ),
    (r"(://)(?:[^\s/:?#]*:[^\s/]*|[^\s/?#]*)@", rf"\g<1>{REDACTED}@", ("://",)),
    (
        r"\b(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA)[A-Z0-9]{16}\b",
        REDACTED,
        ("akia", "asia", "abia", "acca", "agpa", "aida", "aroa"),
    ),
    (r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*){1,3}", REDACTED, ("eyj",)),
    (
        r"(?<![A-Za-z0-9_-])(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|"
        r"AIza[\w-]{35}|sk-[\w-]{20,})",
        REDACTED,
        ("gh", "glpat-", "xox", "aiza", "sk-"),
    ),
)
_SECRET_KEY = re.compile(rf"(?:{_NAMES}|authorization|(?:set-?)?cookie)\Z", re.IGNORECASE)
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LONGEST_CACHED = 256


class Redactor:
    """Replaces secrets by ``[redacted]``.

    Args:
        patterns: Regular expressions (RE2) beyond the built-in ones; the whole match is replaced.

    Raises:
        ConfigurationError: A pattern is no regular expression, or RE2 has no such thing.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._built_in = [(re.compile(pattern, re.S), new, hints) for pattern, new, hints in _BUILT_IN]
        try:
            self._configured = [compiled(pattern) for pattern in patterns]
        except ValueError as error:
            raise ConfigurationError(f"invocations.redact: {error}. Mend it in the settings.") from None
        # Titles, rule names and keys come again with every lookup.
        self._short = lru_cache(maxsize=4096)(self._redacted)

    def text(self, text: str) -> str:
        """``text`` without secrets; the time is linear in its length."""
        return self._short(text) if len(text) <= _LONGEST_CACHED else self._redacted(text)

    def value(self, value: object, *, depth: int = 0) -> JsonValue:
        """``value`` as JSON (see `records.storable_value`) without secrets, in keys and in values.

        The whole value of a key such as ``password`` is replaced, and so is ``value`` beside a ``name`` or ``key`` of
        that kind.
        """
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, int | float):
            return storable_value(value)
        if isinstance(value, dict | Mapping) and depth < MAX_DEPTH:
            return self.mapping(value, depth=depth)
        if isinstance(value, list | tuple | set | frozenset) and depth < MAX_DEPTH:
            return [self.value(item, depth=depth + 1) for item in value]
        plain = storable_value(value, depth=depth)
        return self.text(plain) if isinstance(plain, str) else plain

    def mapping(self, values: Mapping[Any, object], *, depth: int = 0) -> dict[str, JsonValue]:
        """See `value`."""
        beside = _names_secret(values.get("name")) or _names_secret(values.get("key"))
        cleaned: dict[str, JsonValue] = {}
        for key, item in values.items():
            name = key if isinstance(key, str) else str(key)
            hidden = _names_secret(name) or (beside and name == "value")
            cleaned[self.text(name)] = _hidden(item) if hidden else self.value(item, depth=depth + 1)
        return cleaned

    def session_id(self, session_id: str) -> str:
        """The form in which a session's id is stored: different ids stay different, and no secret is in it.

        An id that is short, storable and without secrets is kept but for blanks around it; of any other, its digest
        takes the place.
        """
        plain = session_id.strip()
        kept = len(plain) <= SESSION_ID_LENGTH and storable_text(plain) == plain and self.text(plain) == plain
        if kept:
            return plain
        return f"sha256:{hashlib.sha256(plain.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def _redacted(self, text: str) -> str:
        text = storable_text(text)
        lower = text.lower()
        for pattern, new, hints in self._built_in:
            if any(hint in lower for hint in hints):
                text = pattern.sub(new, text)
        for replaced in self._configured:
            text = replaced(REDACTED, text)
        return text


def _hidden(value: object) -> JsonValue:
    return value if value is None or isinstance(value, bool) or value == "" else REDACTED


def _names_secret(key: object) -> bool:
    return isinstance(key, str) and _is_secret_name(key)


@lru_cache(maxsize=4096)
def _is_secret_name(key: str) -> bool:
    return _SECRET_KEY.search(_WORD_BREAK.sub("_", key)[-64:]) is not None
