"""The command line, and the only place where an error becomes an exit code.

Importing this package loads neither torch nor anything else that is slow: ``--help``, ``launch`` and every complaint
about a flag answer at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from ddp_manual import errors, signal_handlers, terminal
from ddp_manual.cli.flags_from_options import OF_TORCHRUN
from ddp_manual.cli.launching import hosted, launch, list_commands
from ddp_manual.cli.looking import compare_runs, evaluate, list_checkpoints, list_runs, show_data, status
from ddp_manual.cli.ranks import check, run_program, train
from ddp_manual.cli.stdout import print_result
from ddp_manual.environment import command_line
from ddp_manual.text_wrapping import as_shell_words, whole

# Underscores are how PyTorch users type options; dashes mean the same.
CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "max_content_width": 100,
}

# Of a path below a folder that this user may not enter, or that no file can have.
NO_SUCH_PATH = (errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP)
IN_THE_USUAL_ORDER = (
    *(list_commands, check, run_program, train, launch, hosted, status),
    *(list_runs, compare_runs, list_checkpoints, evaluate, show_data),
)


class OrderedGroup(click.Group):
    """The commands in the order in which they are typed."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = [command for command in IN_THE_USUAL_ORDER if not command.hidden]
        with formatter.section("Commands, in the usual order"):
            formatter.write_dl([(str(command.name), command.short_help or "") for command in shown])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and (args[0].endswith(".py") or os.path.isfile(args[0])):
            raise errors.BadOption(
                f"{args[0]} is a script, and no command of ddp-manual",
                why="the command run starts one rank of a script",
                next=whole(f"ddp-manual run {as_shell_words(args)}"),
            )
        return super().resolve_command(ctx, args)


@click.group(cls=OrderedGroup, context_settings=CONTEXT, invoke_without_command=True)
@click.version_option(package_name="ddp_manual", prog_name="ddp-manual")
@click.pass_context
def ddp_manual(context: click.Context) -> None:
    """Start distributed PyTorch by hand, each rank in a terminal of its own:

    \b
      ddp-manual run --world_size 2 --rank 0 train.py
      ddp-manual run --world_size 2 --rank 1 train.py
    """
    if context.invoked_subcommand is None:
        print_result(context.get_help())


for command in IN_THE_USUAL_ORDER:
    ddp_manual.add_command(command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command, print the error that it raises, and return the exit status."""
    terminal.open_what_is_closed()
    terminal.escape_what_cannot_be_shown()
    try:
        with signal_handlers.raise_on_stop():
            status = ddp_manual.main(args=arguments, prog_name="ddp-manual", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except (errors.StopSignal, KeyboardInterrupt, click.Abort) as signalled:
        ended: errors.DdpManualError = errors.stopped_by(signalled)
    except Exception as error:
        ended = _as_ours(error)
    terminal.print_error(ended)
    return ended.exit_code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, then end the process with its exit status: the console script."""
    sys.exit(run(arguments))


def _as_ours(error: Exception) -> errors.DdpManualError:
    """Turn what a command has raised into an error that explains itself."""
    if isinstance(error, errors.DdpManualError):
        return error
    if isinstance(error, click.ClickException):
        return _of_click(error)
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "torchvision", "psutil", "rich"):
        return errors.not_installed(error.name)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return terminal.stdout_failed(error)  # click's own text, of --help
    if isinstance(error, OSError) and error.errno in NO_SUCH_PATH and error.filename is not None:
        what = f"{errors.escaped(str(error.filename))} cannot be read"
        return errors.BadOption(what, why=str(error.strerror), next="name another path, or one that this user may read")
    return errors.TrainingFailed(
        f"{type(error).__name__}: {error}".splitlines()[0],
        why=errors.traceback_of(error),
        next="fix the code or the data that raised it, then try again",
    )


def _of_click(error: click.ClickException) -> errors.BadOption:
    """Turn an error of click's into one that names the command's --help."""
    program, arguments = command_line.typed_command()
    command = [*program, *arguments[: bool(arguments) and arguments[0] in ddp_manual.commands]]
    context = error.ctx if isinstance(error, click.UsageError) else None
    if command[-1] == "launch" and context is not None:
        command[-1] = context.info_name or "launch"  # train, which has the options after the --
    why = getattr(getattr(error, "param", None), "help", None)
    next = whole(f"{as_shell_words(command)} --help")
    if isinstance(error, click.NoSuchOption):
        if context is not None and context.info_name == "launch" and (instead := OF_TORCHRUN.get(error.option_name)):
            what = f"launch has no option {error.option_name}"
            return errors.BadOption(what, why=f"torchrun has it, and here {instead}", next="leave it out")
        why = "the command has no such option"
        has = {parameter.name for parameter in context.command.params} if context is not None else set[str | None]()
        if has & {"program", "script"}:
            next += f"\nor put {error.option_name} after the script, if it is one of the script's"
        if "program" in has:
            next += "\nor after a --, if it is one of the built-in training"
        form = {"run": "SCRIPT", "train": "-- OPTIONS"}.get(str(context.info_name if context is not None else ""))
        if form is not None and any(error.option_name in option.opts for option in launch.params):
            next = f"to start all ranks at once: ddp-manual launch {error.option_name} ... {form}\n{next}"
    why = why or (context.get_usage() if context is not None else "the command line cannot be read so")
    return errors.BadOption(error.format_message().rstrip("."), why=why, next=next)
