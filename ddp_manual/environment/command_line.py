"""What was typed to start this process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

LONGEST_SHEBANG = 4096


def program_file() -> Path | None:
    """Return the Python file that was started; None in a notebook, an interactive session or a console script."""
    path = Path(sys.argv[0])
    return path if path.suffix == ".py" and path.is_file() else None


def typed_command() -> tuple[list[str], list[str]]:
    """Return what was typed: the program, such as ``python run_multi_gpu_train.py``, and its arguments.

    If a program runs another program, as a debugger does with runpy, return the other program's part of what was typed.
    """
    end = len(sys.orig_argv) - (len(sys.argv) - 1)
    program, arguments = list(sys.orig_argv[:end]), list(sys.orig_argv[end:])
    if not program or arguments != sys.argv[1:]:
        program, arguments = [sys.orig_argv[0], sys.argv[0]], sys.argv[1:]
    if len(program) == 2 and _starts_itself_with(*program):
        del program[0]  # the kernel has put it there, since it is what the first line of a console script names
    return [as_typed(program[0]), *program[1:]], arguments


def _starts_itself_with(interpreter: str, script: str) -> bool:
    """Return whether typing the path of ``script`` alone starts it with that interpreter."""
    if not (os.path.isabs(interpreter) and os.sep in script and os.access(script, os.X_OK)):
        return False
    with suppress(OSError), open(script, "rb") as file:
        first, second = (os.fsdecode(file.readline(LONGEST_SHEBANG)) for _ in range(2))
        # A path that is long or has a space in it is on the second line, which a shell reads as a command.
        return first.startswith("#!") and (interpreter in first[2:].split() or second.startswith("'''exec' "))
    return False


def as_typed(program: str) -> str:
    """Return the name by which a shell finds this program; its path if it finds none, or another one."""
    name = os.path.basename(program)
    return name if shutil.which(name) == program else program


def without_options(words: Sequence[str], *names: str) -> list[str]:
    """Return what was typed, without these options and their values."""
    return _parsed(words, names).args


def option_in(words: Sequence[str], *names: str) -> str:
    """Return the first of these options that was typed, as ``--rank 0``; "" if none was."""
    values = _parsed(words, names).params
    return next((f"--{name} {values[name]}" for name in names if values[name] is not None), "")


def _parsed(words: Sequence[str], names: Sequence[str]) -> click.Context:
    """Parse options among others that are not known."""
    import click  # takes 0.02 s, which workers do without

    options: list[click.Parameter] = [click.Option([f"--{name}"]) for name in names]
    command = click.Command("", params=options, add_help_option=False)
    how: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "resilient_parsing": True}
    return command.make_context("", [*words], token_normalize_func=lambda name: name.replace("-", "_"), **how)
