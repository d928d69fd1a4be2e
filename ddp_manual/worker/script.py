"""Run a script or a module as one rank, as plain ``python`` would: ready -> place -> variables -> the program.

The program opens its process groups itself, or calls ``join``. When it has ended rank 0 stays, with torch's store,
until the other ranks have ended too.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import os
import runpy
import socket
import sys
import threading
import traceback
import types
from collections.abc import Iterable
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import torch

from ddp_manual import from_agent, from_worker, signal_handlers
from ddp_manual.environment import user_variables, variables_for_a_rank
from ddp_manual.errors import Stopped
from ddp_manual.held_state_memory import HeldMemory
from ddp_manual.program import DYNAMO, MODULE, Program
from ddp_manual.ranks_and_runs import RUNNING
from ddp_manual.worker import device_and_backend, holding, join, private_torch
from ddp_manual.worker.collective_recorder import Recorder
from ddp_manual.worker.main import Options, Rank
from ddp_manual.worker.reporter import Reporter, end_process


def preload(names: Iterable[str]) -> None:
    """Import modules, of which ``DYNAMO`` is torch's compiler, before ``launch`` forks its workers; what cannot be
    imported is left to the program."""
    for name in filter(None, names):
        with suppress(Exception):
            private_torch.import_dynamo() if name == DYNAMO else importlib.import_module(name)


def main(channel: int, ignored: Iterable[int], held: int, *, is_copied: bool) -> None:
    """Run the program as a rank; when it has ended, the interpreter ends as after any program.

    Args:
        channel: the descriptor of the socket to the agent.
        held: the descriptor of the memory that the agent holds.
        ignored: the signals that this process was told to ignore.
        is_copied: whether ``rank_output`` copies what this process writes.
    """
    os.set_inheritable(channel, False)  # exec closes it: that tells the agent that the program has become another one
    reporter = Reporter(socket.socket(fileno=channel), from_worker.Born(os.getpid()))
    start = reporter.wait(from_agent.Start)
    program, memory = start.program, HeldMemory(held)
    rank = Rank(reporter, start, memory)
    assert program is not None
    try:
        prepared = _prepare(rank, start.path, program) if program.prepare else None
        told = rank.meet(prepared)
        variables_for_a_rank.become_rank(told.placed, told.interfaces, restarts=start.restarts, hosted=True)
        if told.placed.holds:
            holding.here = holding.Holding(memory, told.placed, reporter.send, reporter.progress)
            os.register_at_fork(after_in_child=functools.partial(setattr, holding, "here", None))
        torch.set_num_threads(user_variables.cpu_threads(told.placed.place.cores_shared_by))
        reporter.progress.phase = RUNNING
        reporter.send_beat()
        Recorder(rank.spec, reporter.send).start()
        private_torch.let_programs_meet_by_themselves(lambda count: reporter.send(from_worker.StartsProcesses(count)))
        # Registered before the program registers any, so that these are called after them.
        atexit.register(_thaw_if_needed, os.fstat(2) if is_copied else None)
        atexit.register(reporter.stop)
        atexit.register(_leave, rank, os.getpid())
        sys.excepthook = functools.partial(_leave_to_the_agent, os.getpid())
        join.here = rank
        signal_handlers.handle_as_any_program(ignored)
        gc.freeze()  # it was off while this process imported what stays
        gc.enable()
        reporter.send(from_worker.ProgramBegins())
    except BaseException as error:
        rank.tell(error)
        threading.Event().wait()  # the agent ends this process
    try:
        run(rank, program)
    except SystemExit as exit:
        if program.ends_at_once:
            end_process(exit.code if isinstance(exit.code, int) else 1)
        raise
    if program.ends_at_once:  # without a teardown, which may hang
        signal_handlers.leave_signals_to_the_agent()
        rank.wait_to_go()
        end_process(0)


def _prepare(rank: Rank, path: str, program: Program) -> Options:
    """Return the options, of the user's own code, that must be the same on all ranks, as ``prepare`` says."""
    sys.path[0] = path
    device_and_backend.keep_freed_memory()
    private_torch.import_dynamo()  # before all ranks are here, and not in the first step
    module, _, function = program.prepare.partition(":")
    found: Options = getattr(importlib.import_module(module), function)(rank.spec.rank, program.arguments)
    return found


def run(rank: Rank, program: Program) -> None:
    """Run the program, and tell the agent how it has ended.

    Raises:
        SystemExit: with the program's exit code, if that is not 0.
    """
    try:
        if program.kind == MODULE:
            run_module(program)
        else:
            run_script(program)
    except SystemExit as exit:
        if not (exit.code is None or (isinstance(exit.code, int) and exit.code & 0xFF == 0)):
            _fail(rank, exit)
    except Stopped as stopped:
        if not rank.has_left:  # otherwise all ranks have stopped after the same step, which is no failure
            _fail(rank, stopped)
    except BaseException as error:
        _fail(rank, error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the program may have closed or replaced it
            stream.flush()


def _fail(rank: Rank, error: BaseException) -> NoReturn:
    """Tell the agent, which prints the error once this process has ended."""
    atexit.unregister(_leave)
    rank.tell(error)
    if isinstance(error, SystemExit):
        raise error
    sys.excepthook(type(error), error, error.__traceback__)  # the program's own, if it has set one
    raise SystemExit(128 + signal_handlers.STOP[0] if isinstance(error, KeyboardInterrupt) else 1)


def _leave_to_the_agent(pid: int, *exception: Any) -> None:
    """Print an exception only in a forked child; the agent prints this process's, after the program's last line."""
    if os.getpid() != pid:
        traceback.print_exception(*exception)


def _leave(rank: Rank, pid: int) -> None:
    """Say at exit, after the program's threads and its own handlers, that its work is done; and keep torch's store as
    long as other ranks may use it. The store ends with its last reference, which is the one that atexit has."""
    if os.getpid() == pid:
        rank.wait_to_go()


def _thaw_if_needed(copied: os.stat_result | None) -> None:
    """Leave frozen, while Python ends, what was frozen before the program began: to look through half a million objects
    of torch, and to take them apart, takes a second.

    Args:
        copied: the pipe of which ``rank_output`` drops what a library says of that; None: stderr is none.
    """
    with suppress(OSError):  # stderr is closed
        if copied is not None and os.path.samestat(copied, os.fstat(2)):
            vars(sys)["modules"]["ddp_manual: the end of Python"] = _EndOfModules()
            return
    gc.unfreeze()


class _EndOfModules:
    """As a value of ``sys.modules``, which Python clears first: collect what the program has left. Thaw all if an
    object stays that has something to do at its end, such as a file with text to write. It belongs to a frozen object
    then, as to a library's class that the program has changed, and is found by Python's collection of all that follows.
    """

    def __init__(self) -> None:
        self._collect, self._objects, self._thaw = gc.collect, gc.get_objects, gc.unfreeze

    def __del__(self) -> None:
        self._collect()
        left = (type(other) for other in self._objects() if other is not self)  # none that is frozen
        if any("__del__" in vars(base) for kind in left for base in kind.__mro__):
            self._thaw()


def run_module(program: Program) -> None:
    """Run the program as ``python -m`` does."""
    if not program.prepare:  # otherwise ``_prepare`` has set it
        sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(program.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{program.name}.__main__")
    if spec is None or spec.origin is None or not isinstance(spec.loader, InspectLoader):
        raise ImportError(f"{program.name} is no module that can be run")
    sys.argv[:] = [spec.origin, *program.arguments]
    code = spec.loader.get_code(spec.name)
    assert code is not None
    _run_as_main(code, spec.origin, spec.loader, spec)


def run_script(program: Program) -> None:
    """Run the program as ``python`` does."""
    sys.argv[:] = [program.name, *program.arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(program.name))
    if os.path.isdir(program.name) or program.name.endswith((".pyz", ".zip")):
        del sys.path[0]  # runpy puts the folder in front
        runpy.run_path(os.path.abspath(program.name), run_name="__main__")
        return
    path = os.path.join(os.getcwd(), program.name)
    with io.open_code(path) as file:
        source = file.read()
    code = compile(source, path, "exec", dont_inherit=True)
    _run_as_main(code, path, importlib.machinery.SourceFileLoader("__main__", path), None)


def _run_as_main(code: types.CodeType, path: str, loader: Any, spec: ModuleSpec | None) -> None:
    """Run code in a module ``__main__`` that stays, for threads and pickles that outlive the call."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins, __loader__=loader, __spec__=spec, __cached__=None)
    if spec is not None:
        vars(module).update(__package__=spec.parent, __cached__=spec.cached)
    sys.modules["__main__"] = module
    exec(code, vars(module))
