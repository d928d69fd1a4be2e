"""What options commands have, and what was typed for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ddp_manual import errors
from ddp_manual.environment.command_line import option_in
from ddp_manual.option_fields import help_text, left_empty, option_fields, spelling, value_types
from ddp_manual.program import EXECUTABLE, MODULE, SCRIPT, Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.training.options import TrainConfig

PATH: Any = click.Path(path_type=Path)

# The headings of a command's help, and the options below them.
GROUPS = (
    *("ranks", "hosts", "identity", "script", "rendezvous", "lost ranks", "training", "data", "output", "checkpoints"),
    "other",
)
GROUP_OF = {
    **{field.name: field.metadata["group"] for kind in (WorldSpec, TrainConfig) for field in option_fields(kind)},
    **dict.fromkeys(("nproc", "nnodes", "node_rank"), "ranks"),
    **dict.fromkeys(("hosts", "hostfile", "ssh_command", "remote_dir", "remote_python", "export", "dry_run"), "hosts"),
    **dict.fromkeys(("as_module", "no_python", "may_differ", "start"), "script"),
}
# Options that most people never need.
RARE = {
    *("local_rank", "listen_addr", "run_id", "collectives", "allow_mismatch", "standby_addr", "on_loss_of_own_code"),
    *("rejoin_timeout", "shrink_after", "start", "ssh_command", "remote_dir", "remote_python", "export", "standalone"),
    *("lr_scaling", "lr_schedule", "warmup_epochs", "momentum", "weight_decay", "clip_grad_norm", "shift", "flip"),
    *("normalization", "sync_bn", "no_ddp", "image_size", "classes", "check_replicas", "checkpoint_steps"),
    "hold_every",
}


class GroupedCommand(click.Command):
    """A command whose help lists its options below headings; only --help-all shows those in RARE."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *others, help = super().get_params(ctx)
        is_long = any(option.name in RARE for option in others)
        return [*others, help, _help_all(hidden=not is_long)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for option in self.get_params(ctx):
            is_shown = isinstance(option, click.Option) and (ctx.meta.get(SHOWS_ALL) or option.name not in RARE)
            if is_shown and (record := option.get_help_record(ctx)):
                sections[GROUP_OF.get(option.name or "", "other")].append(record)
        used = {group: records for group, records in sections.items() if records}
        for group, records in used.items():
            with formatter.section(group.capitalize() if len(used) > 1 else "Options"):
                formatter.write_dl(records)


class ProgramCommand(GroupedCommand):
    """A command whose options end where a program begins: what follows is the program's."""

    allow_interspersed_args = False


# In the ``meta`` of a context: whether its help shows the options in RARE too.
SHOWS_ALL = "ddp_manual.shows_all"


def _show_all(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        context.meta[SHOWS_ALL] = True
        click.echo(context.get_help())
        context.exit()


def _help_all(*, hidden: bool) -> click.Option:
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        hidden=hidden,
        callback=_show_all,
        help="Show all options, also those that most people never need.",
    )


# A program chooses its devices itself; launch chooses the place of each rank.
PROGRAM_OPTIONS = tuple(field.name for field in option_fields(WorldSpec) if field.name not in ("device", "backend"))
OF_ITS_OWN = ("world_size", "rank", "local_rank", "run_id")
LAUNCH_OPTIONS = tuple(name for name in PROGRAM_OPTIONS if name not in OF_ITS_OWN)
# Options of torchrun that launch has no use for, and what it has instead.
MEETING = "ranks on several machines meet at --master_addr and --master_port"
LINES = "each line shows its rank; with --run_dir DIR there is also a file for each rank"
OF_TORCHRUN = {
    **dict.fromkeys(("--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf"), MEETING),
    **dict.fromkeys(("--log_dir", "--tee", "--redirects", "--local_ranks_filter", "-r", "-t"), LINES),
    "--monitor_interval": "the end of a rank is seen at once",
    "--role": "all ranks have the same role",
    "--local_addr": "the address is that of the interface on the way to rank 0",
}
# How accelerate spells options of launch.
ALSO_SPELLED = {"master_addr": "--main_process_ip", "master_port": "--main_process_port"}


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give a command several options, in this order."""
    return lambda function: functools.reduce(lambda found, give: give(found), reversed(options), function)


def options_of(
    kind: type, only: Sequence[str] | None = None, defaults: Mapping[str, object] | None = None
) -> Callable[[Any], Any]:
    """Give a command an option for each field of WorldSpec or TrainConfig, or for some of them.

    An option that is not typed arrives as None.

    Args:
        defaults: option -> what the help calls its default, where that is not the field's.
    """
    found = []
    for field, value_type in zip(option_fields(kind), value_types(kind).values(), strict=True):
        if only is None or field.name in only:
            names = [field.name, spelling(field.name, value_type)]
            if only is LAUNCH_OPTIONS and field.name in ALSO_SPELLED:
                names.append(ALSO_SPELLED[field.name])
            help = help_text(field, value_type, (defaults or {}).get(field.name))
            found.append(click.option(*names, type=value_type, default=None, help=help))
    return together(*found)


def given(kind: type, flags: dict[str, Any]) -> dict[str, Any]:
    """Return option -> value, for the options of a dataclass that were typed."""
    return {field.name: flags[field.name] for field in option_fields(kind) if flags.get(field.name) is not None}


def not_empty(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Refuse a folder whose name is empty, as of a shell's variable that is not set: it would be the current one."""
    if value is not None and not value.strip():
        raise left_empty(str(option.name), getattr(option, "help", ""))
    return value


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
# The options that say how to run a program of the user's own.
program_options = together(
    click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m."),
    click.option("--no_python", is_flag=True, help="SCRIPT is any executable, not a script in Python."),
    click.option(
        "--may_differ",
        metavar="NAME,...",
        help="Arguments of the script that may differ between ranks, such as seed,name.",
    ),
)


def launched_program(defaults: Mapping[str, object] | None = None) -> Callable[[Any], Any]:
    """Give a command for all ranks its parameters: the program, the program's options, and those of the ranks.

    Args:
        defaults: see ``options_of``.
    """
    form = "[SCRIPT [ARGUMENTS]... | -- TRAIN_OPTIONS...]"
    program = click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar=form)
    return together(program_options, options_of(WorldSpec, only=LAUNCH_OPTIONS, defaults=defaults), program)


def own_program(context: click.Context) -> Program | None:
    """Return the script that was typed with ``launched_program``; None where our own training is meant.

    Raises:
        MissingParameter, BadOption: options were typed that only a script can have, and there is none.
    """
    typed = context.params
    if typed["program"] and not typed["program"][0].startswith("-"):
        return program_of(typed["program"], as_module=typed["as_module"], no_python=typed["no_python"])
    if typed["may_differ"] is not None:
        raise errors.BadOption(
            "--may_differ is for a script of your own",
            why="no script was given, and the options of our training are the same on every rank",
            next="leave --may_differ out, or name the script after it",
        )
    if typed["as_module"] or typed["no_python"]:
        raise click.MissingParameter(ctx=context, param_hint="SCRIPT", param_type="argument")
    return None


def check_before_script(command: str, program: Program | None, *names: str) -> None:
    """Raise BadOption if a command lacks an option because it was typed after the script, and so went to the script."""
    if program is not None and (late := option_in(program.arguments, *names)):
        raise errors.BadOption(
            f"{command} was given no {'hosts' if 'hosts' in names else f'--{names[0]}'} before {program.name}",
            why=f"{late} comes after {program.name} and goes to it",
            next=f"put {late} before {program.name}",
        )


def hosts_options(help: str) -> Callable[[Any], Any]:
    """Give a command the options that name the hosts of a run; ``help`` is that of --hosts."""
    hostfile = "The same from a file, with a line HOST slots=N for each host."
    return together(
        click.option("--hosts", metavar="HOST:N,...", help=help),
        click.option("--hostfile", metavar="FILE", help=hostfile),
    )


def program_of(words: Sequence[str], *, as_module: bool = False, no_python: bool = False) -> Program:
    """Return the program that was typed.

    Raises:
        BadOption: both -m and --no_python were typed.
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
