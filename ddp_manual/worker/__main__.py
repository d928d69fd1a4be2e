"""The program of a worker: an agent starts ``python .../ddp_manual/worker CHANNEL FAULTS HELD PARENT rank=K of=N``.

``launch``, and an agent whose worker may be replaced, start ``python .../ddp_manual/worker CONTROL PARENT ranks=N``,
which imports torch once and then forks each worker. A request is a byte on the inherited socket CONTROL with five
descriptors: the worker's channel to its agent, the pipe for faults, the held memory, stdout and stderr. When the socket
closes, that process ends, and its children with it. With ``in=terminal`` the workers stay in the terminal's session.
If an import has initialised CUDA, forks could not use CUDA: each of them then becomes a new Python.

A further word ``runs=NAME`` says what the rank runs, and ``kind=executable`` that this is not Python;
``import=NAME,NAME`` which modules to import before the first fork.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of this folder

from ddp_manual import orphans, signal_handlers, terminal
from ddp_manual.environment import variables_for_a_rank
from ddp_manual.environment.start_python import become_new_python
from ddp_manual.errors import PeerLost
from ddp_manual.from_worker import Failed
from ddp_manual.program import EXECUTABLE
from ddp_manual.ranks_and_runs import LastWords
from ddp_manual.wire import encode_local


def serve_forks(control: socket.socket) -> tuple[int, Sequence[int]]:
    """Fork for each request; in the child, return how many requests came before it, and this request's descriptors.
    Kill this process when the socket is closed."""
    before = 0
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 5)
        if not request:
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(ChildProcessError):  # no child is left; this reaps workers whose agents have seen their end
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            if os.fork() == 0:
                control.close()
                return before, descriptors
        except OSError as error:  # at a limit of processes or memory
            next = "look at the limits of its host: ulimit -a, free"
            refused = PeerLost(f"no process can be forked for its worker: {error.strerror}", why="", next=next)
            with suppress(OSError):  # its agent has given it up meanwhile
                os.write(descriptors[0], encode_local(Failed(LastWords.of(refused))))
        for descriptor in descriptors:
            os.close(descriptor)
        before += 1


def become_forked_worker(parent: int, faults: int, out: int, err: int, *, has_session: bool) -> None:
    """Make this fork of ``parent`` equal to a worker that was started as a new Python process.

    Args:
        has_session: whether this process gets a session of its own.
    """
    if has_session:
        os.setsid()
    orphans.die_with_parent(parent)
    for number, descriptor in ((1, out), (2, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The parent's streams may have another encoding, and unwritten output in their buffers.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal_handlers.write_stacks_to(faults)
    # Unseeded random numbers differ between ranks.
    sys.modules["torch"].seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    *descriptors, parent = (int(word) for word in sys.argv[1:] if word.isdigit())
    who = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    forks = len(descriptors) == 1
    if not forks:
        signal_handlers.write_stacks_to(descriptors[1])
    ignored = signal_handlers.ignored_at_start()
    signal_handlers.leave_signals_to_the_agent()
    orphans.die_with_parent(parent)

    if who.get("kind") == EXECUTABLE:
        from ddp_manual.worker import executable

        executable.main(descriptors[0], ignored)
        raise SystemExit(1)  # the exec has failed
    gc.disable()  # what torch makes while it is imported stays: to look through it takes a fifth of that time
    with variables_for_a_rank.cuda_is_only_looked_for() if forks else nullcontext():
        from ddp_manual.worker import script

        if forks:
            script.preload(who["import"].split(","))
    if forks:
        gc.freeze()
        parent = os.getpid()
        before, (channel, faults, held, *streams) = serve_forks(socket.socket(fileno=descriptors[0]))
        become_forked_worker(parent, faults, *streams, has_session=who.get("in") != "terminal")
        # torch tells this only to a fork: an import may have called is_available, which without NVML initialises CUDA.
        if sys.modules["torch"].cuda._is_in_bad_fork():
            if not before:
                terminal.say("an import has begun CUDA, which no fork can use: the ranks here start as new processes")
            become_new_python((channel, faults, held), parent, ignored)
    else:
        channel, faults, held = descriptors
    script.main(channel, ignored, held, is_copied=forks and who.get("in") != "terminal")
