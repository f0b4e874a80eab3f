"""Settings: the only reader of the environment and of ``rag_pipeline.toml``.

Precedence: command-line flags, then environment variables ``RAG_<GROUP>__<NAME>``, then the file, then the defaults
below. Relative paths are relative to the project root: the nearest folder at or above the working directory that
holds ``rag_pipeline.toml`` or ``knowledge/``, else the working directory.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rag_pipeline.errors import ConfigurationError

CONFIG_FILE = "rag_pipeline.toml"


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KnowledgeRoot(_Group):
    """One folder of Markdown."""

    name: str = Field(default="", description="Name of the root; part of `source` when there are several roots.")
    path: Path = Field(description="The folder.")


class KnowledgeSettings(_Group):
    """Where the Markdown lies and what may be read of it."""

    roots: Annotated[tuple[KnowledgeRoot, ...], NoDecode] = Field(
        default=(KnowledgeRoot(path=Path("knowledge")),),
        description="Folders to index: `[[knowledge.roots]]` with `name` and `path`, or a list of paths.",
    )
    id: str = Field(default="", description="Identity of the knowledge base; blank: derived from where the roots lie.")
    max_file_bytes: int = Field(default=8 * 2**20, gt=0, description="Larger files are reported and skipped.")
    allow_mass_deletion: bool = Field(
        default=False, description="Let this run remove more documents than the mass-deletion guard allows."
    )
    taxonomy: tuple[str, ...] = Field(
        default=(), description="Allowed categories; other categories are warned about. Empty: no check."
    )

    @field_validator("roots", mode="before")
    @classmethod
    def _paths_or_tables(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.split(os.pathsep)
        if isinstance(value, list | tuple):
            return tuple({"path": item} if isinstance(item, str | Path) else item for item in value)
        return value


class ChunkingSettings(_Group):
    """How large chunks may become, in tokens of the embedding model's whole input."""

    soft_tokens: int = Field(default=300, gt=0, description="Close a chunk at the next block from this size on.")
    hard_tokens: int = Field(default=480, gt=0, description="No chunk is larger; capped at the model's maximum.")


class EmbeddingSettings(_Group):
    """Which model turns text into vectors."""

    model: str = Field(
        default="bundled:multilingual-e5-small",
        description="`bundled:multilingual-e5-small`, `bundled:all-MiniLM-L6-v2`, a hub id, or a folder.",
    )
    threads: int = Field(default=0, ge=0, description="Threads of a reindex; 0: all cores.")
    query_threads: int = Field(default=1, ge=0, description="Threads of a query embedding; 0: all cores.")
    batch_tokens: int = Field(default=1024, gt=0, description="Padded tokens of one batch.")


class IndexSettings(_Group):
    """The versions of the collection."""

    alias: str = Field(
        default="knowledge", pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$", description="Milvus alias readers resolve."
    )
    take_over: bool = Field(default=False, description="Let this run replace another knowledge base's alias.")
    artifacts_uri: str = Field(
        default="", description="Where a version's artefacts are published (fsspec URI); blank: in the state folder."
    )
    keep_versions: int = Field(default=2, ge=1, description="Promoted versions kept, the current one included.")
    grace_s: float = Field(default=60.0, ge=0, description="Seconds a version is kept after readers left it.")
    flat_max_rows: int = Field(
        default=20_000, ge=0, description="On Milvus Lite: FLAT (exact) up to this many chunks, HNSW above."
    )


class MilvusSettings(_Group):
    """The vector store."""

    uri: str = Field(
        default="", description="Milvus server (`http://host:19530`); blank: Milvus Lite in the state folder."
    )
    token: SecretStr = Field(default=SecretStr(""), description="`user:password` or an API key.")
    database: str = Field(default="", description="Milvus database; blank: the default one.")
    timeout_s: float = Field(default=5.0, gt=0, description="Limit of one read.")
    write_timeout_s: float = Field(default=120.0, gt=0, description="Limit of one write, flush or load.")
    secure: bool = Field(default=False, description="Use TLS.")
    server_pem_path: str = Field(default="", description="Server certificate for one-way TLS.")
    ca_pem_path: str = Field(default="", description="CA certificate for two-way TLS.")
    client_pem_path: str = Field(default="", description="Client certificate for two-way TLS.")
    client_key_path: str = Field(default="", description="Client key for two-way TLS.")
    lite_idle_s: float = Field(
        default=600.0, gt=0, description="Milvus Lite's server ends this long after its last user has ended."
    )


class RetrievalSettings(_Group):
    """Reading from the index."""

    milvus: MilvusSettings = MilvusSettings()
    top_k: int = Field(default=10, ge=1, le=1000, description="Chunks a search returns.")


class AutomationSettings(_Group):
    """What Dagster starts by itself."""

    enabled: bool = Field(default=False, description="Start the knowledge sensor and the weekly rebuild.")
    sensor_interval_s: int = Field(default=60, ge=5, description="Seconds between looks at the knowledge folders.")
    weekly_rebuild_cron: str = Field(default="0 3 * * 0", description="When the weekly full rebuild runs (UTC).")


class _TomlSource(InitSettingsSource):
    """Values of the configuration file."""


class Settings(BaseSettings):
    """Everything that can be set; build it with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix="RAG_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    state_dir: Path = Field(default=Path(".rag"), description="Store files, caches, locks, reports, Dagster home.")
    knowledge: KnowledgeSettings = KnowledgeSettings()
    chunking: ChunkingSettings = ChunkingSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    index: IndexSettings = IndexSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    automation: AutomationSettings = AutomationSettings()

    _project_root: Path = PrivateAttr(default_factory=Path.cwd)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the file; no dotenv and no secrets folder."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, _TomlSource(settings_cls, init_kwargs=_FILE_VALUES.get())

    @property
    def project_root(self) -> Path:
        """The folder that relative paths are relative to."""
        return self._project_root

    def path(self, path: Path) -> Path:
        """``path`` made absolute from the project root."""
        return (self._project_root / path.expanduser()).absolute()

    @property
    def state(self) -> Path:
        """The state folder, absolute."""
        return self.path(self.state_dir)

    def effective(self) -> Iterator[tuple[str, object, str]]:
        """Each setting as ``(dotted name, value, where it comes from)``; secrets are masked."""
        for name, _, value in _leaves(self):
            yield name, value, self._origins.get(name, "default")


# `settings_customise_sources` is a class method that does not see the call's arguments: `load_settings` hands it the
# file's values here.
_FILE_VALUES: ContextVar[dict[str, Any]] = ContextVar("_FILE_VALUES", default={})  # noqa: B039


def load_settings(
    config: Path | None = None, *, flags: Mapping[str, object] | None = None, project_root: Path | None = None
) -> Settings:
    """Read the settings.

    Args:
        config: Configuration file; ``None`` takes ``rag_pipeline.toml`` of the project root when there is one.
        flags: Dotted names to values that win over all else; ``None`` values are left out.
        project_root: Folder that relative paths start from; ``None`` finds it from the working directory.

    Raises:
        ConfigurationError: A file that cannot be read, an unknown name or a value of the wrong kind.
    """
    root = (project_root or (config.parent if config else _find_project_root())).absolute()
    file = config or root / CONFIG_FILE
    values = _read_toml(file, required=config is not None)
    given = _nest({name: value for name, value in (flags or {}).items() if value is not None})
    handed_over = _FILE_VALUES.set(values)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, given, values, file)) from None
    except SettingsError as error:
        raise ConfigurationError(f"An environment variable RAG_… cannot be read: {error}.") from None
    finally:
        _FILE_VALUES.reset(handed_over)
    settings._project_root = root
    settings._origins = {
        name: origin for name, path, _ in _leaves(settings) if (origin := _origin(path, given, values, file))
    }
    unknown = sorted(name for name in os.environ if name.startswith("RAG_") and not _known_variable(name))
    if unknown:
        raise ConfigurationError(
            f"Unknown environment variable {', '.join(unknown)}: no such setting. "
            "`rag-pipeline settings` lists the names; write RAG_<GROUP>__<NAME>."
        )
    return settings


def _find_project_root() -> Path:
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / CONFIG_FILE).is_file() or (folder / "knowledge").is_dir():
            return folder
    return here


def _read_toml(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigurationError(f"The configuration file {file} does not exist.") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"The configuration file {file} cannot be read: {error}.") from None


def _nest(flat: Mapping[str, object]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        level = nested
        for group in groups:
            level = level.setdefault(group, {})
        level[last] = value
    return nested


def _leaves(model: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...], object]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, (*path, name))
        else:
            yield ".".join((*path, name)), (*path, name), value


def _holds(values: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    level: Any = values
    for part in path:
        if not isinstance(level, Mapping) or part not in level:
            return False
        level = level[part]
    return True


def _origin(path: tuple[str, ...], given: Mapping[str, Any], values: Mapping[str, Any], file: Path) -> str:
    if _holds(given, path):
        return "command line"
    variable = "RAG_" + "__".join(path).upper()
    names = {name.upper(): name for name in os.environ}
    if variable in names:
        return f"environment {names[variable]}"
    return str(file) if _holds(values, path) else ""


def _known_variable(variable: str) -> bool:
    path = variable.removeprefix("RAG_").lower().split("__")
    fields: Mapping[str, FieldInfo] = Settings.model_fields
    for depth, part in enumerate(path):
        if part not in fields:
            return False
        annotation = fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return depth == len(path) - 1
        fields = annotation.model_fields
    return True


def _explain(error: ValidationError, given: Mapping[str, Any], values: Mapping[str, Any], file: Path) -> str:
    lines = []
    for problem in error.errors():
        path = tuple(str(part) for part in problem["loc"])
        where = _origin(path, given, values, file) or "the settings"
        shown = "" if isinstance(problem["input"], dict) or "token" in path else f" (found {problem['input']!r})"
        lines.append(f"Setting {'.'.join(path)} from {where}: {problem['msg']}{shown}.")
    return "\n".join([*lines, "`rag-pipeline settings` shows the names and the effective values."])
