"""The command ``rag-pipeline``: flags to settings, one function called, its result printed.

Results go to standard output (with ``--json`` one document, or one a line where the help says so), all else to standard
error. Exit codes: 0 done; 1 a check failed; 2 wrong usage or settings; 3 a store or model is unavailable; 4 refused to
protect data.
"""

import json
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_pipeline.errors import ConfigurationError, RagPipelineError, UnavailableError
from rag_pipeline.settings import Settings, load_settings

if TYPE_CHECKING:
    from rag_pipeline.workspace import Workspace

app = typer.Typer(
    help="Keep a Markdown knowledge base searchable for AI agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Alias = Annotated[str | None, typer.Option("--alias", help="Milvus alias of the knowledge base (index.alias).")]
State = Annotated[Path | None, typer.Option("--state", help="State folder (state_dir, RAG_STATE_DIR).")]
Config = Annotated[Path | None, typer.Option("--config", help="Configuration file; default rag_pipeline.toml.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KnowledgeDirs = Annotated[
    list[Path] | None, typer.Option("--knowledge", help="Folder of Markdown; may be given several times.")
]


# For the message on an error of the system that names no path (a full disk).
_STATE: ContextVar[Path | None] = ContextVar("_STATE", default=None)


def _settings(config: Path | None, alias: str | None, state: Path | None, **flags: object) -> Settings:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    roots = named.pop("knowledge.roots", None)
    if isinstance(roots, list) and roots:
        named["knowledge.roots"] = [str(path.absolute()) for path in roots]
        named["knowledge.id"] = ""  # it names the configured roots, not these
    settings = load_settings(
        config, flags={"index.alias": alias, "state_dir": state.absolute() if state else None, **named}
    )
    _STATE.set(settings.state)
    return settings


def _workspace(config: Path | None, alias: str | None, state: Path | None, **flags: object) -> "Workspace":
    from rag_pipeline.workspace import Workspace

    return Workspace(_settings(config, alias, state, **flags))


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _print_lines(values: Iterable[object]) -> None:
    for value in values:
        typer.echo(json.dumps(value, ensure_ascii=False))


@app.command()
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

    ws = _workspace(
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
        _print_json(console.outcome_record(outcome))
    else:
        typer.echo(console.outcome_text(outcome))


@app.command()
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

    ws = _workspace(config, alias, state)
    record = console.status_record(ws, live=live)
    if as_json:
        _print_json(record)
    else:
        typer.echo(console.status_text(record))


@app.command()
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

    manifest = run(_workspace(config, alias, state), to=to)
    if as_json:
        _print_json({"promoted": manifest.collection, "fingerprint": manifest.fingerprint})
    else:
        typer.echo(f"The alias {manifest.alias} now points to {manifest.collection}.")


@app.command()
def prune(*, as_json: Json = False, alias: Alias = None, state: State = None, config: Config = None) -> None:
    """Drop debris of killed runs, and old versions past their grace."""
    from rag_pipeline.release import prune as run

    dropped = run(_workspace(config, alias, state).of_alias())
    if as_json:
        _print_json({"dropped": dropped})
    else:
        typer.echo("\n".join(f"dropped {name}" for name in dropped) or "nothing to drop")


@app.command()
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

    ws = _workspace(config, alias, state)
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
            _print_lines({**asdict(chunk), "breadcrumb_text": chunk.breadcrumb_text} for chunk in cut)
        else:
            typer.echo("\n\n".join(console.chunk_text(chunk) for chunk in cut) or f"{file}: no chunks")
    if rejected:
        raise ConfigurationError("Some files could not be decoded; see above.")


@app.command()
def search(
    *,
    query: Annotated[str | None, typer.Argument(help="What to look for.")] = None,
    queries: Annotated[
        Path | None, typer.Option("--queries", help="JSON lines with id and query; prints one ranking a line.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, max=1000, help="Chunks to return.")] = None,
    category: Annotated[str, typer.Option("--category", help="Only chunks of this category.")] = "",
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Candidates for a query, nearest first, from the promoted version."""
    from rag_pipeline import console
    from rag_pipeline.retrieval.sdk_search import SdkSearch

    if (query is None) == (queries is None):
        raise ConfigurationError("Give a query, or --queries FILE.jsonl; not both.")
    ws = _workspace(config, alias, state)
    wanted = console.read_queries(queries) if queries else []
    searcher = SdkSearch(ws)
    if sys.stderr.isatty():
        console.note("loading the model …")
    limit = top_k or ws.settings.retrieval.top_k
    if query is not None:
        found = searcher.search(query, top_k=limit, category=category)
        if as_json:
            _print_json([console.candidate_record(candidate) for candidate in found])
        else:
            typer.echo(
                "\n\n".join(console.candidate_text(n, item) for n, item in enumerate(found, 1)) or "nothing found"
            )
        return
    _print_lines(
        {
            "id": key,
            "ranking": [console.ranking_record(c) for c in searcher.search(text, top_k=limit, category=category)],
        }
        for key, text in wanted
    )


@app.command()
def settings(*, as_json: Json = False, alias: Alias = None, state: State = None, config: Config = None) -> None:
    """The effective settings, and where each comes from; secrets are masked."""
    from rag_pipeline import console

    rows = [
        {"name": name, "value": console.plain(value), "origin": origin}
        for name, value, origin in _settings(config, alias, state).effective()
    ]
    if as_json:
        _print_json(rows)
    else:
        width = max(len(str(row["name"])) for row in rows)
        typer.echo("\n".join(f"{row['name']:<{width}}  {row['value']!r}  ({row['origin']})" for row in rows))


@app.command()
def up(
    *,
    parts: Annotated[list[str] | None, typer.Argument(help="milvus, dagster; default: all.")] = None,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Start the local stack and leave it running; `down` ends it."""
    from rag_pipeline import local_stack

    for line in local_stack.up(_workspace(config, alias, state), parts or []):
        typer.echo(line)


@app.command()
def down(
    *,
    parts: Annotated[list[str] | None, typer.Argument(help="milvus, dagster; default: all.")] = None,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Stop what `up` or another command started in this state folder."""
    from rag_pipeline import local_stack

    for line in local_stack.down(_workspace(config, alias, state), parts or []):
        typer.echo(line)


@app.command()
def doctor(*, as_json: Json = False, alias: Alias = None, state: State = None, config: Config = None) -> None:
    """Check model, store, locks, disk and versions, and say what to do."""
    from rag_pipeline import local_stack

    findings = local_stack.diagnose(_workspace(config, alias, state))
    if as_json:
        _print_json([{"name": item.name, "ok": item.ok, "text": item.text} for item in findings])
    else:
        typer.echo("\n".join(f"{'ok  ' if item.ok else 'FAIL'}  {item.name}: {item.text}" for item in findings))
    if not all(item.ok for item in findings):
        raise typer.Exit(3)


def main() -> None:
    """Run the command; an error of this project or of the system becomes one message and its exit code."""
    try:
        app()
    except RagPipelineError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(_system_fault(error), UnavailableError.exit_code)


def _fail(message: str, exit_code: int) -> None:
    from rag_pipeline import console

    console.note(f"rag-pipeline: {message}")
    sys.exit(exit_code)


def _system_fault(error: OSError) -> str:
    in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "a file is where a folder should be" if in_the_way else error.strerror or type(error).__name__
    place = error.filename if error.filename is not None else f"state folder {_STATE.get() or 'unknown'}"
    return f"{place}: {reason}. Check that path, its permissions and the free space, or set another one (--state)."


if __name__ == "__main__":
    main()
