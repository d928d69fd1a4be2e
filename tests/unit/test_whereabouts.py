"""Where a thread is, seen from another thread, and what is shown of the stacks that faulthandler writes."""

from __future__ import annotations

import faulthandler
import json
import os
import pdb  # noqa: T100  # to look for its prompt
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_manual.agent.worker_stack import readable_stack
from ddp_manual.worker import reporter
from ddp_manual.worker.private_torch import CODE_OF_COLLECTIVES
from ddp_manual.worker.whereabouts import Whereabouts, own_traceback, whereabouts


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


def test_a_thread_that_waits_for_an_async_collective_is_inside_it_until_it_has_waited() -> None:
    begun, waited, seen_outside = torch._C.Future([]), threading.Event(), threading.Event()  # type: ignore[attr-defined]

    def waits() -> None:
        begun.wait()
        waited.set()
        seen_outside.wait(30)

    with a_thread_that(waits) as thread:
        seen = seen_once(thread, lambda seen: seen.inside)
        begun.set_result(None)
        assert waited.wait(30)
        later = whereabouts(thread.ident or 0)
        seen_outside.set()
    assert seen.inside and not seen.debugging and not later.inside
    assert seen.place.startswith("test_whereabouts.py:") and seen.place.endswith(" in waits")
    assert whereabouts(-1) == Whereabouts(inside=False, place="", debugging=False)


def test_a_thread_that_waits_for_the_end_of_one_that_is_in_a_collective_counts_as_inside_it() -> None:
    begun = torch._C.Future([])  # type: ignore[attr-defined]

    def waits() -> None:
        begun.wait()

    with a_thread_that(waits) as waiting, a_thread_that(waiting.join) as thread:
        seen = seen_once(thread, lambda seen: seen.inside)
        begun.set_result(None)
    assert seen.inside and seen.place.endswith(" in waits")


def test_a_thread_that_opens_a_group_waits_there_for_as_long_as_was_chosen_for_that_group() -> None:
    """The call is a stand-in, in a file with the name of torch's."""
    all_here = threading.Event()
    names: dict[str, Any] = {"wait": all_here.wait}
    code = "def init_process_group(timeout):\n    rendezvous()\ndef rendezvous():\n    timeout = None\n    wait(30)"
    exec(compile(code, CODE_OF_COLLECTIVES, "exec"), names)
    with a_thread_that(lambda: names["init_process_group"](timedelta(hours=4))) as thread:
        seen = seen_once(thread, lambda seen: seen.opening)
        all_here.set()
    assert seen.opening and seen.timeout == 14_400.0


@pytest.mark.parametrize("method", ["item", "tolist", "cpu"])
def test_a_thread_that_waits_for_its_device_is_seen(method: str) -> None:
    """The result on a device is a fake, for want of a GPU: a method in C that waits."""
    syncs: dict[str, Callable[[Any], object]] = {
        "item": lambda result: result.item(),
        "tolist": lambda result: result.tolist(),
        "cpu": lambda result: result.cpu(),
    }
    completed = threading.Lock()
    completed.acquire()
    result = SimpleNamespace(**{method: completed.acquire})
    with a_thread_that(lambda: syncs[method](result)) as thread:
        seen = seen_once(thread, lambda seen: seen.syncs)
        completed.release()
    assert seen.syncs and not seen.inside and seen.place.startswith("test_whereabouts.py:")


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


def test_stacks_show_the_main_thread_first_and_leave_out_the_reporters_thread() -> None:
    abort = "Fatal Python error: Aborted"
    ours = f'Thread 0x00007f02 (most recent call first):\n  File "{reporter.__file__}", line 120 in _run'
    other = 'Thread 0x00007f01 (most recent call first):\n  File "loader.py", line 5 in load'
    main = 'Current thread 0x00007f00 (most recent call first):\n  File "train.py", line 7 in <module>'
    modules = "Extension modules: numpy._core, torch._C (total: 2)"
    assert readable_stack("\n\n".join([abort, ours, other, main, modules])) == f"{abort}\n{main}\n{other}"
    assert readable_stack("") == ""


def test_a_stack_shows_the_innermost_frames_and_the_programs_and_counts_those_of_libraries() -> None:
    installed, python = "/venv/lib/python3.12/site-packages", Path(os.__file__).parent
    frames = [
        f'  File "{installed}/torch/autograd/graph.py", line 1 in backward',
        f'  File "{installed}/torch/_tensor.py", line 2 in backward',
        f'  File "{installed}/lightning/module.py", line 3 in backward',
        f'  File "{installed}/lightning/trainer.py", line 4 in fit',
        '  File "/home/me/torch/train.py", line 5 in main',
        '  File "/home/me/torch/train.py", line 6 in <module>',
        f'  File "{Path(reporter.__file__).with_name("script.py")}", line 7 in run',
        f'  File "{python}/threading.py", line 8 in run',
        '  File "<frozen runpy>", line 9 in _run_code',
    ]
    title = "Current thread 0x00007f00 (most recent call first):"
    shown = readable_stack("\n".join([title, *frames])).splitlines()
    assert shown == [title, *frames[:3], *frames[4:6], "  (2 frames of libraries left out)"]


def test_a_program_below_a_hundred_frames_of_libraries_is_still_named_by_its_own_line() -> None:
    library = [f'  File "/venv/lib/python3.12/site-packages/a.py", line {number} in f' for number in range(100)]
    stack = "\n".join(["Current thread 0x00007f00 (most recent call first):", *library, "  ..."])
    assert readable_stack(stack, "train.py:5 in main").splitlines()[-1] == (
        "  (the program's own line, below them: train.py:5 in main)"
    )
    own = stack.replace(library[50], '  File "/home/me/train.py", line 5 in main')
    assert "below them" not in readable_stack(own, "train.py:5 in main")


def test_a_traceback_has_the_frames_of_libraries_if_they_are_wanted(tmp_path: Path) -> None:
    """A package that was installed in development mode is no library: it lies beside the program."""
    library, package = tmp_path / "site-packages" / "tool.py", tmp_path / "src" / "mine.py"
    program: dict[str, Any] = {"loads": json.loads}
    for path, text in ((library, "def call(one):\n    one()\n"), (package, "def read():\n    loads('{')\n")):
        path.parent.mkdir()
        path.write_text(text)
        exec(compile(text, str(path), "exec"), program)
    with pytest.raises(ValueError, match="Expecting") as caught:
        program["call"](program["read"])
    short, whole = own_traceback(caught.value), own_traceback(caught.value, whole=True)
    assert 'mine.py", line 2, in read' in short and "in call" not in short
    assert "of libraries left out: --full_traceback)" in short
    assert 'mine.py", line 2, in read' in whole and 'tool.py", line 2, in call' in whole and "left out" not in whole


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
