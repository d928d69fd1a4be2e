"""The flags of a command, made from the fields of WorldSpec and TrainConfig."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from ddp_manual.options import option_fields, value_types

GROUPS = ("identity", "rendezvous", "training", "data", "output", "checkpoints")


class GroupedCommand(click.Command):
    """A command whose help lists its options under the headings of ``GROUPS``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading in (*GROUPS, None):
            records = [
                record
                for parameter in self.get_params(ctx)
                if getattr(parameter, "heading", None) == heading
                and (record := parameter.get_help_record(ctx)) is not None
            ]
            if records:
                with formatter.section(heading.capitalize() if heading else "Other"):
                    formatter.write_dl(records)


class GroupedOption(click.Option):
    """An option that knows its heading; made from a field of WorldSpec or TrainConfig."""

    def __init__(self, field: dataclasses.Field[Any], kind: type, default: str | None) -> None:
        self.heading = field.metadata["group"]
        help = field.metadata["help"]
        if field.metadata["choices"]:
            help += f" [{'|'.join([*field.metadata['choices'], *field.metadata['forms']])}]"
        if default is not None:
            help = re.sub(r" \(default: [^)]*\)", "", help) + f" (default: {default})"
        elif field.default is not None and kind is not bool:
            help += f" (default: {field.default})"
        super().__init__(
            [field.name, _spelling(field.name, kind)], type=kind, default=None, help=help, show_default=False
        )


def _spelling(name: str, kind: type) -> str:
    """A switch has one for off too: a file may have switched it on."""
    if kind is not bool:
        return f"--{name}"
    return f"--{name}/--{name.removeprefix('no_')}" if name.startswith("no_") else f"--{name}/--no_{name}"


def options_of(
    kind: type, only: Sequence[str] | None = None, default: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each option of a dataclass, or for some. A flag that is not given arrives as None.

    Args:
        default: what the help calls the default of each, where it is not the dataclass's.
    """
    types = value_types(kind)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        fields = [field for field in option_fields(kind) if only is None or field.name in only]
        parameters = [GroupedOption(field, types[field.name], default) for field in fields]
        known = getattr(function, "__click_params__", [])
        function.__click_params__ = [*known, *reversed(parameters)]  # type: ignore[attr-defined]
        return function

    return decorate


def given(kind: type, flags: dict[str, Any]) -> dict[str, Any]:
    """Those of a dataclass's options that were typed."""
    values = {field.name: flags.get(field.name) for field in option_fields(kind)}
    return {name: value for name, value in values.items() if value is not None}
