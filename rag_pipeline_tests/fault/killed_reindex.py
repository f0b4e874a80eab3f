"""A reindex that kills its own process: run as a module by the fault tests.

Arguments: the settings as JSON, then where to die: a step's name, ``after:<step>`` half way through a step that
reports progress, or ``moved`` right after the alias moved.
"""

import json
import os
import signal
import sys
from pathlib import Path

from rag_pipeline import reindex
from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.settings import load_settings
from rag_pipeline.watch import Watch
from rag_pipeline.workspace import Workspace


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    flags, where = json.loads(sys.argv[1]), sys.argv[2]
    ws = Workspace(load_settings(flags=flags, project_root=Path(flags["state_dir"]).parent))
    watch = Watch(at_step=lambda step: die() if step == where else None)
    if where.startswith("after:"):
        watch.progress = lambda step, _done, _total: die() if step == where.removeprefix("after:") else None
    if where == "moved":
        move = MilvusStore.point_alias
        MilvusStore.point_alias = lambda *arguments: die(move(*arguments))  # type: ignore[method-assign]
    print("started", flush=True)
    reindex.reindex(ws, watch=watch)


if __name__ == "__main__":
    main()
