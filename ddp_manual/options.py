"""Options as fields of a dataclass: name, default, bounds and help in one place, from which ``cli`` makes the flags."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_type_hints

from ddp_manual.errors import BadOption

T = TypeVar("T")

KINDS: Mapping[type, str] = {int: "whole number", float: "number", bool: "bool", str: "text"}


def option(
    default: T,
    help: str,
    *,
    group: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    forms: Mapping[str, str] | None = None,
    shared: bool = True,
) -> T:
    """A dataclass field that is also a command-line option.

    Args:
        minimum: smallest value allowed; ``above``: every value must be greater; ``maximum``: largest value allowed.
        forms: what else is allowed beside the ``choices``, such as PATH -> a regular expression for all of the value.
        shared: the ranks of a run must agree on it.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "group": group,
            "minimum": minimum,
            "above": above,
            "maximum": maximum,
            "choices": choices,
            "forms": forms or {},
            "shared": shared,
        },
    )


class Options:
    """What WorldSpec and TrainConfig have in common: validation and the memory of where values came from."""

    sources: Mapping[str, str]

    def source(self, name: str) -> str:
        """``flag``, ``from VARIABLE``, ``argument`` (a script gave it, with no flag) or ``default``."""
        default = getattr(type(self), name)  # of a dataclass field with one
        return self.sources.get(name, "default" if getattr(self, name) == default else "argument")

    def named(self, name: str) -> str:
        """``rank 4 (from RANK)``"""
        return f"{name} {getattr(self, name)} ({self.source(name)})"

    def values(self) -> dict[str, Any]:
        """Option -> its value, for all of them."""
        return {field.name: getattr(self, field.name) for field in option_fields(type(self))}

    def given_options(self) -> dict[str, Any]:
        """The options that were typed, or that a variable or a file has given another value than their default."""
        defaults = {field.name: field.default for field in option_fields(type(self))}
        return {
            name: getattr(self, name)
            for name, source in self.sources.items()
            if getattr(self, name) is not None and (source == "flag" or getattr(self, name) != defaults[name])
        }

    @contextmanager
    def naming_files(self) -> Iterator[None]:
        """A BadOption of the body that is about values from a file says next where to change them."""
        try:
            yield
        except BadOption as error:
            about = [name for name in self.sources if self.named(name) in error.why]
            sources = dict.fromkeys(self.source(name) for name in about if self.source(name).startswith("from "))
            error.next += "".join(f"\nor change it in {source.removeprefix('from ')}" for source in sources)
            raise

    def check_bounds(self) -> None:
        """Raises BadOption for a value that is of another type than its option, or out of its bounds."""
        kinds = value_types(type(self))
        for field in option_fields(type(self)):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            kind = kinds[field.name]
            if not _is_of(kind, value):
                raise BadOption(
                    f"--{field.name} {value!r} is no {KINDS[kind]}",
                    why=f"it is of the type {type(value).__name__}: {field.metadata['help']}",
                    next=f"give a {kind.__name__}",
                )
            if complaint := _complaint(value, field.metadata):
                raise BadOption(
                    f"--{field.name} {value} {complaint}",
                    why=f"{self.named(field.name)}: {field.metadata['help']}",
                    next=_meant(field, value) + f"choose a --{field.name} that {_wanted(field.metadata)}",
                )


def _is_of(kind: type, value: Any) -> bool:
    """A script may give what no command line could. A whole number is a number too; True is neither."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _complaint(value: Any, limits: Mapping[str, Any]) -> str | None:
    if limits["choices"] is not None and value not in limits["choices"]:
        if not any(re.fullmatch(form, value) for form in limits["forms"].values()):
            return "is not known"
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number"
    if limits["minimum"] is not None and value < limits["minimum"]:
        return f"is below {limits['minimum']}"
    if limits["above"] is not None and value <= limits["above"]:
        return f"is not above {limits['above']}"
    if limits["maximum"] is not None and value > limits["maximum"]:
        return f"is above {limits['maximum']}"
    return None


def _meant(field: dataclasses.Field[Any], value: Any) -> str:
    """The choice that looks most like ``value``, as a question on a line of its own; "" where none does."""
    choices = field.metadata["choices"] or ()
    close = difflib.get_close_matches(value.lower(), choices, n=1) if choices else ()
    return f"did you mean --{field.name} {close[0]}?\nelse " if close else ""


def _wanted(limits: Mapping[str, Any]) -> str:
    if limits["choices"] is not None:
        return f"is one of {', '.join([*limits['choices'], *limits['forms']])}"
    bounds = [
        f"is {word} {limits[name]}"
        for name, word in (("minimum", "at least"), ("above", "above"), ("maximum", "at most"))
        if limits[name] is not None
    ]
    return " and ".join(bounds) or "is a finite number"


def option_fields(kind: type) -> Iterable[dataclasses.Field[Any]]:
    """The fields of a dataclass that are command-line options, in order."""
    return (field for field in dataclasses.fields(kind) if "help" in field.metadata)


def value_types(kind: type) -> dict[str, type]:
    """Option -> the type of its values: ``int`` for both int and int | None."""
    hints = get_type_hints(kind)
    found = {}
    for field in option_fields(kind):
        hint = hints[field.name]
        found[field.name] = next(one for one in getattr(hint, "__args__", (hint,)) if one is not type(None))
    return found


def spelling(name: str, kind: type) -> str:
    """Spell an option as click has it; a switch can be switched off too, since a file may have switched it on."""
    if kind is not bool:
        return f"--{name}"
    return f"--{name}/--{name.removeprefix('no_')}" if name.startswith("no_") else f"--{name}/--no_{name}"


def help_text(field: dataclasses.Field[Any], kind: type, default: str | None = None) -> str:
    """Describe an option with its choices and its default; ``default`` says which it is where it is not the field's."""
    text: str = field.metadata["help"]
    if field.metadata["choices"]:
        text += f" [{'|'.join([*field.metadata['choices'], *field.metadata['forms']])}]"
    if default is not None:
        return re.sub(r" \(default: [^)]*\)", "", text) + f" (default: {default})"
    return text if field.default is None or kind is bool else f"{text} (default: {field.default})"


def as_flags(options: Mapping[str, Any]) -> str:
    """``--epochs 2 --sync_bn``, quoted for a shell."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) and value == int(value) else str(value)]
    return shlex.join(words)


Compared = Mapping[str, Sequence[Any]]
"""Option -> [value, source], of one rank."""


def differing_options(rank_0: Compared, options: Compared) -> list[str]:
    """The options whose values are not the same, whatever their sources."""
    return [
        name
        for name in sorted({*rank_0, *options})
        if list(rank_0.get(name, ()))[:1] != list(options.get(name, ()))[:1]
    ]


def side_by_side(names: Iterable[str], rank_0: Compared, options: Compared, rank: str) -> str:
    return "\n".join(
        f"{name}: rank 0 has {_shown(rank_0.get(name))}, {rank} has {_shown(options.get(name))}" for name in names
    )


def _shown(option: Sequence[Any] | None) -> str:
    return f"{option[0]} ({option[1]})" if option else "no such option"
