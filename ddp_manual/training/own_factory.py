"""A user's own factory, which an option names as ``package.module:name``: found, imported, called, and compared.

No torch: ``own_data`` checks the data that a factory returns, and ``models`` the network.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_manual.errors import BadOption

# folder:PATH may look like MODULE:FACTORY, but is a folder of images.
OWN_FACTORY = {"MODULE:FACTORY": r"(?!folder:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"}
WITHOUT_COLON = r"[^\W\d]\w*(\.[^\W\d]\w*)+"
# The names of the running program as a module; the second one in a process that multiprocessing has started.
MAIN = ("__main__", "__mp_main__")
# If one of these modules is loaded, the arguments of this process are those of our own command line.
OUR_COMMAND_LINE = {"ddp_manual.cli.main", "ddp_manual.training.program"}
PACKAGE = Path(__file__).resolve().parents[1]
GUARD = 'put that below a line: if __name__ == "__main__":'

_importing: list[tuple[str, str]] = []
"""The modules that are being imported only for what they define, each with the reason for an error."""
_digests: dict[str, tuple[object, str]] = {}
"""Module -> its spec, which is another object after a reload, and the digest of its source when it was imported."""


def is_own_factory(value: str) -> bool:
    """Tell whether the value of ``model`` or ``dataset`` is ``package.module:factory``."""
    return any(re.fullmatch(form, value) for form in OWN_FACTORY.values())


def check_name(option: str, value: object) -> None:
    """Raise BadOption if ``value`` is the user's code itself, or a name that does not say which module has it."""
    if isinstance(value, str):
        if re.fullmatch(WITHOUT_COLON, value):
            module, _, name = value.rpartition(".")
            raise BadOption(
                f"--{option} {value} has no colon between the module and its function or class",
                why="code of your own is MODULE:FACTORY",
                next=f"write --{option} {module}:{'NAME' if name == 'py' else name}",
            )
        module, _, name = value.rpartition(":")
        if module not in MAIN:
            return
        what = f"{value} does not say which module has {name}"
    else:
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
        what = f"was given {name or f'a {type(value).__name__}'} itself, not its name"
    if module in MAIN:
        module = _main_name()
    raise BadOption(
        f"--{option} {what}",
        why="every rank, and a later start that resumes or evaluates the run, finds code by the name of its module",
        next=f'write {option}="{module}:{name}"'
        if module and name.isidentifier()
        else f'have a function in a file, such as own.py, return it, and write {option}="own:{option}"',
    )


def check_module(option: str, value: str) -> None:
    """Raise BadOption if there is no such module, as far as that can be known without an import."""
    name = value.partition(":")[0]
    top = name.partition(".")[0]
    is_there = sys.modules.get(top) is not None or PathFinder.find_spec(top, [os.getcwd()]) is not None
    # find_spec asks all finders of ``sys.meta_path``, since an editable install adds its own.
    if name.endswith(".py") or not (is_there or importlib.util.find_spec(top)):
        raise _no_module(option, value)


def _no_module(option: str, value: str) -> BadOption:
    name = value.partition(":")[0]
    return BadOption(
        f"--{option} {value}: there is no module {name}",
        why=f"looked for it in {os.getcwd()} and where Python keeps its packages",
        next=f"name the module, not its file: --{option} {value.replace('.py:', ':')}"
        if name.endswith(".py")
        else "start from the folder that has it, or put that folder into PYTHONPATH",
    )


def _main_name() -> str:
    """Return the name by which the running program can be imported; "" for code that was typed into a notebook."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in MAIN:
        return str(spec.name)
    file = Path(getattr(main, "__file__", None) or "")
    return file.stem if file.suffix == ".py" and file.stem.isidentifier() else ""


@contextmanager
def importing(name: str, why: str) -> Iterator[None]:
    """Refuse ``join`` and ``spawn`` in the body, which imports a module only for what it defines."""
    _importing.append((name, why))
    try:
        yield
    finally:
        _importing.pop()


def refuse_while_importing(call: str) -> None:
    """Raise BadOption if a module calls ``join`` or ``spawn`` while it is imported for what it defines."""
    if _importing:
        name, why = _importing[-1]
        raise BadOption(f"importing {name} calls {call}", why=why, next=GUARD)


def factory(option: str, value: str) -> Callable[..., Any]:
    """Return the function or class of ``--<option> module:name``; modules are looked for in the current folder too.

    Raises:
        BadOption: there is no such module, importing it fails, or it has no such function or class.
    """
    module_name, _, name = value.partition(":")
    module = _imported(option, value)
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    its_own = [
        defined
        for defined, kind in vars(module).items()
        if callable(kind) and getattr(kind, "__module__", None) == module.__name__ and defined[0] != "_"
    ]
    nearest = [*difflib.get_close_matches(name, its_own, n=1), *its_own, "NAME"][0]
    so_far = ", as far as it has run" if module is sys.modules["__main__"] else ""
    raise BadOption(
        f"--{option} {value}: {module_name} has no function or class {name}",
        why=f"{getattr(module, '__file__', module_name)} defines {', '.join(its_own) or 'no functions'}{so_far}",
        next=f"name one of its functions or classes: --{option} {module_name}:{nearest}",
    )


def call(option: str, value: str, **offered: Any) -> Any:
    """Call the factory with those of the ``offered`` arguments that it takes; its exceptions come through.

    Raises:
        BadOption: it needs other arguments, or see ``factory``.
    """
    made_by = factory(option, value)
    signature = inspect.signature(made_by)
    wanted = {name: value for name, value in offered.items() if name in signature.parameters}
    try:
        signature.bind(**wanted)
    except TypeError as error:
        raise BadOption(
            f"--{option} {value} cannot be called: {error}",
            why=f"it is called with those of {', '.join(offered)} that it names, and with no other argument",
            next="give that parameter a default, or name a function that calls it with what it needs",
        ) from None
    return made_by(**wanted)


def factory_error(option: str, value: str, what: str, wanted: str, next: str | None = None) -> BadOption:
    """Return the error for a factory that does not return what ``docs/own-model-and-data.md`` says."""
    return BadOption(
        f"--{option} {value} {what}",
        why=f"expected: {wanted}",
        next=next or "fix the factory; docs/own-model-and-data.md has its signature and an example",
    )


def digest(option: str, value: str) -> tuple[str, str]:
    """Return a digest of the module's source as it was imported, and the module's file.

    The digest covers all files of the module's package. Later edits do not count: the run trains the imported code.

    Raises:
        BadOption: the module cannot be imported.
    """
    module = _imported(option, value)
    name, file = value.partition(":")[0], Path(getattr(module, "__file__", None) or "")
    spec = module.__spec__ or module  # a script has no spec; a module has another spec after a reload
    if name not in _digests or _digests[name][0] is not spec:
        files = {Path(file.name): file}
        top = sys.modules.get(name.partition(".")[0], module)
        for folder in getattr(top, "__path__", ()):
            files |= {path.relative_to(folder): path for path in Path(folder).rglob("*.py")}
        content = hashlib.sha256()
        for relative, path in sorted(files.items()):
            if path.is_file():
                content.update(os.fsencode(relative) + b"\n" + path.read_bytes())
        _digests[name] = spec, content.hexdigest()[:16]
    return _digests[name][1], str(getattr(module, "__file__", ""))


def sources(**named: str) -> dict[str, str]:
    """Return ``<option>_source`` -> the digest of the source, for the options that name a factory of the user's.

    Raises:
        BadOption: a module cannot be imported.
    """
    return {f"{option}_source": digest(option, value)[0] for option, value in named.items() if is_own_factory(value)}


def _imported(option: str, value: str) -> ModuleType:
    """Import the module of a factory. The running script is taken as it is: an import would run it once more.

    Raises:
        BadOption: there is no such module, or it raises something, or it ends the program.
    """
    name = value.partition(":")[0]
    if _is_the_script(name):
        return sys.modules["__main__"]
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` does; a console script has its own folder there instead
    typed = sys.argv
    if OUR_COMMAND_LINE & sys.modules.keys():  # otherwise they are a script's, and its modules may read them
        sys.argv = [name]
    try:
        with importing(name, "an option names the module for what it defines, not to have it run"):
            if name.endswith(".py"):  # importing it would run the file, and then find no module py in it
                raise ModuleNotFoundError(name=name)
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise _no_module(option, value) from error
        raise BadOption(
            f"--{option} {value} cannot be imported",
            why=f"{type(error).__name__}: {error}",
            next=f"fix it; this shows more: {os.path.basename(sys.executable)} -c 'import {name}'\n"
            f"if the module does more than define things, such as parse_args() or join(): {GUARD}",
        ) from error
    finally:
        sys.argv = typed


def _is_the_script(name: str) -> bool:
    """Tell whether ``name`` is the running script, by the script's own name or with its packages: ``pk.own``."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if PACKAGE in script.resolve().parents:  # this package's own program, such as a worker
        return False
    below = Path(*name.split(".")).with_suffix(".py")
    files = (Path(folder, below) for folder in sys.path) if below.name == script.name else ()
    return name == _main_name() or any(file.exists() and file.samefile(script) for file in files)
