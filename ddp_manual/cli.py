"""The command line, and the only place where an error becomes an exit code.

Importing this module loads neither torch nor anything else that is slow: ``--help``, ``launch`` and every complaint
about a flag answer at once.
"""

from __future__ import annotations

import errno
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import click

from ddp_manual import errors, launchers, signals, terminal
from ddp_manual.options import help_text, option_fields, spelling, value_types
from ddp_manual.training.config import TrainConfig, require
from ddp_manual.world_spec import WorldSpec

FOUND_A_PROBLEM = 3
BROKEN_PIPE = 128 + signal.SIGPIPE
# The commands that can be started again, to meet the other ranks or to go on with a run.
OF_RANKS = ("train", "check", "launch")
# Underscores are how PyTorch users type options; dashes mean the same.
CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "max_content_width": 100,
}
PATH: Any = click.Path(path_type=Path)

# The headings of a command's help, and the options below them.
GROUPS = ("identity", "rendezvous", "training", "data", "output", "checkpoints", "other")
GROUP_OF = {field.name: field.metadata["group"] for kind in (WorldSpec, TrainConfig) for field in option_fields(kind)}


class GroupedCommand(click.Command):
    """A command whose help lists its options below headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in GROUPS:
            options = [option for option in self.get_params(ctx) if GROUP_OF.get(option.name or "", "other") == group]
            if records := [*filter(None, (option.get_help_record(ctx) for option in options))]:
                with formatter.section(group.capitalize()):
                    formatter.write_dl(records)


def options_of(kind: type, only: Sequence[str] | None = None, default: str | None = None) -> Callable[[Any], Any]:
    """Give a command an option for each field of WorldSpec or TrainConfig, or for some of them.

    An option that is not typed arrives as None.

    Args:
        default: what the help calls the default of each option, where it is not the field's.
    """

    def decorate(function: Any) -> Any:
        for field, value_type in reversed([*zip(option_fields(kind), value_types(kind).values(), strict=True)]):
            if only is None or field.name in only:
                names = (field.name, spelling(field.name, value_type))
                help = help_text(field, value_type, default)
                function = click.option(*names, type=value_type, default=None, help=help)(function)
        return function

    return decorate


def given(kind: type, flags: dict[str, Any]) -> dict[str, Any]:
    """Pick the options of a dataclass that were typed."""
    return {field.name: flags[field.name] for field in option_fields(kind) if flags.get(field.name) is not None}


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="ddp_manual", prog_name="ddp-manual")
def ddp_manual() -> None:
    """Start DistributedDataParallel training one rank at a time, by hand."""


@ddp_manual.command(cls=GroupedCommand)
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="A JSON file with training options, such as a run's config.json, or a run's folder; flags override it.",
)
@options_of(TrainConfig)
@options_of(WorldSpec)
def train(config_file: str | None, **flags: Any) -> int:
    """Run ONE rank: wait for the others, then train together with them.

    A value comes from its flag; otherwise from the variable torchrun would set (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT) or from the file that --config names; otherwise it is the default.
    """
    spec = WorldSpec.from_environment(**given(WorldSpec, flags))
    config = TrainConfig.from_file(config_file, **given(TrainConfig, flags))

    from ddp_manual.agent import tasks

    ended = tasks.train_by_hand(spec, config)
    if ended.error is None and spec.rank == 0:
        try:
            _say(terminal.result_text(ended.result))
        except errors.DdpManualError as error:  # the run is complete, whether its result can be printed or not
            where = ended.result["run_dir"]
            terminal.LOGGER.warning("%s (%s): the result is in %s", error.what, error.why, where)
        except click.exceptions.Exit:
            pass
    return ended.exit_code


@ddp_manual.command(cls=GroupedCommand)
@json_option
@options_of(WorldSpec)
def check(as_json: bool, **flags: Any) -> int:
    """Meet the other ranks, probe and measure, do not train: start it like train, one process per rank.

    Waits 30 s for the others unless --join_timeout says otherwise. Rank 0 prints the whole table, each other rank its
    own line. The exit code is 0, or 3 with the findings first.
    """
    from ddp_manual.tools import check

    report = check.check(WorldSpec.from_environment(**given(WorldSpec, flags)))
    _say(json.dumps(report) if as_json else check.text(report))
    return FOUND_A_PROBLEM if report["findings"] else 0


@ddp_manual.command(cls=GroupedCommand)
@click.option("--watch", is_flag=True, help="Look again every second, until the run ends or Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text; with --watch one a line.")
@click.option("--stacks", is_flag=True, help="Ask every rank for its Python stacks, to see where a run hangs.")
@options_of(WorldSpec, only=("master_addr", "master_port", "token_file"))
def status(watch: bool, as_json: bool, stacks: bool, **flags: Any) -> int:
    """Look at a run from any third terminal: who is here, who is missing, what each rank does. Joins nothing.

    With --watch, the exit code is that of the failure that has ended the run.
    """
    from ddp_manual.tools import status

    spec = WorldSpec.from_environment(**given(WorldSpec, flags))
    try:
        redraws = watch and not as_json and sys.stdout.isatty()
        with terminal.redrawing() if redraws else nullcontext(_say) as show:
            text = json.dumps if as_json else status.text
            status.watch(spec, lambda seen: show(text(seen)), again=watch, stacks=stacks)
    except errors.DdpManualError as error:
        if as_json:
            _say(json.dumps({"error": error.as_dict()}))
        raise
    except errors.StopSignal as stop:  # the usual way to end --watch, and no failure
        return 128 + stop.number
    if watch and not as_json:
        _say("the run has ended: rank 0 is gone")
    return 0


@ddp_manual.command("checkpoints")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of text.")
@click.argument("folder", metavar="DIR", type=PATH)
def list_checkpoints(as_json: bool, folder: Path) -> None:
    """List the checkpoints of the run in DIR, newest first, and whether each is what was written.

    The exit code is 0, also if a checkpoint is damaged; 15 if there is no checkpoint.
    """
    from ddp_manual.tools import checkpoints

    found = checkpoints.list_checkpoints(folder)
    _say(json.dumps(found, indent=2) if as_json else checkpoints.text(found))


@ddp_manual.command("compare")
@click.option("--plot", metavar="FILE", type=PATH, help="Also draw them, as .png, .pdf or .svg.")
@json_option
@click.argument("folders", metavar="RUN RUN ...", nargs=-1, type=PATH)
def compare_runs(plot: Path | None, as_json: bool, folders: tuple[Path, ...]) -> None:
    """Put runs side by side: speed, efficiency, loss, accuracy, and the options that differ.

    Each RUN is the folder of a run, which may still be going on or have been stopped; a start that failed is passed
    over.
    """
    from ddp_manual.tools import compare

    terminal.log_to_stderr(None)
    compared = compare.compare(folders)
    lines = [json.dumps(compared.as_dict(), indent=2) if as_json else compared.text()]
    if plot is not None:
        require("plots", "--plot")
        from ddp_manual.tools import compare_plot

        compare_plot.write_plot(compared, plot)
        lines += [] if as_json else ["", f"  {plot}"]
    _say("\n".join(lines))


@ddp_manual.command(cls=GroupedCommand)
@click.option(
    "--checkpoint",
    metavar="PATH",
    type=PATH,
    required=True,
    help="A run's folder, its model.pt, or one of its checkpoints.",
)
@click.option(
    "--out_dir",
    metavar="DIR",
    type=PATH,
    help="Where the prediction files go (default: evaluation-<dataset> in the run's folder).",
)
@json_option
@options_of(
    TrainConfig,
    only=("model", "normalization", "dataset", "image_size", "classes", "data_dir"),
    default="the run's",
)
def evaluate(checkpoint: Path, out_dir: Path | None, as_json: bool, **flags: Any) -> None:
    """Test a trained model, in one process: accuracy, loss, accuracy by class, and its guess for each image.

    Model, data and normalisation are those of the config.json beside it; flags override them.
    """
    from ddp_manual.tools import evaluate

    terminal.log_to_stderr(None)
    report = evaluate.evaluate(checkpoint, out_dir, given(TrainConfig, flags))
    _say(json.dumps(report, indent=2) if as_json else evaluate.text(report))


@ddp_manual.command("show-data", cls=GroupedCommand)
@click.option("--part", type=click.Choice(["train", "test"]), default="train", help="Which part (default: train).")
@click.option("--count", type=click.IntRange(1, 1000), default=40, help="How many images to draw (default: 40).")
@click.option("--out", metavar="FILE", type=PATH, help="The PNG file to write (default: <dataset>-<part>.png).")
@options_of(TrainConfig, only=("dataset", "image_size", "classes", "data_dir"))
def show_data(part: str, count: int, out: Path | None, **flags: Any) -> None:
    """Look at a data set before training on it: some labelled images as a PNG file, and how many each class has.

    On a terminal with colours, a few are drawn there too.
    """
    from ddp_manual.tools import show_data

    terminal.log_to_stderr(None)
    typed = given(TrainConfig, flags)
    _say(show_data.text(show_data.show(TrainConfig(**typed, sources=dict.fromkeys(typed, "flag")), part, count, out)))


@ddp_manual.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc", type=click.IntRange(min=1), required=True, help="How many ranks to start on this machine.")
@click.option("--run_dir", help="Where logs and results go (default: runs/<start time>-<run_id>).")
@click.option(
    "--max_restarts",
    type=click.IntRange(min=0),
    default=0,
    help="How often to start all ranks again, from the newest checkpoint, after a rank was killed or its training "
    "failed (default: 0).",
)
@click.argument("train_options", nargs=-1, type=click.UNPROCESSED)
def launch(nproc: int, run_dir: str | None, max_restarts: int, train_options: tuple[str, ...]) -> int:
    """Start NPROC ranks on this machine, each with the TRAIN_OPTIONS after --, and end them together.

    The exit code is that of the rank that failed first; 128 + n after signal n, such as 130 after Ctrl-C.
    """
    from ddp_manual.agent import local

    local.check_train_options(nproc, train_options)
    flags = train.make_context("train", list(train_options)).params
    config = TrainConfig.from_file(flags.pop("config_file"), **given(TrainConfig, flags))
    options = given(WorldSpec, flags)  # and no variables, which another launcher may have left
    spec = WorldSpec(**options, sources=dict.fromkeys(options, "flag"))
    return local.launch_ranks(nproc, spec, config, train_options, run_dir, max_restarts)


def _say(text: str) -> None:
    """Print the text on stdout.

    Raises:
        DiskFull, BadOption: stdout cannot take it. Exit: its reader has gone.
    """
    try:
        click.echo(text)
    except OSError as error:
        failed = terminal.stdout_failed(error)
        if error.errno == errno.EPIPE:
            raise click.exceptions.Exit(BROKEN_PIPE) from error
        raise failed from error


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, after printing any error the way all errors are printed."""
    terminal.escape_what_cannot_be_shown()
    try:
        with signals.raise_on_stop():
            status = ddp_manual.main(args=arguments, prog_name="ddp-manual", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except (errors.StopSignal, KeyboardInterrupt, click.Abort) as signalled:
        ended: errors.DdpManualError = errors.stopped_by(signalled)
        command = next(iter(sys.argv[1:] if arguments is None else arguments), None)
        if command not in OF_RANKS:  # nothing has to be started again
            terminal.say(ended.what)
            return ended.exit_code
    except Exception as error:
        ended = _as_ours(error)
    terminal.print_error(ended)
    return ended.exit_code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script: like ``run``, then end the process."""
    sys.exit(run(arguments))


def _as_ours(error: Exception) -> errors.DdpManualError:
    """Turn what a command has raised into an error that explains itself."""
    if isinstance(error, errors.DdpManualError):
        return error
    if isinstance(error, click.ClickException):
        program, arguments = launchers.typed_command()
        about = getattr(getattr(error, "param", None), "help", None)
        command = [*program, *arguments[: bool(arguments) and arguments[0] in ddp_manual.commands]]
        return errors.BadOption(
            error.format_message().rstrip("."),
            why=about or "the command line has no such option or argument",
            next=f"{shlex.join(command)} --help",
        )
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "torchvision", "psutil", "rich"):
        return errors.not_installed(error.name)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return terminal.stdout_failed(error)  # click's own text, of --help
    return errors.TrainingFailed(
        f"{type(error).__name__}: {error}".splitlines()[0],
        why=errors.traceback_of(error),
        next="mend the code or the data that raised it, then try again",
    )
