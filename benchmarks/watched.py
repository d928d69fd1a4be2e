"""Starts one rank as ``run_multi_gpu_train.py`` does, with its watchdog or without, and keeps what the threads cost.

python benchmarks/watched.py on|off FOLDER <train options>

FOLDER gets ``cost-rank<k>.json``: seconds that the run was watched, and CPU seconds of the watchdog's threads and, on
rank 0, of the thread that serves the store.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

# As torch names the thread; a thread of C has no other name.
STORE_THREAD = "pt_tcpstore"


def cpu_seconds_of_threads(prefix: str) -> float:
    """Of the Python threads of this process whose name begins so."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def cpu_seconds_of_the_store() -> float:
    seconds = 0.0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith(STORE_THREAD):
            # The first of the three is the time on a core, in nanoseconds.
            seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def install(side: str, folder: Path) -> None:
    from ddp_manual.rendezvous.stacks import OWN_THREADS
    from ddp_manual.rendezvous.watchdog import Watchdog

    start, stand_down = Watchdog.start, Watchdog.stand_down
    began: dict[str, float] = {}

    def start_and_note(watchdog: Watchdog) -> None:
        began["at"], began["store"] = time.monotonic(), cpu_seconds_of_the_store()
        if side == "on":
            start(watchdog)

    def note_and_stand_down(watchdog: Watchdog) -> object:
        cost = {
            "seconds": time.monotonic() - began["at"],
            "watchdog": cpu_seconds_of_threads(OWN_THREADS),
            "store": cpu_seconds_of_the_store() - began["store"],
        }
        (folder / f"cost-rank{watchdog.watched.rank}.json").write_text(json.dumps(cost))
        return stand_down(watchdog) if side == "on" else None

    Watchdog.start = start_and_note  # type: ignore[method-assign]
    Watchdog.stand_down = note_and_stand_down  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    _, side, folder, *options = sys.argv
    install(side, Path(folder))
    from ddp_manual.cli import main

    main(["train", *options])
