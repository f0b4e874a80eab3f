"""Commands about what runs where: settings, db, up, down, doctor."""

from typing import Annotated

import typer

from rag_pipeline.commands.options import Alias, Config, Json, State, print_json, settings_of, workspace_of

db = typer.Typer(no_args_is_help=True, help="The database of invocations.")


@db.command()
def upgrade(*, as_json: Json = False, alias: Alias = None, state: State = None, config: Config = None) -> None:
    """Make the database, or bring its schema up to this version."""
    from rag_pipeline.invocations.database import Database

    settings = settings_of(config, alias, state)
    database = Database(settings.database, state=settings.state)
    applied = database.upgrade()
    if as_json:
        print_json({"database": database.description, "applied": list(applied)})
    else:
        done = f"upgraded: {', '.join(applied)}" if applied else "nothing to do"
        typer.echo(f"{database.description}: {done}")


def settings(*, as_json: Json = False, alias: Alias = None, state: State = None, config: Config = None) -> None:
    """The effective settings, and where each comes from; secrets are masked."""
    from rag_pipeline import console

    rows = [
        {"name": name, "value": console.plain(value), "origin": origin}
        for name, value, origin in settings_of(config, alias, state).effective()
    ]
    if as_json:
        print_json(rows)
    else:
        width = max(len(str(row["name"])) for row in rows)
        typer.echo("\n".join(f"{row['name']:<{width}}  {row['value']!r}  ({row['origin']})" for row in rows))


def up(
    *,
    parts: Annotated[list[str] | None, typer.Argument(help="milvus, dagster; default: all.")] = None,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Start the local stack and leave it running; `down` ends it."""
    from rag_pipeline import local_stack

    for line in local_stack.up(workspace_of(config, alias, state), parts or []):
        typer.echo(line)


def down(
    *,
    parts: Annotated[list[str] | None, typer.Argument(help="milvus, dagster; default: all.")] = None,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Stop what `up` or another command started in this state folder."""
    from rag_pipeline import local_stack

    for line in local_stack.down(workspace_of(config, alias, state), parts or []):
        typer.echo(line)


def doctor(*, as_json: Json = False, alias: Alias = None, state: State = None, config: Config = None) -> None:
    """Check model, store, locks, disk and versions, and say what to do."""
    from rag_pipeline import local_stack

    findings = local_stack.diagnose(workspace_of(config, alias, state))
    if as_json:
        print_json([{"name": item.name, "ok": item.ok, "text": item.text} for item in findings])
    else:
        typer.echo("\n".join(f"{'ok  ' if item.ok else 'FAIL'}  {item.name}: {item.text}" for item in findings))
    if not all(item.ok for item in findings):
        raise typer.Exit(3)
