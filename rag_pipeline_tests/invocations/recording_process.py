"""A process that records without end and says what it has recorded: run as a module, and killed, by the fault tests.

Arguments: the state folder, the database URL (blank: SQLite), how many threads.
"""

import os
import sys
import threading
from pathlib import Path

from rag_pipeline.invocations.recorder import InvocationRecorder
from rag_pipeline_tests.invocations.samples import invocation, open_database


def main() -> None:
    state, url, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    recorder = InvocationRecorder(open_database(state, url=url), spool_folder=state / "spool", retention_days=0)

    def record() -> None:
        while True:
            one = invocation()
            recorder.record(one)
            os.write(1, one.id.encode() + b"\n")  # from here on it must not be lost

    for _ in range(threads):
        threading.Thread(target=record).start()


if __name__ == "__main__":
    main()
