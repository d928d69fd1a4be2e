"""A run's options as JSON: one object with option names as keys, as ``TrainConfig.to_json`` writes it.

A run's own ``config.json`` is such a file too; what followed from its options is below the key ``run``.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.options import option_fields, value_types
from ddp_manual.run_folder import RunPaths

RECORD = "run"
# Where a run writes and which run it goes on from: a file that says what is trained is for any number of runs.
OF_ONE_RUN = ("run_dir", "resume")
KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def located(path: str) -> str:
    """Return the file that ``--config path`` means: where that is the folder of a run, its ``config.json``."""
    inside = str(RunPaths(Path(path)).config)
    return inside if os.path.isfile(inside) else path


def read(path: str) -> str:
    """Return the text of the file.

    Raises:
        BadOption: it cannot be read, or is no text.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise OSError(0, "it is no regular file", path)
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadOption(
            f"--config {path} cannot be read",
            why=f"{error.strerror}: {path}",
            next="name a JSON file of options, such as the config.json of a run",
        ) from None
    except ValueError as error:
        raise _unusable(path, f"it is no UTF-8 text: {error}") from None


def apart(content: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return what a ``config.json`` holds: the options, and what followed from them (None if it is no run's file)."""
    return {name: value for name, value in content.items() if name != RECORD}, content.get(RECORD)


def parse(text: str, source: str, options: type, elsewhere: Collection[str]) -> dict[str, Any]:
    """Return option -> value for those that ``text`` gives; one that is null is not given.

    Args:
        source: what a message calls the text: a file's name.
        options: the dataclass whose options may be there.
        elsewhere: options that exist, and are given by a flag or a launcher only.

    Raises:
        BadOption: it is no JSON object; a key is unknown, there twice or has its place elsewhere; a value is of the
            wrong type. Bounds are for the dataclass to check.
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise _unusable(source, "it is nested too deeply") from None
    except ValueError as error:
        raise _unusable(source, f"{error}") from None
    if not isinstance(found, dict):
        raise _unusable(source, f"it holds {_shown(found)}, where an object is wanted")
    given, run = apart(found)
    types = value_types(options)
    may_be_null = {field.name for field in option_fields(options) if field.default is None}
    values = {}
    for name, value in given.items():
        if name in elsewhere:
            raise BadOption(
                f"{source}: {name} cannot be given in a file",
                why="it says which rank a process is or how it meets the others, and the file is the same for all",
                next=f"leave it out, and give --{name} or what the launcher sets for it",
            )
        if name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            raise BadOption(
                f"{source}: {_shown(name)} is no option",
                why=f"options are {', '.join(types)}",
                next=f"write {close[0]}" if close else "leave it out",
            )
        if (value is None and name in may_be_null) or (name in OF_ONE_RUN and run is not None):
            continue
        if name in OF_ONE_RUN:
            raise BadOption(
                f"{source}: {name} cannot be given in a file",
                why="the file says what is trained, for any number of runs; this belongs to one of them",
                next=f"leave it out, and give --{name}",
            )
        values[name] = _of_type(types[name], name, value, source)
    return values


def _of_type(kind: type, name: str, value: Any, source: str) -> Any:
    """Return ``value``; a whole number where any number is wanted becomes a float."""
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if type(value) is kind:
        return value
    raise BadOption(
        f"{source}: {name} is {_shown(value)}",
        why=f"{name} is {KINDS[kind]}",
        next=f"change {name} there, or leave it out for the default",
    )


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(_shown(name) for name in names if names.count(name) > 1)} is there twice")
    return found


def _unusable(source: str, why: str) -> BadOption:
    return BadOption(
        f"{source} holds no options",
        why=why,
        next='write a JSON object with options as keys, such as {"epochs": 3, "lr": 0.05}',
    )
