"""The groups of settings: names, defaults, limits and what each is for."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

# Waiting for longer is waiting for ever, and some clocks take no more.
Seconds = Annotated[float, Field(gt=0, le=86_400)]
VectorStoreMode = Literal["auto", "langchain", "sdk"]


class Group(BaseModel):
    """A group of settings: unknown names are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class KnowledgeRoot(Group):
    """One folder of Markdown."""

    name: str = Field(default="", description="Name of the root; part of `source` when there are several roots.")
    path: Path = Field(description="The folder.")


class KnowledgeSettings(Group):
    """Where the Markdown lies and what may be read of it."""

    roots: Annotated[tuple[KnowledgeRoot, ...], NoDecode] = Field(
        default=(KnowledgeRoot(path=Path("knowledge")),),
        description="Folders to index: `[[knowledge.roots]]` with `name` and `path`, or a list of paths.",
    )
    id: str = Field(default="", description="Identity of the knowledge base; blank: derived from where the roots lie.")
    max_file_bytes: int = Field(default=8 * 2**20, gt=0, description="Larger files are reported and skipped.")
    allow_mass_deletion: bool = Field(
        default=False,
        description="Let this run remove more documents than the mass-deletion guard allows. "
        "Not in the file or the environment: `--allow-mass-deletion`, or the run config in Dagster.",
    )
    taxonomy: tuple[str, ...] = Field(
        default=(), description="Allowed categories; other categories are warned about. Empty: no check."
    )

    @field_validator("roots", mode="before")
    @classmethod
    def _paths_or_tables(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.split(os.pathsep)
        if isinstance(value, list | tuple) and not all(str(item).strip() for item in value or [""]):
            raise ValueError("names no folder")
        if isinstance(value, list | tuple):
            return tuple({"path": item} if isinstance(item, str | Path) else item for item in value)
        return value


class ChunkingSettings(Group):
    """How large chunks may become, in tokens of the embedding model's whole input."""

    soft_tokens: int = Field(default=300, gt=0, description="Close a chunk at the next block from this size on.")
    hard_tokens: int = Field(default=480, gt=0, description="No chunk is larger; capped at the model's maximum.")


class EmbeddingSettings(Group):
    """Which model turns text into vectors."""

    model: str = Field(
        default="bundled:multilingual-e5-small",
        description="`bundled:multilingual-e5-small`, `bundled:all-MiniLM-L6-v2`, a hub id, or a folder.",
    )
    threads: int = Field(default=0, ge=0, description="Threads of a reindex; 0: all cores.")
    query_threads: int = Field(default=1, ge=0, description="Threads of a query embedding; 0: all cores.")
    batch_tokens: int = Field(default=1024, gt=0, description="Padded tokens of one batch.")


class IndexSettings(Group):
    """The versions of the collection."""

    alias: str = Field(
        default="knowledge", pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$", description="Milvus alias readers resolve."
    )
    take_over: bool = Field(
        default=False,
        description="Let this run replace another knowledge base's alias. "
        "Not in the file or the environment: `--take-over`, or the run config in Dagster.",
    )
    artifacts_uri: str = Field(
        default="", description="Where a version's artefacts are published (fsspec URI); blank: in the state folder."
    )
    keep_versions: int = Field(default=2, ge=1, description="Promoted versions kept, the current one included.")
    grace_s: float = Field(default=60.0, ge=0, description="Seconds a version is kept after readers left it.")
    flat_max_rows: int = Field(
        default=20_000, ge=0, description="On Milvus Lite: FLAT (exact) up to this many chunks, HNSW above."
    )

    @field_validator("artifacts_uri")
    @classmethod
    def _protocol(cls, value: str) -> str:
        if "://" not in value:
            return value
        from fsspec import available_protocols

        for protocol in value.split("://", maxsplit=1)[0].split("::"):
            if protocol not in available_protocols():
                raise ValueError(f"there is no file system {protocol!r}; use a folder or a URI that fsspec knows")
        return value


class MilvusSettings(Group):
    """The vector store."""

    uri: str = Field(
        default="", description="Milvus server (`http://host:19530`); blank: Milvus Lite in the state folder."
    )
    token: SecretStr = Field(default=SecretStr(""), description="`user:password` or an API key.")
    database: str = Field(default="", description="Milvus database; blank: the default one.")
    timeout_s: Seconds = Field(default=5.0, description="Limit of one read.")
    write_timeout_s: float = Field(default=120.0, gt=0, description="Limit of one write, flush or load.")
    secure: bool = Field(default=False, description="Use TLS.")
    server_pem_path: str = Field(default="", description="Server certificate for one-way TLS.")
    ca_pem_path: str = Field(default="", description="CA certificate for two-way TLS.")
    client_pem_path: str = Field(default="", description="Client certificate for two-way TLS.")
    client_key_path: str = Field(default="", description="Client key for two-way TLS.")
    lite_idle_s: float = Field(
        default=600.0, gt=0, description="Milvus Lite's server ends this long after its last user has ended."
    )


class VectorStoreSettings(Group):
    """Which retrieval path asks the vector store."""

    mode: VectorStoreMode = Field(
        default="auto",
        description="`auto` asks through LangChain and falls back to the SDK; `langchain` and `sdk` ask that path "
        "only. `spring-ai` is accepted for `langchain`.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _synonym(cls, value: object) -> object:
        return "langchain" if value == "spring-ai" else value


class NormalizationSettings(Group):
    """How distances become similarities and levels; a value set here wins over the model's calibration."""

    max_l2_distance: float | None = Field(
        default=None, gt=0, description="Squared L2 distance whose similarity is 0; unset: the model's, else 2.0."
    )
    highly_relevant_threshold: float | None = Field(
        default=None, ge=0, le=1, description="Least score of `highly_relevant`; unset: the model's, else 0.75."
    )
    reference_threshold: float | None = Field(
        default=None, ge=0, le=1, description="Least score of usable evidence; unset: the model's, else 0.5."
    )


class ContextSettings(Group):
    """The context pack."""

    budget: int = Field(default=2000, ge=1, description="Most tokens (or characters) of the packed context.")
    unit: Literal["tokens", "characters"] = Field(
        default="tokens", description="What the budget counts: tokens of the embedding model, or characters."
    )


class SessionSettings(Group):
    """What a session has been given already."""

    enabled: bool = Field(default=True, description="Do not repeat evidence that a session was given before.")
    timeout_ms: int = Field(default=50, gt=0, description="Limit of reading and of writing what a session was given.")


class SidecarSettings(Group):
    """A second retrieval path beside the main one, for comparison only."""

    enabled: bool = Field(default=False, description="Query the sidecar after each lookup, in the background.")
    mode: Literal["langchain", "sdk"] = Field(default="langchain", description="The sidecar's path.")
    timeout_s: Seconds = Field(default=5.0, description="Limit of one sidecar query.")

    @field_validator("mode", mode="before")
    @classmethod
    def _synonym(cls, value: object) -> object:
        return "langchain" if value == "spring-ai" else value


class RetrievalSettings(Group):
    """Reading from the index."""

    milvus: MilvusSettings = MilvusSettings()
    vector_store: VectorStoreSettings = VectorStoreSettings()
    normalization: NormalizationSettings = NormalizationSettings()
    context: ContextSettings = ContextSettings()
    session: SessionSettings = SessionSettings()
    sidecar: SidecarSettings = SidecarSettings()
    timeout_s: float = Field(default=5.0, gt=0, description="Deadline of a whole lookup once the model is loaded.")
    l1_enabled: bool = Field(default=True, description="Semantic retrieval; without it there is no evidence at all.")
    top_k: int = Field(default=10, ge=1, le=1000, description="Chunks that `search` returns.")
    candidates: int = Field(default=30, ge=1, le=1000, description="Chunks that a lookup takes from the store.")
    max_blocks: int = Field(default=5, ge=1, le=100, description="Evidence blocks of a lookup.")
    max_blocks_per_document: int = Field(default=3, ge=1, le=100, description="Evidence blocks of one document.")
    expansion_chunks: int = Field(
        default=4, ge=0, le=50, description="Neighbouring chunks that may join a hit to complete its list or code."
    )
    query_variants: bool = Field(default=False, description="Also search with the query's L0 terms alone.")
    max_query_chars: int = Field(default=8000, ge=1, description="What is beyond is cut off a query, and traced.")


class DatabaseSettings(Group):
    """Where invocations and sessions are recorded."""

    url: SecretStr = Field(
        default=SecretStr(""),
        description="SQLAlchemy URL (`postgresql+psycopg://…`, `mysql+pymysql://…`); blank: SQLite in the state.",
    )
    timeout_s: float = Field(default=5.0, gt=0, description="Limit of connecting, and of waiting for a lock.")


class InvocationSettings(Group):
    """The record of each lookup."""

    enabled: bool = Field(default=True, description="Record lookups in `tool_invocation`.")
    retention_days: int = Field(
        default=90, ge=0, le=36500, description="Older records and sessions are deleted; 0: kept."
    )
    redact: tuple[str, ...] = Field(
        default=(), description="Regular expressions (RE2) whose matches are redacted from what is recorded."
    )

    @field_validator("redact")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from rag_pipeline.linear_patterns import compiled

        for pattern in value:
            compiled(pattern)
        return value


class AutomationSettings(Group):
    """What Dagster starts by itself."""

    enabled: bool = Field(default=False, description="Start the knowledge sensor and the weekly rebuild.")
    sensor_interval_s: int = Field(default=60, ge=5, description="Seconds between looks at the knowledge folders.")
    weekly_rebuild_cron: str = Field(default="0 3 * * 0", description="When the weekly full rebuild runs (UTC).")
