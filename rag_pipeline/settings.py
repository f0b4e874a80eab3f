"""Settings: the only reader of the environment and of ``rag_pipeline.toml``.

Precedence: command-line flags, then environment variables ``RAG_<GROUP>__<NAME>``, then the file, then the defaults
below. ``RAG_CONFIG`` names the file as ``--config`` does, which wins over it. A variable whose first part is no group
and no setting (``RAG_API_KEY``) is taken for another program's and left alone. Relative paths are relative to the
project root: the folder of a file that was named, else the nearest folder at or above the working directory that holds
``rag_pipeline.toml`` or ``knowledge/``, else the working directory.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.setting_groups import (
    AutomationSettings,
    ChunkingSettings,
    DatabaseSettings,
    EmbeddingSettings,
    IndexSettings,
    InvocationSettings,
    KnowledgeSettings,
    RetrievalSettings,
)

CONFIG_FILE = "rag_pipeline.toml"
CONFIG_VARIABLE = "RAG_CONFIG"

# What protects data is lifted for one run by somebody who looks at it, not for good by a file that is forgotten.
_ONE_RUN = {
    ("knowledge", "allow_mass_deletion"): "--allow-mass-deletion",
    ("index", "take_over"): "--take-over",
}
_USER_INFO = re.compile(r"(?<=://)(?:[^\s/:?#]*:\S*|[^\s/?#]*)@")


def masked(text: str) -> str:
    """``text`` with the user information of every URI in it (``http://user:password@host``) masked."""
    return _USER_INFO.sub("********@", text)


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
    database: DatabaseSettings = DatabaseSettings()
    invocations: InvocationSettings = InvocationSettings()
    automation: AutomationSettings = AutomationSettings()

    _project_root: Path = PrivateAttr(default_factory=Path.cwd)
    _config: Path | None = PrivateAttr(default=None)
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

    @property
    def config(self) -> Path | None:
        """The configuration file that ``--config`` or ``RAG_CONFIG`` named, absolute; ``None`` when none was named."""
        return self._config

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
        config: Configuration file; ``None`` takes the one that ``RAG_CONFIG`` names, else ``rag_pipeline.toml`` of the
            project root when there is one.
        flags: Dotted names to values that win over all else; ``None`` values are left out.
        project_root: Folder that relative paths start from; ``None``: the folder of the named file, else found from
            the working directory.

    Raises:
        ConfigurationError: A file that cannot be read, an unknown name, a value of the wrong kind, or a setting for
            one run only that does not come from ``flags``.
    """
    variable = os.environ.get(CONFIG_VARIABLE, "") if config is None else ""
    if variable:
        config = Path(variable)
    root = (project_root or (config.parent if config else _find_project_root())).absolute()
    file = (config or root / CONFIG_FILE).absolute()
    values = _read_toml(file, required=config is not None, named_by=CONFIG_VARIABLE if variable else "")
    given = _nest({name: value for name, value in (flags or {}).items() if value is not None})
    handed_over = _FILE_VALUES.set(values)
    origins = _Origins(given, {}, values, file)
    try:
        origins = _Origins(given, EnvSettingsSource(Settings)(), values, file)
        settings = Settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, origins)) from None
    except SettingsError as error:
        raise ConfigurationError(f"An environment variable RAG_… cannot be read: {error}.") from None
    finally:
        _FILE_VALUES.reset(handed_over)
    _refuse_lasting(origins)
    settings._project_root = root
    settings._config = file if config else None
    settings._origins = {name: origin for name, path, _ in _leaves(settings) if (origin := origins.of(path))}
    unknown = sorted(name for name in os.environ if name.startswith("RAG_") and _is_wrong(name))
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


def _read_toml(file: Path, *, required: bool, named_by: str) -> dict[str, Any]:
    shown = f"{file} (named by {named_by})" if named_by else str(file)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigurationError(f"The configuration file {shown} does not exist.") from None
        return {}
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no TOML, a NUL in the name
        raise ConfigurationError(f"The configuration file {shown} cannot be read: {error}.") from None


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


@dataclass(frozen=True, slots=True)
class _Origins:
    """The values of each source before they are merged, nested by group."""

    given: Mapping[str, Any]
    environment: Mapping[str, Any]
    values: Mapping[str, Any]
    file: Path

    def of(self, path: tuple[str, ...]) -> str:
        """Where a setting comes from, blank for a default."""
        return "command line" if _holds(self.given, path) else self.lasting(path)

    def lasting(self, path: tuple[str, ...]) -> str:
        """Where it comes from when flags are left aside, blank for nowhere."""
        if _holds(self.environment, path):
            return f"environment {_variable(path)}"
        return str(self.file) if _holds(self.values, path) else ""


def _variable(path: tuple[str, ...]) -> str:
    """The variable that sets ``path``, as it is spelled: its own, else the one with the JSON of a group around it."""
    names = {name.upper(): name for name in os.environ}
    candidates = ["RAG_" + "__".join(path[:depth]).upper() for depth in range(len(path), 0, -1)]
    return next((names[name] for name in candidates if name in names), candidates[0])


def _refuse_lasting(origins: _Origins) -> None:
    for path, flag in _ONE_RUN.items():
        if origin := origins.lasting(path):
            raise ConfigurationError(
                f"Setting {'.'.join(path)} from {origin} is for one run only. Remove it there and pass {flag} to the "
                f"run that needs it (in Dagster: {path[-1]} in the run config of the resource `workspace`)."
            )


def _is_wrong(variable: str) -> bool:
    """Whether a variable is meant for this program (by its first part) and names neither a setting nor a group."""
    path = tuple(variable.removeprefix("RAG_").lower().split("__"))
    kind, depth = _kind_at(path)
    return depth > 0 and (kind is None or depth < len(path))


def _kind_at(path: tuple[str, ...]) -> tuple[object, int]:
    """The type of the setting or group that ``path`` leads to or into, and how many parts of it name that.

    The type is ``None`` when a part is no name; the parts before it are counted.
    """
    kind: object = Settings
    for depth, part in enumerate(path):
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return kind, depth
        if part not in kind.model_fields:
            return None, depth
        kind = kind.model_fields[part].annotation
    return kind, len(path)


def _explain(error: ValidationError, origins: _Origins) -> str:
    lines = []
    for problem in error.errors():
        path = tuple(str(part) for part in problem["loc"])
        kind, depth = _kind_at(path)
        where = origins.of(path) or origins.of(path[:depth]) or "the settings"
        # What stands under a name that is none, or in place of a group, may be a secret that was misplaced.
        misplaced = kind is None or isinstance(problem["input"], Mapping) or problem["type"] == "extra_forbidden"
        is_group = isinstance(kind, type) and issubclass(kind, BaseModel)
        tells = not misplaced and not is_group and kind is not SecretStr
        shown = f" (found {masked(repr(problem['input']))})" if tells else ""
        lines.append(f"Setting {'.'.join(path)} from {where}: {problem['msg']}{shown}.")
    return "\n".join([*lines, "`rag-pipeline settings` shows the names and the effective values."])
