"""Runs the command as a person would, without a process of its own."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path


def run_in(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in this process (a new one would import torch each time), as if typed in ``folder``."""
    from rag_pipeline.cli import main

    before = Path.cwd(), dict(os.environ), sys.argv
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    try:
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv = ["rag-pipeline", *arguments]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        os.chdir(before[0])
        os.environ.clear()
        os.environ.update(before[1])
        sys.argv = before[2]
    return subprocess.CompletedProcess(arguments, int(code or 0), out.getvalue(), err.getvalue())
