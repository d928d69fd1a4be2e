"""What is left of workers is ended by the process that adopts it: real processes, each test in a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to an ancestor")

# A worker is a shell in a session of its own, which says the pids of what it has started.
STARTS = """
import asyncio, os, subprocess, sys
import psutil
from ddp_manual import orphans
from tests.conftest import has_ended, wait_until

started = []

def worker(command):
    script = command + "; echo ready; exec sleep 100"
    marked = {**os.environ, orphans.MARK: str(os.getpid())}
    how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": marked}
    process = subprocess.Popen(["sh", "-c", script], **how)
    orphans.note_own(process)
    pids = [int(line) for line in iter(process.stdout.readline, "ready\\n")]
    started.extend([process.pid, *pids])
    return process, pids

def gone(pids):
    return not any(map(psutil.pid_exists, pids))

def live(pids):
    return not any(map(has_ended, pids))

try:
    exec(sys.stdin.read())
finally:
    for pid in started:
        if live([pid]):
            os.kill(pid, 9)
print("passed")
"""


# Where a process sees no more than its own user's, as on many shared hosts: that of the shell has a capability more.
HIDDEN = """
mount -t proc -o hidepid=1,gid=65534 proc /proc
setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace "$@"
exit $?
"""


def runs(program: str, *before: str) -> None:
    words = [*before, sys.executable, "-c", STARTS]
    given = textwrap.dedent(program)
    done = subprocess.run(words, cwd=REPOSITORY, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("passed\n"), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_what_a_worker_leaves_is_ended_where_other_processes_are_hidden() -> None:
    runs(
        """
        orphans.adopt()
        process, pids = worker("sleep 100 & echo $!; setsid sleep 100 & echo $!")
        children = orphans.Children()
        children.look(process.pid)
        try:
            psutil.Process(1).ppid()
            raise SystemExit("it is not hidden")
        except psutil.AccessDenied:
            pass
        process.kill()
        process.wait()
        asyncio.run(children.end())
        assert gone(pids) and len(children.ended) == 2, children.ended
        more = subprocess.Popen(["sleep", "100"])
        orphans.end_all()
        assert gone([more.pid])
        """,
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", HIDDEN, "sh"),
    )


def test_what_belongs_to_another_worker_of_this_process_or_was_there_before_goes_on() -> None:
    runs(
        """
        before = subprocess.Popen(["sleep", "100"])
        started.append(before.pid)
        orphans.adopt()
        command = "sleep 100 & echo $!; setsid sleep 100 & echo $!"
        (one, its), (other, others) = worker(command), worker(command)
        orphan = "(sleep 100 & echo $!)"
        third, left = worker(orphan)
        children = orphans.Children()
        children.look(one.pid)
        one.kill(), one.wait()
        asyncio.run(children.end(one.pid))
        assert gone(its)
        assert live([before.pid, other.pid, third.pid, *others, *left])
        for process in (other, third):
            process.kill(), process.wait()
        asyncio.run(orphans.Children().end())
        assert gone([*others, *left]) and live([before.pid])
        """
    )


def test_orphans_that_end_are_no_zombies_and_children_keep_their_exit_status() -> None:
    runs(
        """
        orphans.adopt()
        process, (orphan,) = worker("(sh -c 'echo $$; exec sleep 100' & sleep 0.2)")
        child = subprocess.Popen(["sh", "-c", "exit 7"])
        orphans.note_own(child)
        wait_until(lambda: has_ended(child.pid))
        os.kill(orphan, 9)
        wait_until(lambda: has_ended(orphan))
        orphans.reap()
        assert child.wait() == 7
        orphans.reap()
        assert gone([orphan]) and process.poll() is None
        """
    )


def test_a_script_that_is_ended_without_teardown_ends_its_daemons_as_python_would() -> None:
    runs(
        """
        import multiprocessing, time
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=time.sleep, args=(100,), daemon=daemon) for daemon in (True, False)]
        for process in processes:
            process.start()
            started.append(process.pid)
        orphans.end_daemons()
        processes[0].join(10)
        assert [process.exitcode for process in processes] == [-15, None]
        """
    )


def test_a_child_that_this_process_has_forked_for_itself_is_no_orphan() -> None:
    runs(
        """
        from ddp_manual import signal_handlers
        orphans.adopt()
        witness = signal_handlers.Witness(own_session=False, words=[])
        process, pids = worker("setsid sleep 100 & echo $!")
        process.kill()
        process.wait()
        asyncio.run(orphans.Children().end())
        wait_until(lambda: gone(pids))
        assert live([witness.pid])
        witness.close()
        """
    )
