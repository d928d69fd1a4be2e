"""The user's own code, which options name as ``package.module:name``: what its name is, and that it is being imported.

Nothing is imported here: see ``training/own.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType

from ddp_manual.errors import BadOption

# What Python calls the program that runs; the second in a process that multiprocessing has started.
MAIN = ("__main__", "__mp_main__")
GUARD = 'put that below a line: if __name__ == "__main__":'
# What a function for an option may be called, where it has no name yet.
EXAMPLES = {"model": "network", "dataset": "data"}

_imported_now: list[str] = []
"""The modules that are being imported, since an option names them."""


def running(file: str | None) -> ModuleType | None:
    """The program that runs, if it is in this file: imported by its name, it would run once more."""
    main = sys.modules["__main__"]
    own = getattr(main, "__file__", None)
    return main if file and own and os.path.realpath(file) == os.path.realpath(own) else None


@contextmanager
def importing(module: str) -> Iterator[None]:
    """While the body runs, ``refuse_while_importing`` does."""
    _imported_now.append(module)
    try:
        yield
    finally:
        _imported_now.pop()


def refuse_while_importing(call: str) -> None:
    """Raises BadOption where a module of the user's comes to ``call`` while an option has it imported."""
    if _imported_now:
        raise BadOption(
            f"importing {_imported_now[-1]} calls {call}",
            why="an option names it for what it defines, not to have it run",
            next=GUARD,
        )


def check_function(train_fn: Callable[..., object]) -> None:
    """Raises BadOption where a new Python could not find what ``spawn`` is to call in it."""
    function = getattr(train_fn, "func", train_fn)  # of a functools.partial
    name = function.__qualname__ if isinstance(function, FunctionType) else ""
    if not callable(train_fn):
        what = f"train_fn is {type(train_fn).__name__}, which cannot be called"
        why = "each rank calls train_fn(world, *args)"
        next = "give a function, by its name and without calling it"
    elif "<" in name:
        what = f"spawn cannot start {name}"
        why = "each rank is a new Python, which finds a function by the name it has in its module; this one has none"
        next = "write it as a def at the top level of a module, and give what it needs by args"
    elif name and function.__module__ == "__main__" and not _is_importable(sys.modules["__main__"]):
        what = f"spawn cannot start {name}, which was typed into a notebook or at a prompt"
        why = "each rank is a new Python, which finds a function in a file, and cannot see what was typed here"
        next = f"write it to a file beside the notebook (%%writefile training.py), then: from training import {name}"
    else:
        return
    raise BadOption(what, why=why, next=next)


def _is_importable(main: ModuleType) -> bool:
    """Whether what runs here is a file or a module, which a new Python can import too."""
    return getattr(main, "__spec__", None) is not None or os.path.exists(getattr(main, "__file__", None) or "")


def check_name(option: str, value: object, *, known: Collection[str], typed: bool) -> None:
    """Whether ``value`` says where it is defined, if it is the user's own.

    Args:
        known: what is not the user's own.
        typed: on a command line or in a file, and so not for what the program that runs defines.

    Raises:
        BadOption: it is code and not its name, or the name of what the program defines, without that of its module.
    """
    if isinstance(value, str):
        module, colon, name = value.rpartition(":")
        there = callable(getattr(sys.modules["__main__"], name, None))
        if module in MAIN or (there and not (colon or typed or value in known)):
            what = f"{value} does not say which module has {name}"
            raise _unnamed(option, what, _main_name() if there else None, name)
    elif not isinstance(value, bytes) and (callable(value) or hasattr(value, "__getitem__")):
        name = getattr(value, "__qualname__", "")
        module = getattr(value, "__module__", None) or ""
        what = f"was given {name or f'a {type(value).__name__}'} itself, not its name"
        raise _unnamed(option, what, _main_name() if module in MAIN else module, name)


def _unnamed(option: str, what: str, module: str | None, name: str) -> BadOption:
    example = EXAMPLES[option]
    return BadOption(
        f"--{option} {what}",
        why="every rank, and whoever goes on with the run or evaluates it, finds code by the name of its module",
        next=f'write {option}="{module}:{name}"'
        if module and name.isidentifier()
        else f"have a function in a file return it, such as def {example}(): in own.py\n"
        f'and write {option}="own:{example}"',
    )


def _main_name() -> str | None:
    """By which name the program that runs can be imported; None: by none, as what was typed into a notebook."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in MAIN:
        return str(spec.name)
    file = Path(getattr(main, "__file__", None) or "")
    return file.stem if file.suffix == ".py" and file.stem.isidentifier() else None
