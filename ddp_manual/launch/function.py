"""The program of each rank of ``spawn``: it imports the script that has called ``spawn``, joins the other ranks, and
calls the function: ``python -m ddp_manual.launch.function FOLDER``. A file in that folder holds what to
call; the first failure and the exceptions of ranks become files beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import ddp_manual
from ddp_manual import signal_handlers
from ddp_manual.errors import BadOption, DdpManualError
from ddp_manual.program import MODULE, Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.training import own_factory


class _Copier(ForkingPickler):
    """Pickles copies of values. A rank is a child of a child, to which multiprocessing cannot pass what it shares."""

    _extra_reducers: ClassVar[dict[type, Callable[[Any], Any]]] = {}


class Call:
    """What the ranks call, and how that call has ended, as files in a folder: ``spec`` and ``call``; of a call that
    failed, ``failed`` has the first rank and its error, and ``cause<k>`` the exception of rank k."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def program(self) -> Program:
        prepare = f"{__name__}:prepare"
        return Program(kind=MODULE, name=__name__, arguments=(str(self.folder),), prepare=prepare)

    def write(self, train_fn: Callable[..., object], args: Sequence[Any], spec: WorldSpec) -> None:
        """Write the function, its arguments and the options of the ranks.

        Raises:
            BadOption: the function or an argument cannot be copied.
        """
        script = spawn.get_preparation_data(name_of(train_fn))
        del script["authkey"]  # only for multiprocessing's own children
        try:
            copied = _Copier.dumps((train_fn, tuple(args)))
        except Exception as error:  # copying an argument may raise anything
            raise BadOption(
                f"{name_of(train_fn)} and its args cannot be copied to the ranks",
                why=f"{type(error).__name__}: {error}",
                next="pass numbers, texts or paths, which can be copied, and open files or make locks in each rank",
            ) from error
        self.put("spec", spec)
        self.put("call", (script, bytes(copied)))

    def put(self, name: str, value: object) -> None:
        (self.folder / name).write_bytes(_Copier.dumps(value))

    def get(self, name: str) -> Any:
        """Return a copy of what was put there; None if nothing was."""
        file = self.folder / name
        return _Copier.loads(file.read_bytes()) if file.exists() else None

    def read(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        """Import the script as a child of multiprocessing does, and return the function and its arguments."""
        script, copied = self.get("call")
        file = script.get("init_main_from_path") or script.get("init_main_from_name") or "the script"
        with own_factory.importing(
            Path(file).name, "each rank imports the script, for the function that spawn is to call"
        ):
            spawn.prepare(script)
        function, args = _Copier.loads(copied)
        return function, args


def name_of(train_fn: Callable[..., object]) -> str:
    return getattr(train_fn, "__qualname__", type(train_fn).__qualname__)


def prepare(rank: int, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return nothing for the ranks to compare: all of them have copies of one call."""
    return {}


def main() -> None:
    """Call the function as one of the ranks."""
    call = Call(Path(sys.argv[1]))
    train_fn, args = call.read()
    with signal_handlers.raise_on_stop(), signal_handlers.ignore_save(), ddp_manual.join() as world:
        try:
            train_fn(world, *args)
        except Exception as error:
            if not isinstance(error, DdpManualError):
                with suppress(Exception):  # the class is the user's, and copying it may raise anything
                    call.put(f"cause{world.spec.rank}", error)
            raise


if __name__ == "__main__":
    main()
