"""What a thread is seen to do from another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ddp_manual.rendezvous.stacks import whereabouts


@contextmanager
def doing(action: Callable[[], object]) -> Iterator[int]:
    """A thread that does this, and has got so far as to be blocked in it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    time.sleep(0.2)
    assert thread.ident is not None
    yield thread.ident
    thread.join()


def test_a_thread_that_waits_for_what_was_begun_before_is_inside_a_collective() -> None:
    begun = torch._C.Future([])  # type: ignore[attr-defined]

    def waits() -> None:
        time.sleep(0)
        begun.wait()

    with doing(waits) as thread:
        inside, place = whereabouts(thread)
        begun.set_result(None)
    assert inside
    assert place.startswith("test_stacks.py:") and place.endswith(" in waits")


def test_a_thread_that_does_something_else_beside_a_wait_is_not() -> None:
    begun = torch._C.Future([])  # type: ignore[attr-defined]
    begun.set_result(None)

    def sleeps() -> None:
        begun.wait()
        time.sleep(1)

    with doing(sleeps) as thread:
        inside, _ = whereabouts(thread)
    assert not inside
    assert whereabouts(-1) == (False, "")
