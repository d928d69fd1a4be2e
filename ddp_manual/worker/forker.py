"""What ``launch`` starts: ``python .../forker.py CONTROL PARENT ranks=N``. It imports torch, then forks each worker.

A request is a byte on the inherited socket CONTROL with four descriptors: the worker's channel to its agent, the pipe
for faults, stdout and stderr. When the socket closes, this process ends, and its children with it.
"""

import gc
import os
import signal
import socket
import sys
from pathlib import Path


def serve(control: socket.socket) -> tuple[int, ...]:
    """Fork for each request and return its descriptors in the child; end this process when the socket is closed."""
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
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of this folder
    from ddp_manual.worker import process

    process.leave_signals_to_the_agent()
    process.die_with_parent(parent)

    import torch

    from ddp_manual.worker.task import main

    gc.freeze()
    forker = os.getpid()
    channel, faults, out, err = serve(socket.socket(fileno=own))
    os.setsid()
    process.die_with_parent(forker)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    # The forker's streams may have another encoding, and unwritten output in their buffers.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    process.leave_stacks_in(faults)
    # Unseeded random numbers differ between ranks, as they do between ranks that start a Python each.
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    main(channel)
