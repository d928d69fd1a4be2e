"""What options commands have, and what was typed for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ddp_manual import errors
from ddp_manual.options import help_text, option_fields, spelling, value_types
from ddp_manual.program import EXECUTABLE, MODULE, SCRIPT, Program
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec

PATH: Any = click.Path(path_type=Path)

# The headings of a command's help, and the options below them.
GROUPS = ("identity", "rendezvous", "lost ranks", "training", "data", "output", "checkpoints", "other")
GROUP_OF = {field.name: field.metadata["group"] for kind in (WorldSpec, TrainConfig) for field in option_fields(kind)}


class GroupedCommand(click.Command):
    """A command whose help lists its options below headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in GROUPS:
            options = [option for option in self.get_params(ctx) if GROUP_OF.get(option.name or "", "other") == group]
            if records := [*filter(None, (option.get_help_record(ctx) for option in options))]:
                with formatter.section(group.capitalize()):
                    formatter.write_dl(records)


# A program chooses its devices itself; launch chooses the place of each rank.
PROGRAM_OPTIONS = tuple(field.name for field in option_fields(WorldSpec) if field.name not in ("device", "backend"))
OF_ITS_OWN = ("world_size", "rank", "local_rank", "run_id")
LAUNCH_OPTIONS = tuple(name for name in PROGRAM_OPTIONS if name not in OF_ITS_OWN)
# What the help calls the default.
OF_LAUNCH = {"max_restarts": 0}
# How accelerate spells options of launch.
ALSO_SPELLED = {"master_addr": "--main_process_ip", "master_port": "--main_process_port"}


def options_of(
    kind: type, only: Sequence[str] | None = None, defaults: Mapping[str, object] | None = None
) -> Callable[[Any], Any]:
    """Give a command an option for each field of WorldSpec or TrainConfig, or for some of them.

    An option that is not typed arrives as None.

    Args:
        defaults: option -> what the help calls its default, where that is not the field's.
    """

    def decorate(function: Any) -> Any:
        for field, value_type in reversed([*zip(option_fields(kind), value_types(kind).values(), strict=True)]):
            if only is None or field.name in only:
                names = [field.name, spelling(field.name, value_type)]
                if only is LAUNCH_OPTIONS and field.name in ALSO_SPELLED:
                    names.append(ALSO_SPELLED[field.name])
                help = help_text(field, value_type, (defaults or {}).get(field.name))
                function = click.option(*names, type=value_type, default=None, help=help)(function)
        return function

    return decorate


def given(kind: type, flags: dict[str, Any]) -> dict[str, Any]:
    """Pick the options of a dataclass that were typed."""
    return {field.name: flags[field.name] for field in option_fields(kind) if flags.get(field.name) is not None}


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def program_options(function: Any) -> Any:
    """Give a command the options that say how to run a program of the user's own."""
    for decorate in reversed(
        (
            click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m."),
            click.option("--no_python", is_flag=True, help="SCRIPT is any executable, not a script in Python."),
            click.option(
                "--may_differ",
                metavar="NAME,...",
                help="Arguments of the script that may differ between ranks, such as seed,name.",
            ),
        )
    ):
        function = decorate(function)
    return function


def launched_program(function: Any) -> Any:
    """Give a command what starts all ranks has: the program, its options, and those of the ranks."""
    form = "[SCRIPT [ARGUMENTS]... | -- TRAIN_OPTIONS...]"
    program = click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar=form)
    return program_options(options_of(WorldSpec, only=LAUNCH_OPTIONS, defaults=OF_LAUNCH)(program(function)))


def check_has_no_script(context: click.Context, **of_script: Any) -> None:
    """Refuse options that only a script of the user's own can have, where there is none.

    Raises:
        MissingParameter, BadOption: one of them was typed.
    """
    if of_script.pop("may_differ") is not None:
        raise errors.BadOption(
            "--may_differ is for a script of your own",
            why="no script was given, and the options of our training are the same on every rank",
            next="leave --may_differ out, or name the script after it",
        )
    if any(of_script.values()):
        raise click.MissingParameter(ctx=context, param_hint="SCRIPT", param_type="argument")


def hosts_options(help: str) -> Callable[[Any], Any]:
    """Give a command the options that name the hosts of a run; ``help`` is that of --hosts."""

    def decorate(function: Any) -> Any:
        hostfile = "The same from a file, with a line HOST slots=N for each host."
        function = click.option("--hostfile", metavar="FILE", help=hostfile)(function)
        return click.option("--hosts", metavar="HOST:N,...", help=help)(function)

    return decorate


def program_of(words: Sequence[str], *, as_module: bool = False, no_python: bool = False) -> Program:
    """Return the program that was typed.

    Raises:
        BadOption: it is said to be a module and no Python at all.
    """
    if as_module and no_python:
        raise errors.BadOption(
            "-m and --no_python exclude each other",
            why=f"-m runs {words[0]} as a module of Python, --no_python runs it as it is",
            next="leave one of them out",
        )
    kind = MODULE if as_module else EXECUTABLE if no_python else SCRIPT
    return Program(kind=kind, name=words[0], arguments=tuple(words[1:]))


def names_in(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
