"""How a worker has ended without a word: by a signal, for want of memory, in native code, or with an exit code."""

from __future__ import annotations

import signal

from ddp_manual.errors import DdpManualError, signal_name
from ddp_manual.protocol.agent_shell import WorkerSeen
from ddp_manual.protocol.verdict_words import lost_rank
from ddp_manual.ranks_and_runs import LONGEST_TEXT, RankInfo

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
STORE_REPLACED = (
    "rank 0's program has become another one (exec), without torch's store, which was in its process: no rank can open "
    "a process group"
)
WITHOUT_PYTHON = "start it with --no_python, as --no_python python train.py: then torch hosts the store in the program"


def lost(info: RankInfo, worker: WorkerSeen, again: str, *, replaced: bool) -> DdpManualError:
    """Return the error of a rank whose worker has ended without a word.

    Args:
        replaced: whether its program had become another one by exec, on rank 0.
    """
    status, stack, ran_out = worker.status, worker.crash_stack, worker.ran_out_of_memory
    next = "look at its last lines"
    if status is None:
        counted = "; since it was started, its memory cgroup counts one more oom_kill" if ran_out else ""
        what, why = "its process has ended", f"nobody could see how it ended{counted}"
    elif ran_out:
        what = f"{signal_name(-status)}, since memory ran out"
        why = "the kernel's OOM killer ended it: its memory cgroup counts one more oom_kill"
        next = "give it more memory, or a smaller --batch_size"
    elif -status in CRASHES:
        what = signal_name(-status)
        why = f"its worker crashed in native code: {what}"
        next = "repair the call that the stack shows; its last lines may say more"
        if status == -signal.SIGABRT and not stack:
            next += "\nif they say 'terminate called without an active exception', a thread of gloo still held a tensor"
            next += "\nwhile Python ended: call torch.distributed.destroy_process_group() at the end of the program"
    elif status < 0:
        what = signal_name(-status)
        why = f"{what} ended its worker; its memory cgroup has not run out of memory"
        next = f"look at its last lines, and at who sends signals on {info.host}"
    else:
        what = f"its worker exited with code {status} without a word"
        why = "the program ended itself, or its interpreter could not go on"
    where = f"it was {worker.beat.last_seen()}, when it was last heard"
    if replaced:
        why, next = f"{why}\n{STORE_REPLACED}", WITHOUT_PYTHON
    error = lost_rank(
        info,
        f"is gone: {what}",
        why="\n".join(filter(None, (why, where, stack and f"its Python stack:\n{stack[-LONGEST_TEXT:]}"))),
        next=f"{next}\nthen {again}",
    )
    error.exit_code = exit_code(status) or error.exit_code
    return error


def exit_code(status: int | None) -> int:
    """Return the exit code that a shell shows for this ``WorkerSeen.status``."""
    return 1 if status is None else 128 - status if status < 0 else status
