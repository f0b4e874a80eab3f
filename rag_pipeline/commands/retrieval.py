"""Commands that ask the index: search, lookup, invocations, replay."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_pipeline.commands.options import Alias, Config, Json, State, print_json, print_lines, settings_of
from rag_pipeline.errors import CheckFailedError, ConfigurationError, StoreUnavailableError

if TYPE_CHECKING:
    from rag_pipeline.invocations.store import InvocationStore
    from rag_pipeline.settings import Settings

invocations = typer.Typer(no_args_is_help=True, help="Recorded lookups.")

Session = Annotated[str, typer.Option("--session", help="Session: evidence it was given before is not repeated.")]
Mode = Annotated[str | None, typer.Option("--mode", help="auto, langchain or sdk (retrieval.vector_store.mode).")]


def search(
    *,
    query: Annotated[str | None, typer.Argument(help="What to look for.")] = None,
    queries: Annotated[
        Path | None, typer.Option("--queries", help="JSON lines with id and query; prints one ranking a line.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, max=1000, help="Chunks to return.")] = None,
    mode: Mode = None,
    category: Annotated[str, typer.Option("--category", help="Only chunks of this category.")] = "",
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Candidates for a query after hints, filter and rerank, from the promoted version."""
    from rag_pipeline import console
    from rag_pipeline.retrieval.pipeline import KnowledgeLookup

    if (query is None) == (queries is None):
        raise ConfigurationError("Give a query, or --queries FILE.jsonl; not both.")
    wanted = console.read_queries(queries) if queries else []
    settings = settings_of(config, alias, state, retrieval__vector_store__mode=mode)
    _say_loading()
    with KnowledgeLookup(settings, record=False) as knowledge:
        if query is not None:
            found = knowledge.search(query, top_k=top_k, category=category).ranked
            if as_json:
                print_json([console.ranked_record(rank, item) for rank, item in enumerate(found, 1)])
            else:
                typer.echo(
                    "\n\n".join(console.ranked_text(rank, item) for rank, item in enumerate(found, 1))
                    or "nothing found"
                )
            return
        print_lines(
            {
                "id": key,
                "ranking": [
                    console.ranking_record(item.candidate)
                    for item in knowledge.search(text, top_k=top_k, category=category).ranked
                ],
            }
            for key, text in wanted
        )


def lookup(
    *,
    query: Annotated[str | None, typer.Argument(help="What to look for.")] = None,
    session: Session = "",
    payload: Annotated[
        Path | None, typer.Option("--payload", help="Alert payload, a JSON file or - for standard input.")
    ] = None,
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Evidence for a query or an alert, as an agent gets it; recorded."""
    from rag_pipeline.commands import lookup_text
    from rag_pipeline.retrieval.pipeline import KnowledgeLookup

    if (query is None) == (payload is None):
        raise ConfigurationError("Give a query, or --payload FILE.json; not both.")
    alert = _payload(payload) if payload else {}
    settings = settings_of(config, alias, state)
    _say_loading()
    with KnowledgeLookup(settings) as knowledge:
        if query is None:
            result = knowledge.lookup_for_alert(alert, session_id=session)
        else:
            result = knowledge.lookup(query, session_id=session)
        # Before the record is written, which may take its time.
        if as_json:
            print_json(result.to_dict())
        else:
            lookup_text.show(lookup_text.result_text(result))
    if result.evidence_status == "retrieval_unavailable":
        raise StoreUnavailableError(result.message)


@invocations.command(name="list")
def list_(
    *,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many, newest first.")] = 20,
    session: Annotated[str, typer.Option("--session", help="Only those of this session.")] = "",
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Recorded lookups, newest first; with --json one line each."""
    from rag_pipeline.commands import lookup_text

    found = _store(settings_of(config, alias, state)).list(limit=limit, session_id=session)
    if as_json:
        print_lines(lookup_text.invocation_record(item, details=False) for item in found)
    else:
        lookup_text.show(lookup_text.invocations_text(found))


@invocations.command()
def show(
    *,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id, or its first six or more characters.")],
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """One recorded lookup with its whole trace."""
    from rag_pipeline.commands import lookup_text

    found = _recorded(settings_of(config, alias, state), id_)
    if as_json:
        print_json(lookup_text.invocation_record(found, details=True))
    else:
        lookup_text.show(lookup_text.invocation_text(found))


def replay(
    *,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id, or its first six or more characters.")],
    as_json: Json = False,
    alias: Alias = None,
    state: State = None,
    config: Config = None,
) -> None:
    """Run a recorded lookup again on its version, with its settings; exit code 1 when the answer differs."""
    from rag_pipeline.commands import lookup_text
    from rag_pipeline.retrieval.replay import replay as run

    settings = settings_of(config, alias, state)
    found = run(settings, _recorded(settings, id_))
    if as_json:
        print_json(
            {
                "id": found.recorded.id,
                "same": found.same,
                "differences": list(found.differences),
                "result": found.result.to_dict(),
            }
        )
    else:
        lookup_text.show(lookup_text.result_text(found.result))
    if not found.same:
        raise CheckFailedError(
            f"The answer to invocation {found.recorded.id} is not the one that was recorded: "
            + ("; ".join(found.differences) or "the same blocks, in other words or with other scores")
            + "."
        )
    if not as_json:
        typer.echo(f"\nThe same answer as on {found.recorded.created_at:%Y-%m-%d %H:%M:%S} UTC.")


def _payload(file: Path) -> dict[str, Any]:
    shown = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"The alert payload in {shown} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"The alert payload in {shown} is no JSON object.")
    return found


def _store(settings: "Settings") -> "InvocationStore":
    from rag_pipeline.invocations.database import Database
    from rag_pipeline.invocations.store import InvocationStore

    return InvocationStore(Database(settings.database, state=settings.state), patterns=settings.invocations.redact)


def _recorded(settings: "Settings", id_: str) -> Any:
    found = _store(settings).get(id_)
    if found is None:
        raise ConfigurationError(f"There is no recorded lookup {id_}; `rag-pipeline invocations list` shows them.")
    return found


def _say_loading() -> None:
    from rag_pipeline import console

    if sys.stderr.isatty():
        console.note("loading the model …")
