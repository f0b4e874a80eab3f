"""Take secrets out of what is recorded: well-known kinds, and patterns that the settings add."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.invocations.records import MAX_DEPTH, JsonValue, storable_text, storable_value
from rag_pipeline.invocations.secret_patterns import BUILT_IN, REDACTED, SECRET_KEY, plain_view
from rag_pipeline.linear_patterns import compiled

SESSION_ID_LENGTH = 255

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
        beside = any(_names_secret(values.get(name)) for name in ("name", "key", "Name", "Key"))
        cleaned: dict[str, JsonValue] = {}
        for key, item in values.items():
            name = key if isinstance(key, str) else str(key)
            hidden = _names_secret(name) or (beside and name in ("value", "Value"))
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
        text = self._without_secrets(storable_text(text))
        view = plain_view(text)
        # Only where that shows a secret: it is not quite what was written.
        return text if view == text or (seen := self._without_secrets(view)) == view else seen

    def _without_secrets(self, text: str) -> str:
        lower = text.lower()
        for kind in BUILT_IN:
            text = kind.replaced(text, lower=lower)
        for replaced in self._configured:
            text = replaced(REDACTED, text)
        return text


def _hidden(value: object) -> JsonValue:
    return value if value is None or isinstance(value, bool) or value == "" else REDACTED


def _names_secret(key: object) -> bool:
    return isinstance(key, str) and _is_secret_name(key)


@lru_cache(maxsize=4096)
def _is_secret_name(key: str) -> bool:
    return SECRET_KEY.search(_WORD_BREAK.sub("_", plain_view(key))[-64:]) is not None
