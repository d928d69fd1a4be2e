"""What ranks of a user's own program must have in common, found without running any of it: the digests of its files and
the versions of its packages; and whether the program is there at all."""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import os
import re
import shutil
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ddp_manual.agent.installed import distributions_with, installed_version
from ddp_manual.errors import BadOption
from ddp_manual.program import DYNAMO, EXECUTABLE, MODULE, Program
from ddp_manual.protocol.program_arguments import digest
from ddp_manual.wire import printable

# The most local modules that are compared: of a larger program, the first ones that its imports lead to.
MOST_FILES = 2000
# Characters of a line that an error quotes.
LONGEST_LINE = 200
# A hello has 64 KiB: more files than this get one digest per folder; of more packages, the first by name are sent.
MOST_PARTS = 100
ALL_FILES = "local modules"
# Only import statements are parsed: 0.07 s for a megabyte of source, for which ast takes 0.6 s. They are also found if
# the file has a syntax error. An "import x" in a string adds one file at most. After "import (" the match cannot fail,
# whether the parenthesis is closed or not: backtracking would take minutes.
IMPORT = re.compile(
    r"(?:^|[:;])[ \t]*((?:from[ \t]+[.\w]+[ \t]+)?import\b(?:[ \t]*"
    r"\((?:[^()#:;\n]|#[^\n]*|\n(?![ \t]*(?:from|import)\b))*\)?|(?:[^\\\n;#]|\\\r?\n)*))",
    re.MULTILINE,
)
STDLIB = Path(os.__file__).parent
INSTALLED = {"site-packages", "dist-packages"}
OURS = "ddp_manual"
# What ``launch`` may import before it forks: otherwise torchvision takes 0.3 s of a core in each rank. Other packages
# are imported by each rank itself: a fork lacks the threads that an import has started. torch._inductor starts
# processes, and TensorBoard may import TensorFlow.
FORKABLE = re.compile(r"(torch|torchvision|numpy)(\.(?!_|tensorboard\b)\w+)*")
# DDP's constructor and the first step of an optimizer import torch's compiler, which takes 1.2 s. A program that only
# computes does without it: one that has none of these words, and imports nothing but what is known not to train.
TRAINS = re.compile(r"\b(optim|\w*Parallel|compile|train)\b")
COMPUTES = {*sys.stdlib_module_names, "torch", "torchvision", "numpy", OURS}


@dataclass(frozen=True)
class ProgramSource:
    """The source of a program, as ranks compare it."""

    code: Mapping[str, str] = field(default_factory=dict)
    """File, as a path below the program's folder, or a folder whose files are combined -> digest."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version, for the packages that its modules import at the top."""


@dataclass(frozen=True)
class _Module:
    path: Path
    name: str
    """The file's path below the folder in which Python finds the module."""
    package: str = ""
    """The package that its relative imports begin at."""


@functools.lru_cache(maxsize=8)  # ``launch`` needs it for all its ranks
def source_of(program: Program) -> ProgramSource:
    """Return the digests of a program's script and local modules, and the versions of its packages."""
    if program.kind == EXECUTABLE:
        return ProgramSource(_executable(program.name))
    try:
        main, folders = _main_module(program)
    except BadOption:  # the worker's Python says why it cannot run the program
        return ProgramSource()
    finder = _Finder(folders)
    files, tops = finder.follow(main)
    return ProgramSource(_combined(files), _versions(tops))


def forkable_imports(program: Program) -> list[str]:
    """Return what a process imports besides torch before it forks workers for a program: what the program's main file
    imports of torch, torchvision and numpy at its top (modules or names in them), and ``DYNAMO`` if it may train; of
    one of ours its own module."""
    if program.prepare:
        return [DYNAMO, program.prepare.partition(":")[0]]
    try:
        main, _ = _main_module(program)
        text = main.path.read_text("utf-8-sig", "replace")
    except (BadOption, OSError):
        return []
    imported = list(_imported(text, main.package))
    trains = TRAINS.search(text) or {name.partition(".")[0] for name, _, _ in imported} - COMPUTES
    found = {name for name, is_top, _ in imported if is_top and FORKABLE.fullmatch(name)}
    return [*([DYNAMO] if trains else []), *sorted(found)]


def check_program(program: Program) -> None:
    """Check that Python, or the shell, would find the program.

    Raises:
        BadOption: there is no such script, module or executable, or this user may not read or run it.
    """
    if program.kind == EXECUTABLE:
        if shutil.which(program.name) is None:
            raise _no_executable(program.name)
        return
    main, _ = _main_module(program)
    try:
        source = main.path.read_bytes()
        if main.path.suffix == ".py":
            with warnings.catch_warnings(), suppress(RecursionError, MemoryError, OverflowError):
                warnings.simplefilter("ignore")  # Python gives them again when it runs the program
                compile(source, main.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise BadOption(
            f"{program.name} is not valid Python {sys.version_info[0]}.{sys.version_info[1]}",
            why="\n".join(line[:LONGEST_LINE] for line in "".join(traceback.format_exception_only(error)).splitlines()),
            next="correct the file",
        ) from None
    except OSError as error:
        raise BadOption(
            f"{program.name} cannot be read",
            why=f"{error.strerror}: {error.filename}",
            next="give a file that this user may read",
        ) from None


def _no_executable(name: str) -> BadOption:
    if os.sep in name:
        there = os.path.exists(name)
        return BadOption(
            f"{name} cannot be executed" if there else f"{name} does not exist",
            why=f"looked for {os.path.abspath(name)}, because of --no_python",
            next=f"chmod +x {name}\nor, if it is a Python script, leave --no_python out"
            if there
            else "correct the path of the executable after --no_python",
        )
    return BadOption(
        f"there is no executable {name}",
        why="looked for it in the folders of PATH, because of --no_python",
        next=f"give its path, such as ./{name}, or leave --no_python out if it is a Python script",
    )


# -- the main file ----------------------------------------------------------------------------------------------------


def _main_module(program: Program) -> tuple[_Module, list[Path]]:
    """Return the file that Python runs as ``__main__``, and the folders in which it looks for local modules.

    Raises:
        BadOption: there is no such file.
    """
    return _module_file(program.name) if program.kind == MODULE else _script_file(program.name)


def _script_file(name: str) -> tuple[_Module, list[Path]]:
    path = Path(name)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise BadOption(
                f"{name} is a folder without a __main__.py",
                why=f"looked for {path.absolute() / '__main__.py'}, which Python would run",
                next=f"name the script in it: {name.rstrip(os.sep)}/{_some_script(path)}",
            )
        path = path / "__main__.py"
    elif not path.exists():
        raise BadOption(
            f"{name} does not exist",
            why=f"looked for {path.absolute()}",
            next=f"leave {name} out: what follows is run by the Python of this command"
            if re.fullmatch(r"python[0-9.]*", path.name)
            else _meant(path) or "correct the path of the script, or name a module with -m",
        )
    typed, path = path.name, path.resolve()  # Python looks for modules beside the file that a link leads to
    top, package = path.parent, ""
    while (top / "__init__.py").is_file() and top != top.parent:
        top, package = top.parent, f"{top.name}.{package}".rstrip(".")
    # A script that calls ddp_manual.join may have been started with -m, in a package; only its path is known here.
    return _Module(path, typed, package), [path.parent, *([top] if package else [])]


def _some_script(folder: Path) -> str:
    scripts = sorted(path.name for path in folder.glob("*.py"))
    return scripts[0] if len(scripts) == 1 else "SCRIPT.py"


def _meant(path: Path) -> str:
    """Return a question that names a script with a similar name; "" if there is none."""
    names = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def _module_file(name: str) -> tuple[_Module, list[Path]]:
    here = Path.cwd()
    if name.endswith(".py"):
        raise BadOption(
            f"-m {name} is the name of a file",
            why="-m takes the name of a module, as with python -m",
            next=f"-m {name.removesuffix('.py').replace(os.sep, '.')}, or the file without -m: {name}",
        )
    finder = _Finder([here])
    found = finder.find(name)
    if found is not None and found.submodule_search_locations is not None:
        found = finder.find(f"{name}.__main__")
        if found is None:
            raise BadOption(
                f"the package {name} has no __main__.py",
                why=f"python -m {name} would run {name}/__main__.py",
                next=f"name a module of it: -m {name}.MODULE",
            )
        name = f"{name}.__main__"
    if found is None or not found.has_location or found.origin is None:
        raise BadOption(
            f"there is no module {name}",
            why=f"looked for it in {here} and where Python keeps its packages",
            next="start in the folder that has it, correct its name, or install it in this environment",
        )
    return finder.module(name, found), [here]


def _executable(name: str) -> dict[str, str]:
    """Return the name of an executable -> its digest; a binary counts as empty: hosts may have different ones."""
    path = shutil.which(name)
    if path is None:
        return {}
    text = b""
    with suppress(OSError), open(path, "rb") as file:  # a user may be allowed to run a file and not to read it
        if (start := file.read(2)) == b"#!":
            text = start + file.read()
    return {printable(os.path.basename(name)): digest(text)}


# -- imports ----------------------------------------------------------------------------------------------------------


class _Finder:
    """Finds modules as Python would, without importing any, and follows the imports of those that are local."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._local = [str(folder) for folder in folders]
        # The first entry is the folder of this agent's program, not of the user's; in safe-path mode there is none.
        self._others = sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]
        self.find = functools.cache(self._find)

    def _find(self, name: str) -> ModuleSpec | None:
        """Return where a module is; None if there is none, or it is built into Python."""
        parent, _, last = name.rpartition(".")
        if parent:
            package = self.find(parent)
            folders = package.submodule_search_locations if package is not None else None
            # Not the whole name: for a package without an __init__.py, Python would look for its parent in sys.modules.
            return PathFinder.find_spec(last, list(folders)) if folders else None
        found = PathFinder.find_spec(name, [*self._local, *self._others])
        # pip install --editable adds a finder to sys.meta_path, or a .pth file that puts the folder into sys.path.
        for finder in sys.meta_path if found is None else ():
            if str(getattr(finder, "__module__", "")).startswith("__editable__"):
                found = found or finder.find_spec(name, None)
        return found

    def follow(self, main: _Module) -> tuple[dict[str, str], dict[str, Path]]:
        """Return the digest of each local file that the program's imports lead to, and a file of each installed package
        that one of these files imports at its top."""
        digests: dict[str, str] = {}
        tops: dict[str, Path] = {}
        seen = {main.path}
        waiting = deque([main])

        @functools.cache
        def take(name: str, is_top: bool) -> None:
            for part in itertools.accumulate(name.split("."), "{}.{}".format):
                found = self.find(part)
                if found is None and is_top and _is_installed(part):  # installed where only its own finder finds it
                    tops.setdefault(part, Path())
                path = Path(found.origin or "") if found is not None else Path()
                if found is None or part == OURS or (STDLIB in path.parents and not INSTALLED & set(path.parts)):
                    return
                if INSTALLED & set(path.parts):
                    if is_top:
                        tops.setdefault(part.partition(".")[0], path)
                    return
                if found.has_location and path not in seen:
                    seen.add(path)
                    waiting.append(self.module(part, found))

        if INSTALLED & set(main.path.parts):
            tops[main.package.partition(".")[0] or main.path.stem] = main.path
        elif main.package:
            take(main.package, is_top=False)  # Python imports the packages that a module is in before the module
        while waiting and len(digests) < MOST_FILES:
            module = waiting.popleft()
            try:
                content = module.path.read_bytes()
            except OSError:
                digests[module.name] = "unreadable"
                continue
            digests[module.name] = digest(content)
            if module.path.suffix == ".py" and not INSTALLED & set(module.path.parts):
                for name, is_top, is_module in _imported(content.decode("utf-8-sig", "replace"), module.package):
                    take(name, is_top and is_module)
        return digests, tops

    def module(self, name: str, found: ModuleSpec) -> _Module:
        """Return the module, with the path of its file below the folder that contains its outermost package."""
        path = Path(found.origin or "")
        is_package = found.submodule_search_locations is not None
        package = name if is_package else name.rpartition(".")[0]
        depth = len(package.split(".")) if package else 0
        return _Module(path, "/".join(path.parts[-depth - 1 :]), package)


def _imported(text: str, package: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield each name that a file imports, whether its statement is at the top (not indented, so that no condition
    skips it), and whether the name is certainly a module's."""
    for match in IMPORT.finditer(text):
        is_top = match.start(1) == 0 or text[match.start(1) - 1] == "\n"
        for name, is_module in _names_in(match[1], package):
            yield name, is_top, is_module


@functools.lru_cache(maxsize=4096)  # the files of a program begin alike
def _names_in(statement: str, package: str) -> tuple[tuple[str, bool], ...]:
    """Return the names that a statement imports, and whether each is certainly a module's."""
    try:
        (parsed,) = ast.parse(statement).body
    except (SyntaxError, ValueError):  # prose, or Python of another version
        return ()
    if isinstance(parsed, ast.Import):
        return tuple((alias.name, True) for alias in parsed.names)
    assert isinstance(parsed, ast.ImportFrom)
    parts = package.split(".") if package and parsed.level else []
    parts = [*parts[: len(parts) + 1 - parsed.level], *filter(None, [parsed.module])]
    inside = [(".".join([*parts, alias.name]), False) for alias in parsed.names if alias.name != "*"]
    return ((".".join(parts), True), *inside) if parts else tuple(inside)


# -- what is sent -----------------------------------------------------------------------------------------------------


def _combined(files: Mapping[str, str]) -> dict[str, str]:
    """Return at most ``MOST_PARTS`` digests: of each file, otherwise of each folder, as deep as the limit allows."""
    deepest = max((name.count("/") for name in files), default=0) + 1
    for depth in range(deepest, -1, -1):
        parts: dict[str, list[str]] = {}
        for name in sorted(files):
            above = name.split("/")[:depth]
            parts.setdefault(printable("/".join(above) or ALL_FILES), []).append(f"{name} {files[name]}")
        if len(parts) <= MOST_PARTS:
            break
    return {
        part: files[names[0].rpartition(" ")[0]] if len(names) == 1 else digest("\n".join(names).encode())
        for part, names in parts.items()
    }


def _is_installed(name: str) -> bool:
    return name != OURS and name not in sys.stdlib_module_names and bool(installed_version(name))


def _versions(tops: Mapping[str, Path]) -> dict[str, str]:
    """Return distribution -> version, for the packages in ``tops``: package -> a file of it."""
    known = {name: installed_version(name) for name in tops}
    found = {name: version for name, version in known.items() if version is not None}
    for distribution in distributions_with([path for name, path in tops.items() if name not in found]):
        found[distribution.metadata["Name"]] = distribution.version
    found.pop("torch", None)  # its version is compared in any case
    return {printable(name): printable(found[name]) for name in sorted(found)[:MOST_PARTS]}
