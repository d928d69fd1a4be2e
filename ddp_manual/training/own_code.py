"""A user's own factory, named on the command line as ``package.module:name``: found, imported, called, and compared."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_manual.errors import BadOption, DdpManualError
from ddp_manual.training import user_code
from ddp_manual.training.config import is_own_factory

MOST_NAMED = 8
_taken: dict[str, tuple[ModuleSpec | ModuleType, tuple[str, str]]] = {}
"""Module -> its digest as it was imported: what is edited while a run trains is not what it trains."""


def factory(option: str, value: str) -> Callable[..., Any]:
    """What ``--<option> package.module:name`` names; modules are looked for in the current folder too.

    The script that runs is taken as it is: imported by its name, it would run once more.

    Raises:
        BadOption: there is no such module, importing it fails, or it has no such function or class.
    """
    module_name, _, name = value.partition(":")
    script = user_code.running(_spec(option, value).origin)
    with _importing(option, value):
        module = script or importlib.import_module(module_name)
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None or not callable(found):
        there = _callables(module)
        nearest = [*difflib.get_close_matches(name, there, n=1), *there, "NAME"][0]
        listed = ", ".join(there[:MOST_NAMED]) or "none at all"
        more = f" and {len(there) - MOST_NAMED} more" if len(there) > MOST_NAMED else ""
        so_far = ", as far as it has run" if script else ""
        raise BadOption(
            f"--{option} {value}: {module_name} has no function or class {name}",
            why=f"{getattr(module, '__file__', module_name)} has {listed}{more}{so_far}",
            next=f"name one of them: --{option} {module_name}:{nearest}",
        )
    return found


def _callables(module: ModuleType) -> list[str]:
    """The names of its functions and classes; those that it imports come after its own."""
    there = [one for one, kind in vars(module).items() if callable(kind) and one[0] != "_"]
    return sorted(there, key=lambda one: getattr(vars(module)[one], "__module__", None) != module.__name__)


def call(option: str, value: str, **offered: Any) -> Any:
    """Call the factory with those of the ``offered`` arguments that it names; what it raises comes through.

    Raises:
        BadOption: it asks for others, or see ``factory``.
    """
    made_by = factory(option, value)
    try:
        parameters = inspect.signature(made_by).parameters
    except ValueError:
        parameters = inspect.Signature().parameters  # a built-in one does not tell
    wanted = {name: value for name, value in offered.items() if name in parameters}
    needed = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and name not in wanted
    ]
    if needed:
        raise BadOption(
            f"--{option} {value} wants an argument that it cannot be given: {', '.join(needed)}",
            why=f"it is called with those of {', '.join(offered)} that it names, and with no other",
            next="give that parameter a default, or name a function that calls it with what it wants",
        )
    return made_by(**wanted)


def digest(option: str, value: str) -> tuple[str, str]:
    """A digest of the source, and where that is: of the module's file, or all of the package that it is in.

    Raises:
        BadOption: there is no such module.
    """
    module_name = value.partition(":")[0]
    spec = _spec(option, value)
    imported = user_code.running(spec.origin) or spec
    known, taken = _taken.get(module_name, (None, ("", "")))
    if known is not imported:  # not imported yet, or imported anew
        taken = _digest(module_name, spec)
        _taken[module_name] = imported, taken
    return taken


def _digest(module_name: str, spec: ModuleSpec) -> tuple[str, str]:
    file = Path(spec.origin or "")
    top = importlib.util.find_spec(module_name.partition(".")[0])
    folders = top.submodule_search_locations if top else None
    files = {Path(file.name): file}
    if folders:
        files = {path.relative_to(folder): path for folder in folders for path in Path(folder).rglob("*.py")}
    content = hashlib.sha256()
    for name, path in sorted(files.items()):
        if path.is_file():
            content.update(os.fsencode(name) + b"\n" + path.read_bytes())
    return content.hexdigest()[:16], str(file)


def sources(**named: str) -> dict[str, str]:
    """``<option>_source`` -> the digest of the source, for those options that name a factory of the user's.

    Raises:
        BadOption: there is no such module.
    """
    return {f"{option}_source": digest(option, value)[0] for option, value in named.items() if is_own_factory(value)}


def _spec(option: str, value: str) -> ModuleSpec:
    """Where the module is; only the packages that it is in are imported."""
    module_name = value.partition(":")[0]
    _look_in_this_folder()
    top_name, _, below = module_name.partition(".")
    with _importing(option, value):
        spec = importlib.util.find_spec(top_name)
        if spec is not None and below:
            # A plain module, such as q3 of "q3.py", need not be imported to know that nothing is below it.
            package = spec.submodule_search_locations is not None or module_name in sys.modules
            spec = importlib.util.find_spec(module_name) if package else None
    if spec is None:
        raise _not_importable(option, value, module_name, None)
    return spec


@contextmanager
def _importing(option: str, value: str) -> Iterator[None]:
    """Turn what a module of the user's raises while it is imported, which can be anything, into BadOption."""
    module_name = value.partition(":")[0]
    # A script's arguments may be meant for its modules too; those of our own command line are not.
    ours = {"ddp_manual.cli", "ddp_manual.worker.main"} & sys.modules.keys()
    try:
        with user_code.importing(module_name), _as_if_typed(module_name) if ours else nullcontext():
            yield
    except SystemExit as end:
        said = f": {end.code}" if isinstance(end.code, str) else f"({end.code}); what it said is above"
        raise BadOption(
            f"--{option} {value}: importing {module_name} ended the program",
            why=f"it called sys.exit{said}",
            next=f"mend what it said\nor, if it is a program of its own, as with parse_args(): {user_code.GUARD}",
        ) from end
    except Exception as error:
        raise _not_importable(option, value, module_name, error) from error


@contextmanager
def _as_if_typed(program: str) -> Iterator[None]:
    """While the body runs, sys.argv is that of the program, without arguments."""
    before = sys.argv
    sys.argv = [program]
    try:
        yield
    finally:
        sys.argv = before


def _look_in_this_folder() -> None:
    """As ``python -m`` does; a console script has its own folder there instead."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


def _not_importable(option: str, value: str, module: str, error: Exception | None) -> BadOption:
    if isinstance(error, DdpManualError):
        return BadOption(f"--{option} {value} cannot be imported", why=f"{error.what}\n{error.why}", next=error.next)
    absent = error is None or (isinstance(error, ModuleNotFoundError) and (error.name or "") in _parents(module))
    return BadOption(
        f"--{option} {value}: there is no module {module}" if absent else f"--{option} {value} cannot be imported",
        why=f"looked for it in {os.getcwd()} and where Python keeps its packages"
        if absent
        else f"{type(error).__name__}: {error}",
        next=f"name the module, not its file: --{option} {value.replace('.py:', ':')}"
        if absent and module.endswith(".py")
        else "start from the folder that has it, or put that folder into PYTHONPATH"
        if absent
        else f"mend it; this shows more: {os.path.basename(sys.executable)} -c 'import {module}'",
    )


def _parents(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[: count + 1]) for count in range(len(parts))}
