"""What ``launch`` starts: ``python .../forker.py CONTROL PARENT ranks=N``. It imports torch, then forks each worker.

Each request is a byte on the inherited socket CONTROL, with four descriptors: the worker's channel to its agent, the
pipe for faults, and those for its stdout and stderr. It ends when the socket does, and its children with it.
"""

import gc
import os
import signal
import socket
import sys
from pathlib import Path


def serve(control: socket.socket) -> tuple[int, ...]:
    """Fork for each request; returns its descriptors in the child. Without a further request it ends the process."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if not request:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            return tuple(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    own, parent = map(int, sys.argv[1:3])
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder
    from ddp_manual.worker import birth

    birth.leave_signals_to_the_agent()
    birth.die_with_parent(parent)

    import torch

    from ddp_manual.worker.main import main

    gc.freeze()
    forker = os.getpid()
    channel, faults, out, err = serve(socket.socket(fileno=own))
    os.setsid()
    birth.die_with_parent(forker)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    # The forker's own may have been of another kind, and have something in their buffers.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    birth.leave_stacks_in(faults)
    # Ranks that start as Pythons of their own draw other numbers each, where nobody has seeded them.
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    main(channel)
