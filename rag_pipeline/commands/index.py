"""Commands about the index: reindex, status, rollback, prune, chunks."""

from pathlib import Path
from typing import Annotated

import typer

from rag_pipeline.commands.options import Alias, Config, Json, State, print_json, print_lines, workspace_of
from rag_pipeline.errors import ConfigurationError

KnowledgeDirs = Annotated[
    list[Path] | None, typer.Option("--knowledge", help="Folder of Markdown; may be given several times.")
]


def reindex(
    *,
    knowledge: KnowledgeDirs = None,
    full: Annotated[bool, typer.Option("--full", help="Parse and chunk everything anew; cached vectors.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Like --full, and embed everything again.")] = False,
    no_promote: Annotated[bool, typer.Option("--no-promote", help="Stage and check; leave the alias.")] = False,
    allow_mass_deletion: Annotated[
        bool, typer.Option("--allow-mass-deletion", help="Let this run remove many documents.")
    ] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Replace another knowledge base's alias.")] = False,
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Bring the index up to the knowledge folders: read, chunk, embed, stage, check, promote."""
    from rag_pipeline import console
    from rag_pipeline.reindex import reindex as run

    ws = workspace_of(
        config,
        alias,
        state,
        knowledge__roots=knowledge,
        knowledge__allow_mass_deletion=allow_mass_deletion or None,
        index__take_over=take_over or None,
    )
    with console.watching() as watch:
        outcome = run(ws, full=full, refresh=no_cache, promote_it=not no_promote, watch=watch)
    for warning in outcome.warnings:
        console.note(f"warning: {warning}")
    if as_json:
        print_json(console.outcome_record(outcome))
    else:
        typer.echo(console.outcome_text(outcome))


def status(
    *,
    live: Annotated[bool, typer.Option("--live", help="Ask the store instead of the manifest copies.")] = False,
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """What is promoted, what is kept, and what the checks said."""
    from rag_pipeline import console

    ws = workspace_of(config, alias, state)
    record = console.status_record(ws, live=live)
    if as_json:
        print_json(record)
    else:
        typer.echo(console.status_text(record))


def rollback(
    *,
    to: Annotated[str, typer.Option("--to", help="A version to go to; default: the one before.")] = "",
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Move the alias back to the version before, or to the one named."""
    from rag_pipeline.release import rollback as run

    manifest = run(workspace_of(config, alias, state), to=to)
    if as_json:
        print_json({"promoted": manifest.collection, "fingerprint": manifest.fingerprint})
    else:
        typer.echo(f"The alias {manifest.alias} now points to {manifest.collection}.")


def prune(*, as_json: Json = False, alias: Alias = None, state: State = None, config: Config = None) -> None:
    """Drop debris of killed runs, and old versions past their grace."""
    from rag_pipeline.release import prune as run

    dropped = run(workspace_of(config, alias, state).of_alias())
    if as_json:
        print_json({"dropped": dropped})
    else:
        typer.echo("\n".join(f"dropped {name}" for name in dropped) or "nothing to drop")


def chunks(
    *,
    files: Annotated[list[Path], typer.Argument(help="Markdown files.", exists=True, dir_okay=False)],
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """How files are cut: with --json one line a chunk, with its character span in the decoded source."""
    from dataclasses import asdict

    from rag_pipeline import console
    from rag_pipeline.ingest.chunking import chunk_document
    from rag_pipeline.ingest.documents import parse_document

    ws = workspace_of(config, alias, state)
    rejected = False
    for file in files:
        document, issues = parse_document(file.name, file.read_bytes())
        for issue in issues:
            console.note(f"{file}{f', line {issue.line}' if issue.line else ''}: {issue.reason}")
        if document is None:
            rejected = True
            continue
        cut = chunk_document(document, tokens=ws.token_counter, budget=ws.budget)
        if as_json:
            print_lines({**asdict(chunk), "breadcrumb_text": chunk.breadcrumb_text} for chunk in cut)
        else:
            typer.echo("\n\n".join(console.chunk_text(chunk) for chunk in cut) or f"{file}: no chunks")
    if rejected:
        raise ConfigurationError("Some files could not be decoded; see above.")
