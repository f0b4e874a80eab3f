"""The command ``rag-pipeline``: flags to settings, one function called, its result printed.

Results go to standard output (with ``--json`` one document, or one a line where the help says so), all else to standard
error. Exit codes: 0 done; 1 a check failed; 2 wrong usage or settings; 3 a store or model is unavailable; 4 refused to
protect data.
"""

import io
import os
import sys

import typer

from rag_pipeline.commands import index, retrieval, stack
from rag_pipeline.commands.options import STATE
from rag_pipeline.errors import RagPipelineError, UnavailableError

app = typer.Typer(
    help="Keep a Markdown knowledge base searchable for AI agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    index.reindex,
    index.status,
    index.rollback,
    index.prune,
    index.chunks,
    retrieval.search,
    retrieval.lookup,
    retrieval.replay,
    stack.settings,
    stack.up,
    stack.down,
    stack.doctor,
):
    app.command()(command)
app.add_typer(retrieval.invocations, name="invocations")
app.add_typer(stack.db, name="db")


def main() -> None:
    """Run the command; an error of this project or of the system becomes one message and its exit code."""
    for name in ("stdout", "stderr"):  # closed by a supervisor, or of an encoding that lacks what documents have
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
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
    place = error.filename if error.filename is not None else f"state folder {STATE.get() or 'unknown'}"
    return f"{place}: {reason}. Check that path, its permissions and the free space, or set another one (--state)."


if __name__ == "__main__":
    main()
