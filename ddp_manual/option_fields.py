"""Options as dataclass fields: name, default, bounds and help in one place, from which the flags are made."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_type_hints

from ddp_manual.errors import BadOption
from ddp_manual.text_wrapping import as_shell_words

T = TypeVar("T")
_type_hints = functools.cache(get_type_hints)

KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Name of a bound, what is said of a value that violates it, what is said of a value that may be chosen, and the test.
BOUNDS = (
    ("minimum", "below", "at least", operator.lt),
    ("above", "not above", "above", operator.le),
    ("maximum", "above", "at most", operator.gt),
    ("below", "not below", "below", operator.ge),
)


def option(
    default: T,
    help: str,
    *,
    group: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    forms: Mapping[str, str] | None = None,
    shared: bool = True,
) -> T:
    """Return a dataclass field that is also a command-line option.

    Args:
        minimum, maximum: the smallest and the largest value allowed; ``above``, ``below``: bounds that are not allowed
            themselves.
        forms: values allowed besides the ``choices``: a name such as PATH -> a regular expression for the whole value.
        shared: whether the ranks of a run must agree on it.
    """
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    described = {"help": help, "group": group, "shared": shared, "choices": choices, "forms": forms or {}}
    return dataclasses.field(default=default, metadata={**described, **bounds})


class Options:
    """The base of WorldSpec and TrainConfig: checks each value, and knows where it came from."""

    sources: Mapping[str, str]

    def source(self, name: str) -> str:
        """Return ``flag``, ``from VARIABLE``, ``from FILE``, ``argument`` (of a call in a script) or ``default``."""
        default = getattr(type(self), name)
        return self.sources.get(name, "default" if getattr(self, name) == default else "argument")

    def named(self, name: str) -> str:
        """Return ``rank 4 (from RANK)``."""
        return f"{name} {getattr(self, name)} ({self.source(name)})"

    def values(self) -> dict[str, Any]:
        """Return option -> value, for all options."""
        return {field.name: getattr(self, field.name) for field in option_fields(type(self))}

    def given_options(self) -> dict[str, Any]:
        """Return the options to type for the same values: without defaults, except those typed to override a file."""
        files = any(source.startswith("from ") for source in self.sources.values())
        return {
            name: getattr(self, name)
            for name, source in self.sources.items()
            if getattr(self, name) != getattr(type(self), name) or (files and source == "flag")
        }

    @contextmanager
    def naming_files(self) -> Iterator[None]:
        """Have a BadOption of the body name the files that hold the values it complains about."""
        try:
            yield
        except BadOption as error:
            about = [name for name in self.sources if self.named(name) in error.why]
            sources = dict.fromkeys(self.source(name) for name in about if self.source(name).startswith("from "))
            error.next += "".join(f"\nor change it in {source.removeprefix('from ')}" for source in sources)
            raise

    def check_bounds(self) -> None:
        """Raise BadOption for a value of the wrong type, for an empty text, and for a value out of bounds."""
        kinds = value_types(type(self))
        for field in option_fields(type(self)):
            name, kind, value, limits = field.name, kinds[field.name], getattr(self, field.name), field.metadata
            why = f"{self.named(name)}: {limits['help']}"
            if value is None and field.default is None:
                continue
            if not _is_of(kind, value):
                why = f"{self.named(name)} is of the type {type(value).__name__}: {limits['help']}"
                raise BadOption(f"--{name} {value!r} is not {KINDS[kind]}", why=why, next=f"give {KINDS[kind]}")
            if kind is str and not value.strip():
                raise left_empty(name, why)
            if complaint := _complaint(value, limits):
                wanted = _meant(field, value) + f"choose a --{name} that {_wanted(limits)}"
                raise BadOption(f"--{name} {value} {complaint}", why=why, next=wanted)


def left_empty(name: str, why: str) -> BadOption:
    return BadOption(f"--{name} is empty", why=why, next=f"leave --{name} out, or say which it is")


def _is_of(kind: type, value: Any) -> bool:
    """Return whether a script gave a value of this type. A whole number is a number too; True is neither."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _complaint(value: Any, limits: Mapping[str, Any]) -> str | None:
    if limits["choices"] is not None:
        is_known = value in limits["choices"] or any(re.fullmatch(form, value) for form in limits["forms"].values())
        return None if is_known else "is not known"
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number"
    violated = (bound for bound in BOUNDS if limits[bound[0]] is not None and bound[-1](value, limits[bound[0]]))
    return next((f"is {complaint} {limits[name]}" for name, complaint, *_ in violated), None)


def _meant(field: dataclasses.Field[Any], value: Any) -> str:
    """Ask for the choice most like ``value``, on a line of its own; "" where no choice is similar."""
    choices = field.metadata["choices"] or ()
    close = difflib.get_close_matches(value.lower(), choices, n=1) if choices else ()
    return f"did you mean --{field.name} {close[0]}?\notherwise " if close else ""


def _wanted(limits: Mapping[str, Any]) -> str:
    if limits["choices"] is not None:
        return f"is one of {', '.join([*limits['choices'], *limits['forms']])}"
    bounds = [f"is {word} {limits[name]}" for name, _, word, _ in BOUNDS if limits[name] is not None]
    return " and ".join(bounds) or "is a finite number"


def option_fields(kind: type) -> Iterable[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are command-line options, in order."""
    return (field for field in dataclasses.fields(kind) if "help" in field.metadata)


def value_types(options: type) -> dict[str, type]:
    """Return option -> type of its values: ``int`` for both int and int | None."""
    hints = _type_hints(options)
    found = {}
    for field in option_fields(options):
        hint = hints[field.name]
        found[field.name] = next(kind for kind in getattr(hint, "__args__", (hint,)) if kind is not type(None))
    return found


def number_below(name: str, number: int, total: str, count: int, what: str) -> str:
    """Return the advice where ``number`` of ``--name`` is not below ``count`` of ``--total``; both count ``what``."""
    if count > 1:
        return f"choose a --{name} from 0 to {count - 1}"
    return f"say how many {what} there are: --{total} {number + 1} or more"


def spelling(name: str, kind: type) -> str:
    """Spell an option as click has it; a switch can be switched off too, since a file may have switched it on."""
    if kind is not bool:
        return f"--{name}"
    return f"--{name}/--{name.removeprefix('no_')}" if name.startswith("no_") else f"--{name}/--no_{name}"


def help_text(field: dataclasses.Field[Any], kind: type, default: object = None) -> str:
    """Describe an option with its choices and its default; ``default`` says which it is where it is not the field's."""
    text: str = field.metadata["help"]
    if field.metadata["choices"]:
        text += f" [{'|'.join([*field.metadata['choices'], *field.metadata['forms']])}]"
    if default is not None:
        return re.sub(r" \(default: [^)]*\)", "", text) + f" (default: {default})"
    if field.default is None or kind is bool:
        return text
    return f"{text} (default: {f'{field.default:g}' if kind is float else field.default})"


def as_flags(options: Mapping[str, Any]) -> str:
    """Return ``--epochs 2 --sync_bn``, quoted for a shell."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) and value == int(value) else str(value)]
    return as_shell_words(words)


Compared = Mapping[str, Sequence[Any]]
"""Option -> [value, source] on one rank."""


def differing_options(rank_0: Compared, options: Compared) -> list[str]:
    """Return the options whose values differ, whatever their sources."""
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
