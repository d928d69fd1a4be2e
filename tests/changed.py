"""Starts a rank as ``run_multi_gpu_train.py`` does, with something changed in its agent or its worker."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def is_worker() -> bool:
    """Return whether this program was started in place of a worker, or of the process that forks workers: its arguments
    then begin with numbers."""
    return all(word.isdigit() for word in sys.argv[1:3]) and len(sys.argv) > 3


def run_agent(program: str, arguments: Sequence[str]) -> None:
    """Run a command of the command line as an agent that starts ``program`` in place of its worker."""
    from ddp_manual.agent import worker_process
    from ddp_manual.cli import main

    worker_process.PROGRAM = Path(program).resolve()
    main(arguments)


def run_worker(change: Callable[[], None]) -> None:
    """Run the worker, and call ``change`` before it loads anything else."""
    from ddp_manual import signals, worker

    die_with_parent = signals.die_with_parent

    def born(parent: int) -> None:
        die_with_parent(parent)
        signals.die_with_parent = die_with_parent  # a fork is changed already
        change()

    signals.die_with_parent = born
    runpy.run_path(str(Path(str(worker.__file__)).with_name("__main__.py")), run_name="__main__")
