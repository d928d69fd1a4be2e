"""The process that gets what is sent to all processes of a rank: real signals, in a Python of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_manual.agent.coordinator import stopped_agent
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel shows pending signals on Linux")

PROGRAM = """
import os, signal, subprocess, time
from ddp_manual import process_status, signal_handlers

os.setpgid(0, 0)
signal.signal(signal.SIGTERM, lambda number, frame: None)
programs = [subprocess.Popen(["sleep", "100"], process_group=group) for group in (None, 0)]
ours, of_its_own = (program.pid for program in programs)
witness = signal_handlers.Witness(own_session=False, words=[])

def until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def pending():
    return process_status.signals_of(witness.pid, "ShdPnd")

def send():
    os.killpg(0, signal.SIGTERM)
    until(pending)

try:
    send()
    witness.forget()  # what nobody has asked about
    until(lambda: not pending())
    assert not witness.was_sent_to(signal.SIGTERM, ours)
    time.sleep(signal_handlers.ONCE_WITHIN + 0.1)
    send()
    assert witness.was_sent_to(signal.SIGTERM, ours)
    assert not witness.was_sent_to(signal.SIGTERM, of_its_own)
finally:
    witness.close()
    for program in programs:
        program.kill(), program.wait()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="subprocess sets no process group")
def test_a_program_of_our_process_group_has_got_what_was_sent_last_and_one_with_its_own_group_has_not() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_witness_is_found_by_the_name_and_the_words_of_a_worker_and_not_by_those_of_its_agent() -> None:
    """As pkill and killall look for processes: what they send to an agent alone is passed on to its program."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ddp_manual import signal_handlers\n"
        "witness = signal_handlers.Witness(own_session=True, words=['/lib/worker', 'runs=train.py'])\n"
        "file = Path(f'/proc/{witness.pid}/cmdline')\n"
        "while not file.read_bytes().endswith(b'runs=train.py' + bytes(1)): pass\n"
        "print(file.with_name('comm').read_text(), *file.read_bytes().decode().split(chr(0)))\n"
        "witness.close()\n"
    )
    command = [sys.executable, "-c", program, "ddp-manual", "run", "train.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    name, *_, worker, runs = done.stdout.split()
    assert (name, worker, runs) == (Path(sys.executable).name, "/lib/worker", "runs=train.py"), done.stderr
    assert f" {sys.executable} -I -S -c " in done.stdout.replace("\n", " ") and "ddp-manual" not in done.stdout


def test_an_agent_that_a_shell_has_seen_stop_is_named_although_its_signal_is_not_known_any_more() -> None:
    agent = subprocess.Popen(["sleep", "60"])
    try:
        assert stopped_agent(agent.pid) == ""
        agent.send_signal(signal.SIGSTOP)
        os.waitpid(agent.pid, os.WUNTRACED)  # as a shell does for a job, which takes the number away
        go_on = f"kill -CONT {agent.pid}, or fg in its terminal, lets it go on"
        assert stopped_agent(agent.pid) == f"a stop signal (such as Ctrl-Z) has stopped its agent; {go_on}"
    finally:
        agent.kill()
        agent.wait()
