"""One connection to Milvus: a call has one time limit, a lost connection is made anew, every failure has a type.

What a server says of itself differs between Milvus Lite (mostly texts) and servers (mostly numbers), so both are read.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any

from rag_pipeline.errors import ConfigurationError, StoreUnavailableError, UnavailableError
from rag_pipeline.index import lite_server
from rag_pipeline.setting_groups import MilvusSettings

_ATTEMPTS = 3
_NOT_READY_PAUSE_S = 0.2
# pymilvus pings every 10 s; Milvus Lite's server takes that for abuse and hangs up. A Unix socket needs no pings.
_NO_KEEPALIVE = {"grpc.keepalive_time_ms": 2**31 - 1, "grpc.keepalive_permit_without_calls": 0}

_NOT_LOADED_CODES = {101, 201, 601}
# Limits reached; loading; replica, channel, segment or node lacking, as in the seconds after a start or a freeze.
_NOT_READY_CODES = {2, 3, 4, 7, 8, 9, 103, 202, 400, 401, 500, 501, 502, 503, 600, 602, 900, 901, 902, 903, 904}
_ALIAS_NOT_FOUND = 1600
_LOST_TEXTS = ("fail connecting", "server unavailable", "statuscode.unavailable", "should create connection",
               "closed channel", "channel closed", "retry run out")  # fmt: skip
_TIMEOUT_TEXTS = ("wait for loading", "wait for flush", " timeout in ")
_NOT_LOADED_TEXTS = ("not loaded", "is in state 'released'")
_NOT_READY_TEXTS = ("not fully loaded", "not ready", "not healthy", "is initializing", "shard leader", "not available")


class StoreCallError(UnavailableError):
    """The store works and refuses this call: no such collection, vectors of another dimension, a value too long.

    Attributes:
        no_such_alias: Whether that was the reason.
    """

    def __init__(self, message: str, *, no_such_alias: bool = False) -> None:
        super().__init__(message)
        self.no_such_alias = no_such_alias


class _Kind(Enum):
    TIMEOUT = auto()
    LOST = auto()
    NOT_LOADED = auto()
    NOT_READY = auto()
    DENIED = auto()
    REFUSED = auto()


class MilvusConnection:
    """A client of one Milvus, made at the first call and after each loss; safe to use from many threads.

    Args:
        settings: Where it is, and the limits.
        lite_folder: Where Milvus Lite lives when no URI is set.
    """

    def __init__(self, settings: MilvusSettings, *, lite_folder: Path) -> None:
        self.settings = settings
        self._lite_folder = lite_folder
        self._client: Any = None
        self._connecting = threading.Lock()
        self._swapping = threading.Lock()
        self._failed_at = float("-inf")
        self._failure: Exception | None = None

    @property
    def is_lite(self) -> bool:
        """Whether this is the project's own Milvus Lite."""
        return not self.settings.uri

    @property
    def description(self) -> str:
        """What to call the store in a message."""
        return f"Milvus Lite in {self._lite_folder}" if self.is_lite else f"Milvus at {self._shown_uri}"

    @property
    def identity(self) -> str:
        """The same text for the same store, also from another process."""
        if self.is_lite:
            return f"lite:{socket.gethostname()}:{self._lite_folder}"
        return f"{self._shown_uri}/{self.settings.database}"

    @property
    def _shown_uri(self) -> str:
        """The address without user and password."""
        scheme, mark, rest = self.settings.uri.partition("://")
        return f"{scheme}{mark}{rest.rpartition('@')[2]}"

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._forget(self._client)

    def call(self, verb: str, *arguments: object, limit_s: float | None = None, **options: object) -> Any:
        """One call of `pymilvus.MilvusClient`, tried again while there is time when that may help.

        Args:
            verb: The client's method.
            arguments: The first one is the collection, where the method takes one.
            limit_s: For all tries together; ``None`` takes the settings' read limit. The time that making a
                connection takes is not counted when it succeeds (Milvus Lite's server may have to be started).

        Raises:
            StoreUnavailableError: No connection, no answer in time, or a server that is not ready.
            StoreCallError: The store refuses.
        """
        import grpc
        from pymilvus.exceptions import MilvusException

        deadline = time.monotonic() + (limit_s or self.settings.timeout_s)
        failure: Exception | None = None
        for _ in range(_ATTEMPTS):
            client: Any = None
            try:
                asked = time.monotonic()
                client = self._connected()
                deadline += time.monotonic() - asked
                return getattr(client, verb)(*arguments, timeout=_left(deadline), **options)
            except (grpc.RpcError, MilvusException, ValueError) as error:
                failure = error
                match _kind(error):
                    case _Kind.REFUSED:
                        raise self._refused(verb, error) from error
                    case _Kind.TIMEOUT | _Kind.DENIED:
                        break
                    case _Kind.LOST:
                        self._forget(client)
                    case _Kind.NOT_READY:
                        time.sleep(min(_NOT_READY_PAUSE_S, _left(deadline)))
                    case _Kind.NOT_LOADED:
                        try:
                            # A server goes on loading when this times out, so that a later call finds it done.
                            client.load_collection(arguments[0], timeout=_left(deadline))
                        except (grpc.RpcError, MilvusException) as loading:
                            if _kind(loading) is _Kind.REFUSED:
                                raise self._refused("load_collection", loading) from loading
                            break
            if time.monotonic() >= deadline:
                break
        raise self._unavailable(verb, failure) from failure

    @contextmanager
    def translated(self, verb: str) -> Iterator[None]:
        """Give the failures of what the client handed out (an iterator) their types; nothing is tried again."""
        import grpc
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except (grpc.RpcError, MilvusException, ValueError) as error:
            kind = _kind(error)
            if kind is _Kind.REFUSED:
                raise self._refused(verb, error) from error
            raise self._unavailable(verb, error) from error

    def _connected(self) -> Any:
        if (client := self._client) is not None:
            return client
        asked = time.monotonic()
        with self._connecting:
            if self._client is None:
                # Those who waited while an attempt failed share its outcome, or each would wait out a limit in turn.
                if self._failure is not None and self._failed_at > asked:
                    raise self._failure
                try:
                    self._client = self._connect()
                except Exception as error:
                    self._failure, self._failed_at = error, time.monotonic()
                    raise
                self._failure = None
            return self._client

    def _connect(self) -> Any:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import ConnectionConfigException

        # Importing pymilvus sets its loggers to print a traceback for each failed call; callers get an error instead.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        try:
            return MilvusClient(**self.client_options())
        except ConnectionConfigException as error:
            raise ConfigurationError(f"Setting retrieval.milvus.uri: {error.message}.") from None
        except OSError as error:
            raise ConfigurationError(f"A certificate or key of retrieval.milvus cannot be read: {error}.") from None

    def client_options(self) -> dict[str, Any]:
        """Arguments for a client of this Milvus; starts Milvus Lite when it is not up."""
        settings = self.settings
        common = {"timeout": settings.timeout_s, "dedicated": True}
        if self.is_lite:
            uri = lite_server.attach(self._lite_folder, idle_s=settings.lite_idle_s).uri
            return {"uri": uri, "grpc_options": _NO_KEEPALIVE, **common}
        options: dict[str, object] = {
            "token": settings.token.get_secret_value(),
            "db_name": settings.database,
            "secure": settings.secure,
            "server_pem_path": settings.server_pem_path,
            "ca_pem_path": settings.ca_pem_path,
            "client_pem_path": settings.client_pem_path,
            "client_key_path": settings.client_key_path,
        }
        return {"uri": settings.uri, **common, **{name: value for name, value in options.items() if value}}

    def _forget(self, client: Any) -> None:
        """Close ``client``, and drop it unless another thread has replaced it already."""
        if client is None:
            return
        with self._swapping:
            if self._client is not client:
                return
            self._client = None
        try:
            client.close()
        except Exception:
            logging.getLogger(__name__).debug("a lost connection could not be closed", exc_info=True)

    def _refused(self, verb: str, error: Exception) -> Exception:
        if isinstance(error, ValueError):
            return error
        return StoreCallError(
            f"{self.description} refuses {verb}: {_last_words(error)}.", no_such_alias=_is_no_such_alias(error)
        )

    def _unavailable(self, verb: str, failure: Exception | None) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.description} does not answer ({verb}: {_last_words(failure)}). "
            + (
                f"`rag-pipeline doctor` looks into it, `rag-pipeline down milvus` stops a stuck server, "
                f"its log is {self._lite_folder / 'server.log'}."
                if self.is_lite
                else "Check that the server runs, then the settings retrieval.milvus.uri, token and TLS."
            )
        )


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _kind(error: Exception) -> _Kind:
    import grpc

    if isinstance(error, grpc.RpcError):
        return {
            grpc.StatusCode.DEADLINE_EXCEEDED: _Kind.TIMEOUT,
            grpc.StatusCode.UNAUTHENTICATED: _Kind.DENIED,
            grpc.StatusCode.PERMISSION_DENIED: _Kind.DENIED,
            grpc.StatusCode.UNIMPLEMENTED: _Kind.REFUSED,
            grpc.StatusCode.INVALID_ARGUMENT: _Kind.REFUSED,
            grpc.StatusCode.RESOURCE_EXHAUSTED: _Kind.REFUSED,
        }.get(error.code(), _Kind.LOST)
    text = str(error).lower()
    code = getattr(error, "code", None)
    if isinstance(code, grpc.StatusCode) or any(words in text for words in _LOST_TEXTS):
        return _Kind.LOST
    if any(words in text for words in _TIMEOUT_TEXTS):
        return _Kind.TIMEOUT
    if code in _NOT_READY_CODES or any(words in text for words in _NOT_READY_TEXTS):
        return _Kind.NOT_READY
    if code in _NOT_LOADED_CODES or any(words in text for words in _NOT_LOADED_TEXTS):
        return _Kind.NOT_LOADED
    return _Kind.REFUSED


def _is_no_such_alias(error: Exception) -> bool:
    text = str(error)
    return getattr(error, "code", None) == _ALIAS_NOT_FOUND or ("alias '" in text and "does not exist" in text)


def _last_words(error: Exception | None) -> str:
    import grpc

    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"[:300]
    text = str(getattr(error, "message", "") or error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
