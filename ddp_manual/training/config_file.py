"""A run's options as JSON: one object with option names as keys, as ``TrainConfig.to_json`` writes it.

A run's own ``config.json`` is one too; what followed from its options is below the key ``run`` and passed over here.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.options import option_fields, value_types
from ddp_manual.run_folder import RunPaths

RECORD = "run"
# What stood beside the options before there was "run"; all of it in every such file.
ONCE_BESIDE = (
    "run_id",
    "run_dir",
    "world_size",
    "batch_size_per_rank",
    "peak_lr",
    "steps_per_epoch",
    "mean",
    "std",
)
# Where a run writes and which run it goes on with: a file that says what is trained is for any number of runs.
OF_ONE_RUN = ("run_dir", "resume")
LARGEST = 2**20
KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def located(path: str) -> str:
    """The file that ``--config path`` means: where that is the folder of a run, its ``config.json``."""
    inside = str(RunPaths(Path(path)).config)
    return inside if os.path.isfile(inside) else path


def read(path: str) -> str:
    """The text of the file.

    Raises:
        BadOption: it cannot be read, is no text, or is longer than 1 MiB.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
            raise OSError(0, "it is no regular file", path)
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise _unusable(path, f"it is longer than {LARGEST} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise BadOption(
            f"--config {path} cannot be read",
            why=f"{error.strerror}: {path}",
            next="name a JSON file of options, such as the config.json of a run",
        ) from None
    except ValueError as error:
        raise _unusable(path, f"it is no UTF-8 text: {error}") from None


def apart(content: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """What a ``config.json`` holds: the options, and what followed from them, which is None in no run's file."""
    run = content.get(RECORD)
    names = ONCE_BESIDE if RECORD not in content and content.keys() >= set(ONCE_BESIDE) else ()
    if names:  # images were grey then, and mean and std no lists
        run = {**{name: content[name] for name in names}, "shape": None, "classes": None}
        run.update({name: [run[name]] for name in ("mean", "std") if isinstance(run[name], (int, float))})
    return {name: value for name, value in content.items() if name != RECORD and name not in names}, run


def parse(text: str, source: str, options: type, elsewhere: Collection[str]) -> dict[str, Any]:
    """Option -> value, for those that ``text`` gives; one that is null is not given.

    Args:
        source: what a message calls the text: a file's name.
        options: the dataclass whose options may be there.
        elsewhere: options that exist, and are given by a flag or a launcher only.

    Raises:
        BadOption: it is no JSON object; a key is unknown, there twice or has its place elsewhere; a value is of the
            wrong type. Bounds are for the dataclass to check.
    """
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _without_repetition(pairs, source))
    except RecursionError:
        raise _unusable(source, "it is nested too deeply") from None
    except ValueError as error:
        raise _unusable(source, f"{error}") from None
    if not isinstance(found, dict):
        raise _unusable(source, f"it holds {_shown(found)}, where an object is wanted")
    options_there, run = apart(found)
    types = value_types(options)
    may_be_null = {field.name for field in option_fields(options) if field.default is None}
    values = {}
    for name, value in options_there.items():
        if name in elsewhere:
            raise BadOption(
                f"{source}: {name} cannot be given in a file",
                why="it says which rank a process is or how it meets the others, and the file is the same for all",
                next=f"leave it out, and give --{name} or what the launcher sets for it",
            )
        if name not in types:
            raise _unknown(name, source, types)
        if value is None and name in may_be_null:
            continue
        if name in OF_ONE_RUN:
            if run is not None:
                continue
            raise BadOption(
                f"{source}: {name} cannot be given in a file",
                why="the file says what is trained, for any number of runs; this belongs to one of them",
                next=f"leave it out, and give --{name}",
            )
        values[name] = _of_type(types[name], name, value, source)
    return values


def _of_type(kind: type, name: str, value: Any, source: str) -> Any:
    """``value``; a whole number where any number is wanted becomes a float."""
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = float("inf")
    if type(value) is kind and not (isinstance(value, str) and not _is_clean(value)):
        return value
    raise BadOption(
        f"{source}: {name} is {_shown(value)}",
        why=f"{name} is {KINDS[kind]}",
        next=f"change {name} there, or leave it out for the default",
    )


def _is_clean(text: str) -> bool:
    """Whether it could have been typed: JSON can write what no file name or flag can hold."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _without_repetition(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _unusable(source, f"{_shown(name)} is there twice")
        found[name] = value
    return found


def _unknown(name: str, source: str, known: Collection[str]) -> BadOption:
    close = difflib.get_close_matches(name, known, n=1)
    return BadOption(
        f"{source}: {_shown(name)} is no option",
        why=f"options are {', '.join(known)}",
        next=f"write {close[0]}" if close else "leave it out",
    )


def _unusable(source: str, why: str) -> BadOption:
    return BadOption(
        f"{source} holds no options",
        why=why,
        next='write a JSON object with options as keys, such as {"epochs": 3, "lr": 0.05}',
    )
