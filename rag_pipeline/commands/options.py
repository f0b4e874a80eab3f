"""Options that every command takes, and what they lead to: settings, a workspace, printed JSON."""

import json
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_pipeline.settings import Settings, load_settings

if TYPE_CHECKING:
    from rag_pipeline.workspace import Workspace

Alias = Annotated[str | None, typer.Option("--alias", help="Milvus alias of the knowledge base (index.alias).")]
State = Annotated[Path | None, typer.Option("--state", help="State folder (state_dir, RAGSTATE_DIR).")]
Config = Annotated[Path | None, typer.Option("--config", help="Configuration file; default rag_pipeline.toml.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# For the message on an error of the system that names no path (a full disk).
STATE: ContextVar[Path | None] = ContextVar("STATE", default=None)


def settings_of(config: Path | None, alias: str | None, state: Path | None, **flags: object) -> Settings:
    """The settings of a command; ``flags`` are settings by name, with ``__`` for the dot, ``None`` where not given."""
    named = {name.replace("__", "."): value for name, value in flags.items()}
    roots = named.pop("knowledge.roots", None)
    if isinstance(roots, list) and roots:
        named["knowledge.roots"] = [str(path.absolute()) for path in roots]
        named["knowledge.id"] = ""  # it names the configured roots, not these
    settings = load_settings(
        config, flags={"index.alias": alias, "state_dir": state.absolute() if state else None, **named}
    )
    STATE.set(settings.state)
    return settings


def workspace_of(config: Path | None, alias: str | None, state: Path | None, **flags: object) -> "Workspace":
    """The workspace of `settings_of`."""
    from rag_pipeline.workspace import Workspace

    return Workspace(settings_of(config, alias, state, **flags))


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def print_lines(values: Iterable[object]) -> None:
    """One line of JSON each on standard output."""
    for value in values:
        typer.echo(json.dumps(value, ensure_ascii=False))
