"""The manifest of a version: what a collection was built from, and which checks it has passed.

It travels with the collection as a property, and a copy lies among the version's artefacts, so that `status` needs no
store. A reader takes the model, the thresholds and the artefacts' digests from here, never from its own settings.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_pipeline.errors import StoreUnavailableError

SCHEMA_VERSION = 2  # 2: a row says which part of its section it is

_NAME = re.compile(r"(?P<alias>[A-Za-z][A-Za-z0-9_]{0,63}?)__(?P<time>\d{8}T\d{12}Z)_(?P<fingerprint>[0-9a-f]{12})")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ModelEntry(_Record):
    """The embedding model of a version."""

    name: str
    fingerprint: str
    dimension: int


class RootEntry(_Record):
    """A folder that the version was built from."""

    name: str
    path: str


class Verdict(_Record):
    """What one check said of the version."""

    severity: Literal["error", "warn"]
    passed: bool
    description: str


class Owner(_Record):
    """Who builds, or built, the version: one writer at a time a state folder, see `Workspace.writing`."""

    host: str
    state: str


class Manifest(_Record):
    """Everything a reader, a gate or a rollback must know of one version.

    Attributes:
        fingerprint: Of all that decides the contents: model, chunker, budget, schema and documents; 64 hex digits.
        state: ``building`` until every row is written and verified, then ``built``.
        parent: The version that the alias pointed to when this one was staged.
        gate: ``none`` while no golden cases exist for the knowledge base.
        artifacts: File name to SHA-256 of its bytes.
        store: Which store the collection is in, as `MilvusStore.identity` says.
        promoted_at: When the alias first came to this version; blank before.
        left_at: When the alias last left this version; blank while it points here or never did.
        calibration: What was calibrated on this version (``max_l2_distance``, ``highly_relevant_threshold``,
            ``reference_threshold``); it wins over the model's profile. Empty: nothing.
        tokens_per_s: How fast this version's texts were embedded; 0 when none had to be.
        held: Why this version must not be promoted again by itself (a rollback); blank otherwise.
    """

    schema_version: int = SCHEMA_VERSION
    collection: str
    alias: str
    knowledge_base_id: str
    roots: tuple[RootEntry, ...] = ()
    fingerprint: str
    model: ModelEntry
    chunker_version: str
    soft_tokens: int
    hard_tokens: int
    documents_digest: str
    documents: int = 0
    chunks: int = 0
    index_type: Literal["FLAT", "HNSW"] = "FLAT"
    created_at: str
    store: str = ""
    parent: str = ""
    applied_by: Literal["rebuild", "sync"] = "rebuild"
    state: Literal["building", "built"] = "building"
    owner: Owner
    checks: dict[str, Verdict] = Field(default_factory=dict)
    gate: str = "none"
    artifacts: dict[str, str] = Field(default_factory=dict)
    promoted_at: str = ""
    left_at: str = ""
    held: str = ""
    calibration: dict[str, float] = Field(default_factory=dict)
    tokens_per_s: float = 0.0

    def lacking(self, required: Iterable[str]) -> list[str]:
        """Names of the required checks without a pass, sorted."""
        return sorted(name for name in required if name not in self.checks or not self.checks[name].passed)

    @property
    def failed(self) -> list[str]:
        """Names of the ERROR checks that did not pass, sorted."""
        return sorted(name for name, v in self.checks.items() if v.severity == "error" and not v.passed)

    def to_json(self) -> str:
        """One line of JSON; equal manifests give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, where: str) -> "Manifest":
        """Parse a manifest.

        Raises:
            StoreUnavailableError: It is not one, or of a schema version that this code does not know.
        """
        try:
            version = json.loads(text).get("schema_version")
        except (ValueError, AttributeError):
            raise StoreUnavailableError(f"{where} has no readable manifest: reindex needed.") from None
        if version != SCHEMA_VERSION:
            raise StoreUnavailableError(
                f"{where} has a manifest of schema version {version}, this code reads {SCHEMA_VERSION}: reindex needed."
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise StoreUnavailableError(
                f"{where} has a broken manifest ({error.error_count()} faults): reindex needed."
            ) from None


def version_name(alias: str, fingerprint: str, at: datetime) -> str:
    """Name of a version's physical collection; names of one alias sort by time."""
    return f"{alias}__{at.astimezone(UTC):%Y%m%dT%H%M%S%fZ}_{fingerprint[:12]}"


def is_version_name(collection: str, alias: str) -> bool:
    """Whether a collection is named as a version of exactly this alias."""
    match = _NAME.fullmatch(collection)
    return match is not None and collection == f"{alias}__{match['time']}_{match['fingerprint']}"


def now_text() -> str:
    """The time now, UTC, as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def digest_of(*parts: str) -> str:
    """SHA-256 over parts, each closed by its length, as 64 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()
