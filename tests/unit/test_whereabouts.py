"""Where a thread is, seen from another thread, and what is shown of the stacks that faulthandler writes."""

from __future__ import annotations

import faulthandler
import os
import pdb  # noqa: T100  # to look for its prompt
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ddp_manual.agent.worker_process import readable_stack
from ddp_manual.worker import reporter
from ddp_manual.worker.reporter import Whereabouts, raised_at, whereabouts


@contextmanager
def a_thread_that(does: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=does, daemon=True)
    thread.start()
    yield thread
    thread.join(30)
    assert not thread.is_alive()


def seen_once(thread: threading.Thread, there: Callable[[Whereabouts], bool]) -> Whereabouts:
    """Return where the thread is once ``there`` is true, otherwise where it was last."""
    deadline = time.monotonic() + 30
    while not there(seen := whereabouts(thread.ident or 0)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return seen


def test_a_thread_that_waits_for_an_async_collective_is_inside_it() -> None:
    begun = torch._C.Future([])  # type: ignore[attr-defined]

    def waits() -> None:
        begun.wait()

    with a_thread_that(waits) as thread:
        seen = seen_once(thread, lambda seen: seen.inside)
        begun.set_result(None)
    assert seen.inside and not seen.debugging
    assert seen.place.startswith("test_whereabouts.py:") and seen.place.endswith(" in waits")


def test_a_thread_that_has_finished_waiting_is_not_inside_a_collective() -> None:
    begun = torch._C.Future([])  # type: ignore[attr-defined]
    begun.set_result(None)
    waited, seen = threading.Event(), threading.Event()

    def sleeps() -> None:
        begun.wait()
        waited.set()
        while not seen.is_set():
            time.sleep(0.1)

    with a_thread_that(sleeps) as thread:
        assert waited.wait(30)
        inside = whereabouts(thread.ident or 0).inside
        seen.set()
    assert not inside
    assert whereabouts(-1) == Whereabouts(inside=False, place="", debugging=False)


def test_a_thread_in_a_debugger_is_on_the_line_of_the_program_that_called_the_debugger() -> None:
    come, go = os.pipe()

    def debugs() -> None:
        with os.fdopen(come) as typed, open(os.devnull, "w") as shown:
            pdb.Pdb(stdin=typed, stdout=shown, nosigint=True, readrc=False).set_trace()

    with a_thread_that(debugs) as thread:
        seen = seen_once(thread, lambda seen: seen.debugging)
        os.write(go, b"continue\n")
        os.close(go)
    assert seen.debugging and not seen.inside
    assert seen.place.startswith("test_whereabouts.py:") and seen.place.endswith(" in debugs")


def test_an_exception_is_located_in_the_program_not_in_a_library() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2).reshape(3)
    assert raised_at(caught.value).startswith("test_whereabouts.py:")
    assert raised_at(ValueError("never raised")) == ""


def test_stacks_show_the_main_thread_first_and_leave_out_the_reporters_thread() -> None:
    ours = Path(reporter.__file__)
    text = "\n".join(
        [
            "Fatal Python error: Aborted",
            "",
            "Thread 0x00007f02 (most recent call first):",
            f'  File "{ours}", line 120 in _run',
            "",
            "Thread 0x00007f01 (most recent call first):",
            '  File "loader.py", line 5 in load',
            "",
            "Current thread 0x00007f00 (most recent call first):",
            '  File "train.py", line 7 in <module>',
            "",
            "Extension modules: numpy._core, torch._C (total: 2)",
        ]
    )
    assert readable_stack(text).splitlines() == [
        "Fatal Python error: Aborted",
        "Current thread 0x00007f00 (most recent call first):",
        '  File "train.py", line 7 in <module>',
        "Thread 0x00007f01 (most recent call first):",
        '  File "loader.py", line 5 in load',
    ]
    assert readable_stack("") == ""


def test_the_stacks_that_faulthandler_writes_of_this_process_are_readable() -> None:
    leave = threading.Event()
    with tempfile.TemporaryFile() as file:
        with a_thread_that(lambda: leave.wait(30)) as thread:
            seen_once(thread, lambda seen: "test_whereabouts.py" in seen.place)
            faulthandler.dump_traceback(file)
            leave.set()
        file.seek(0)
        shown = readable_stack(file.read().decode())
    blocks = shown.split("thread 0x")
    assert "in test_the_stacks_that_faulthandler_writes_of_this_process_are_readable" in blocks[1]
    assert "in <lambda>" in shown
