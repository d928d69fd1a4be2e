"""The process that gets what is sent to all processes of a rank: real signals, each test in a Python of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel shows pending signals on Linux")

BEGINS = """
import os, signal, subprocess, sys, time
from ddp_manual import signals

os.setpgid(0, 0)
signal.signal(signal.SIGTERM, lambda number, frame: None)
programs = [subprocess.Popen(["sleep", "100"], process_group=group) for group in (None, 0)]
ours, of_its_own = (program.pid for program in programs)
witness = signals.Witness(own_session=False)

def until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def pending():
    return signals._signals_of(witness.pid, "ShdPnd")

def send():
    os.killpg(0, signal.SIGTERM)
    until(pending)

try:
    exec(sys.stdin.read())
finally:
    witness.close()
    for program in programs:
        program.kill(), program.wait()
print("passed")
"""


def runs(program: str) -> None:
    words = [sys.executable, "-c", BEGINS]
    given = textwrap.dedent(program)
    done = subprocess.run(words, cwd=REPOSITORY, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("passed\n"), done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="subprocess sets no process group")
def test_a_program_with_a_process_group_of_its_own_has_not_got_what_was_sent_to_ours() -> None:
    runs(
        """
        send()
        assert witness.has_got(signal.SIGTERM, ours) and not witness.has_got(signal.SIGTERM, of_its_own)
        """
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="subprocess sets no process group")
def test_a_signal_that_nobody_has_asked_about_does_not_count_for_a_later_one() -> None:
    runs(
        """
        send()
        witness.forget()
        until(lambda: not pending())
        assert not witness.has_got(signal.SIGTERM, ours)
        time.sleep(signals.ONCE_WITHIN + 0.1)
        send()
        assert witness.has_got(signal.SIGTERM, ours)
        """
    )
