"""What a thread is seen to do from another one."""

from __future__ import annotations

import threading
import time

import torch

from ddp_manual.rendezvous.stacks import whereabouts


def test_a_thread_that_waits_for_what_was_begun_before_is_inside_a_collective() -> None:
    begun = torch._C.Future([])  # type: ignore[attr-defined]

    def waits() -> None:
        begun.wait()

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not (seen := whereabouts(thread.ident or 0))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    begun.set_result(None)
    thread.join()
    assert seen[0]
    assert seen[1].startswith("test_stacks.py:") and seen[1].endswith(" in waits")


def test_a_thread_that_does_something_else_after_a_wait_is_not() -> None:
    begun = torch._C.Future([])  # type: ignore[attr-defined]
    begun.set_result(None)
    waited, seen = threading.Event(), threading.Event()

    def sleeps() -> None:
        begun.wait()
        waited.set()
        while not seen.is_set():
            time.sleep(0.1)

    thread = threading.Thread(target=sleeps, daemon=True)
    thread.start()
    assert waited.wait(30)
    inside, _ = whereabouts(thread.ident or 0)
    seen.set()
    thread.join()
    assert not inside
    assert whereabouts(-1) == (False, "")
