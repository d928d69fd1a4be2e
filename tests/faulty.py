"""Starts one rank as ``run_multi_gpu_train.py`` does, but with faults of its own at chosen moments.

python tests/faulty.py raise@training:30 -- --world_size 3 --rank 1 <more train options>

A fault is ``KIND[:SECONDS]@PHASE[:N]``: in step N of training, otherwise the Nth time the rank enters that phase (1 by
default). Kinds: raise; loop (for ever, in Python); sleep; hold (a call of C that keeps the GIL for SECONDS);
slow (this and every later step takes SECONDS longer); eat (memory, until the kernel ends the process); abort (in C++);
break (into the debugger); kill and stop (the signals, to itself). ``--set MODULE.NAME=NUMBER`` before the ``--``
changes a constant, such as one that would make a test long. With no fault at all it still says on stderr when it enters
each phase and when each fault strikes.

What is started is the agent, which starts this program once more in place of its worker; the faults are the worker's.
The three places where they get in are all in ``install``. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Bytes. A process that has this many and still runs has no limit; it ends before it harms the machine.
MOST_EATEN = 4 << 30
# Carries the faults from the agent to its worker.
VARIABLE = "DDP_MANUAL_TEST_FAULTS"


@dataclass(frozen=True)
class Fault:
    kind: str
    seconds: float
    phase: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = re.fullmatch(r"(\w+)(?::([\d.]+))?@(\w+)(?::(\d+))?", text)
        assert match, f"{text} is no KIND[:SECONDS]@PHASE[:N]"
        kind, seconds, phase, number = match.groups()
        return cls(kind, float(seconds or 0), phase, int(number or 1))

    def strike(self) -> None:
        say(f"{self.kind} in {self.phase} {self.number}")
        {
            "raise": fail,
            "loop": loop_for_ever,
            "sleep": lambda: time.sleep(self.seconds),
            "hold": lambda: hold(self.seconds),
            "eat": eat,
            "abort": abort,
            "break": breakpoint,
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        }[self.kind]()


def say(what: str) -> None:
    """Write a line to stderr in one call, so that no other thread writes into it."""
    os.write(2, f"faulty: {what} at {time.monotonic()}\n".encode())


def said_at(text: str, what: str) -> float:
    """Return when a rank of this program said ``what`` for the last time, according to its stderr ``text``."""
    return float(re.findall(rf"faulty: {what} at ([\d.]+)\n", text)[-1])


def faulty(command: Sequence[object], *words: str) -> list[object]:
    """Return the command of a rank with these faults added."""
    program, script, *options = command
    assert script == "run_multi_gpu_train.py"
    return [program, "tests/faulty.py", *words, "--", *options]


def fail() -> None:
    raise ValueError("no such digit")


def loop_for_ever() -> None:
    while True:
        pass


def eat() -> None:
    eaten = [b"x" * (1 << 20)]
    while len(eaten) << 20 < MOST_EATEN:
        eaten.append(b"x" * (1 << 20))
    raise AssertionError(f"{MOST_EATEN} bytes are eaten, and nothing has ended this process")


def hold(seconds: float) -> None:
    """Wait for a lock that is never released; no signal interrupts the wait."""
    mutex, until = ctypes.create_string_buffer(64), time.time() + seconds
    library = ctypes.PyDLL(None)  # which, other than CDLL, does not let go of the GIL
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9)))


def abort() -> None:
    """Abort as a C++ program does after an uncaught exception."""
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


def install(faults: Sequence[Fault]) -> None:
    """Replace three methods: those that set the phase, make a batch and begin a training step."""
    from torch.nn.parallel import DistributedDataParallel

    from ddp_manual.from_worker import Progress
    from ddp_manual.messages import ENDED
    from ddp_manual.training.augment import Normalise

    entered: Counter[str] = Counter()
    now = ""
    make_batch, forward = Normalise.__call__, DistributedDataParallel.forward

    def enter_phase(progress: Progress, name: str, value: Any) -> None:
        nonlocal now
        object.__setattr__(progress, name, value)
        if name != "phase" or value == now:
            return
        now = value
        if value == ENDED:  # by then the agent may have had the last word
            return
        say(f"phase {value}")
        if value != "training":  # of which the steps are counted
            entered[value] += 1
            for fault in faults:
                if (fault.phase, fault.number) == (value, entered[value]):
                    fault.strike()

    def make_batch_late(normalise: Normalise, images: Any) -> Any:
        if now == "training":
            entered["training"] += 1
            for fault in faults:
                if fault.phase == "training" and fault.kind in ("loop", "sleep", "hold"):
                    if fault.number == entered["training"]:
                        fault.strike()
                elif fault.kind == "slow" and fault.number <= entered["training"]:
                    time.sleep(fault.seconds)
        return make_batch(normalise, images)

    def begin_step(model: DistributedDataParallel, *inputs: Any, **options: Any) -> Any:
        for fault in faults:
            if (fault.phase, fault.number) == ("training", entered["training"]) and fault.kind in (
                *("raise", "eat", "kill", "stop", "abort", "break"),
            ):
                fault.strike()
        return forward(model, *inputs, **options)

    Progress.__setattr__ = enter_phase  # type: ignore[method-assign,assignment]
    Normalise.__call__ = make_batch_late  # type: ignore[method-assign]
    DistributedDataParallel.forward = begin_step  # type: ignore[method-assign]


def change(setting: str, *, without: tuple[str, ...]) -> None:
    """Change a constant, unless its module is one that this process must not import."""
    name, _, number = setting.partition("=")
    module, _, constant = name.rpartition(".")
    if module.startswith(without):
        return
    place = importlib.import_module(module)
    assert hasattr(place, constant), f"{module} has no {constant}"
    setattr(place, constant, float(number))


def main(arguments: Sequence[str]) -> None:
    """Run as the agent."""
    words, options = list(arguments[: arguments.index("--")]), list(arguments[arguments.index("--") + 1 :])
    settings = []
    while "--set" in words:
        place = words.index("--set")
        settings.append(words[place + 1])
        del words[place : place + 2]
    for setting in settings:
        change(setting, without=("ddp_manual.worker", "ddp_manual.train"))
    os.environ[VARIABLE] = json.dumps({"faults": words, "settings": settings})
    run_agent(__file__, ["train", *options])


def become_faulty() -> None:
    """Prepare the worker of such an agent."""
    told = json.loads(os.environ[VARIABLE])
    for setting in told["settings"]:
        change(setting, without=("ddp_manual.agent",))
    install([Fault.parse(word) for word in told["faults"]])


if __name__ == "__main__":
    # Python has put this folder there; a rank is started from the one above.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from tests.changed import is_worker, run_agent, run_worker

    run_worker(become_faulty) if is_worker() else main(sys.argv[1:])
