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

from ddp_manual import errors, host_list, launchers, signals, terminal
from ddp_manual.options import check_before_script, help_text, option_fields, spelling, value_types
from ddp_manual.program import EXECUTABLE, MODULE, SCRIPT, Program
from ddp_manual.training.config import TrainConfig, require
from ddp_manual.world_spec import WorldSpec

FOUND_A_PROBLEM = 3
BROKEN_PIPE = 128 + signal.SIGPIPE
# Underscores are how PyTorch users type options; dashes mean the same.
CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "max_content_width": 100,
}
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
OF_ITS_OWN = ("world_size", "rank", "local_rank", "run_id", "max_restarts")
LAUNCH_OPTIONS = tuple(name for name in PROGRAM_OPTIONS if name not in OF_ITS_OWN)
# How accelerate spells options of launch.
ALSO_SPELLED = {"master_addr": "--main_process_ip", "master_port": "--main_process_port"}


def options_of(kind: type, only: Sequence[str] | None = None, default: str | None = None) -> Callable[[Any], Any]:
    """Give a command an option for each field of WorldSpec or TrainConfig, or for some of them.

    An option that is not typed arrives as None.

    Args:
        default: what the help calls the default of each option, where it is not the field's.
    """

    def decorate(function: Any) -> Any:
        for field, value_type in reversed([*zip(option_fields(kind), value_types(kind).values(), strict=True)]):
            if only is None or field.name in only:
                names = [field.name, spelling(field.name, value_type)]
                if only is LAUNCH_OPTIONS and field.name in ALSO_SPELLED:
                    names.append(ALSO_SPELLED[field.name])
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
    return program_options(options_of(WorldSpec, only=LAUNCH_OPTIONS)(program(function)))


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


@ddp_manual.command("run", cls=GroupedCommand, context_settings={"allow_interspersed_args": False})
@program_options
@click.option(
    "--run_dir", metavar="DIR", help="Where a rank that fails leaves why, as failure-rank<k>.json (default: nowhere)."
)
@options_of(WorldSpec, only=PROGRAM_OPTIONS)
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run_program(
    script: tuple[str, ...], as_module: bool, no_python: bool, may_differ: str | None, run_dir: str | None, **flags: Any
) -> int:
    """Run ONE rank of your own SCRIPT, unmodified: wait for the others, then start it as torchrun would.

    A value comes from its flag; otherwise from the variable torchrun would set (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT); otherwise it is the default. The exit code is the script's own, or that of the error
    that has ended the run.
    """
    spec = WorldSpec.from_environment(**given(WorldSpec, flags))
    chosen = program_of(script, as_module=as_module, no_python=no_python)

    from ddp_manual.agent import tasks

    return tasks.run_by_hand(spec, chosen, run_dir, names_in(may_differ)).exit_code


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
@click.option(
    "--watch", is_flag=True, help="Wait for rank 0, and look again every second until the run ends or Ctrl-C."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text; with --watch one a line.")
@click.option("--stacks", is_flag=True, help="Ask every rank for its Python stacks, to see where a run hangs.")
@click.option("--shrink", is_flag=True, help="Have the run go on without the ranks that are lost (--on_loss wait).")
@options_of(WorldSpec, only=("master_addr", "master_port", "token_file"))
def status(watch: bool, as_json: bool, stacks: bool, shrink: bool, **flags: Any) -> int:
    """Look at a run from any third terminal: who is here, who is missing, what each rank does. Joins nothing.

    With --watch, the exit code is that of the failure that has ended the run.
    """
    from ddp_manual.tools import status

    spec = WorldSpec.from_environment(**given(WorldSpec, flags), is_rank=False)
    try:
        redraws = watch and not as_json and sys.stdout.isatty()
        with terminal.redrawing() if redraws else nullcontext(_say) as show:
            text = json.dumps if as_json else status.text
            seen = status.watch(spec, lambda seen: show(text(seen)), again=watch, stacks=stacks, shrink=shrink)
    except errors.DdpManualError as error:
        if as_json:
            _say(json.dumps({"error": error.as_dict()}))
        raise
    except errors.StopSignal as stop:  # the usual way to end --watch, and no failure
        return 128 + stop.number
    if watch and not as_json:
        _say(status.last_line(seen))
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


@ddp_manual.command("runs")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of text.")
@click.argument("folder", metavar="[DIR]", type=PATH, default=Path("runs"))
def list_runs(as_json: bool, folder: Path) -> None:
    """List the runs in DIR (default: runs): state, ranks, accuracy, when and why they ended; the last one last."""
    from ddp_manual.tools import runs

    found = runs.list_runs(folder)
    _say(json.dumps(found, indent=2) if as_json else runs.text(found) if found else f"no runs in {folder}")


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
    if plot is not None and plot.is_dir():
        raise errors.BadOption(
            f"--plot {plot} is a folder",
            why="--plot takes the file to write, and after that come the runs",
            next=f"ddp-manual compare --plot comparison.png {shlex.join(map(str, (plot, *folders)))}",
        )
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


@ddp_manual.command(
    cls=GroupedCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--nproc",
    "--nproc_per_node",
    "nproc",
    metavar="N",
    help="How many ranks to start on this machine; gpu: one for each GPU, cpu: one for each core, auto: gpu, or cpu "
    "without GPUs.",
)
@click.option("--num_processes", type=click.IntRange(min=1), hidden=True, help="On all machines together.")
@click.option(
    "--nnodes", "--num_machines", "nnodes", type=click.IntRange(min=1), help="How many machines (default: 1)."
)
@click.option(
    "--node_rank",
    "--machine_rank",
    "node_rank",
    type=click.IntRange(min=0),
    help="Which of them this is: 0 to nnodes - 1. Start the same command once on each (default: 0).",
)
@click.option(
    "--run_dir",
    metavar="DIR",
    help="Where logs and results go (default: runs/<start time>-<run_id>; of a script: nowhere).",
)
@click.option(
    "--max_restarts",
    type=click.IntRange(min=0),
    default=0,
    help="How often to start all ranks again, from the newest checkpoint, after a rank was killed or its training "
    "failed (default: 0).",
)
@click.option(
    "--start",
    type=click.Choice(["fork", "exec"]),
    default="fork",
    help="fork starts the ranks of a script from one process that has imported torch; exec each by itself "
    "(default: fork).",
)
@hosts_options("Start N ranks on each of these hosts, by way of ssh; rank 0 is on the first.")
@click.option("--ssh", "ssh_command", metavar="COMMAND", help='The ssh command, such as "ssh -F config".')
@click.option("--remote_dir", metavar="DIR", help="The folder to start in on each host (default: the same as here).")
@click.option("--remote_python", metavar="PATH", help="Python on each host (default: the same as here).")
@click.option("--export", multiple=True, metavar="NAME[=VALUE],...", help="Variables to pass on to the hosts.")
@click.option("--dry_run", is_flag=True, help="Print what would be run on each host, and run nothing.")
@click.option("--standalone", is_flag=True, help="Does nothing: torchrun needs it to start all ranks on one machine.")
@launched_program
@click.pass_context
def launch(
    context: click.Context,
    /,
    nproc: str | None,
    num_processes: int | None,
    nnodes: int | None,
    node_rank: int | None,
    run_dir: str | None,
    max_restarts: int,
    start: str,
    hosts: str | None,
    hostfile: str | None,
    ssh_command: str | None,
    remote_dir: str | None,
    remote_python: str | None,
    export: tuple[str, ...],
    dry_run: bool,
    standalone: bool,
    program: tuple[str, ...],
    as_module: bool,
    no_python: bool,
    may_differ: str | None,
    **flags: Any,
) -> int:
    """Start N ranks on this machine and end them together: of your own SCRIPT, unmodified, as torchrun would start it,
    or of our own training, each with the TRAIN_OPTIONS after --.

    The exit code is that of the rank that failed first; 128 + n after signal n, such as 130 after Ctrl-C.
    """
    from ddp_manual.agent import local

    by_ssh = hosts is not None or hostfile is not None
    typed_place = {"nproc": nproc, "nnodes": nnodes, "node_rank": node_rank, **given(WorldSpec, flags)}
    place = {name: value for name, value in typed_place.items() if value is not None}
    sources = dict.fromkeys(place, "flag")
    node = launchers.node_identity() if nnodes is None and not by_ssh else {}
    for name, (value, variable) in node.items():
        if name not in place:
            place[name], sources[name] = value, f"from {variable}"
    if node:
        terminal.say(", ".join(f"{name} {place[name]} ({sources[name]})" for name in node))
        if sources.get("master_addr") != "flag":
            launchers.check_rank_0_is_found()
    nnodes, node_rank = place.get("nnodes", 1), place.get("node_rank", 0)
    if "nproc" not in place and num_processes is not None and num_processes % nnodes == 0:  # as accelerate counts
        place["nproc"] = str(num_processes // nnodes)
    _, typed = launchers.typed_command()
    if program[:1] and program[0].startswith("-") and typed[: len(typed) - len(program)][-1:] != ["--"]:
        own, of_training = (
            [name for option in command.params for name in (*option.opts, *option.secondary_opts)]
            for command in (context.command, train)
        )
        check_before_script(program, own, of_training, has_script=as_module or no_python)
    _check_hosts_options(context.params)
    if not by_ssh and "nproc" not in place:
        if program and (late := program_of(program).argument("nproc", "nproc_per_node")):
            raise errors.BadOption(
                f"launch was given no --nproc before {program[0]}",
                why=f"{late} comes after {program[0]} and goes to it",
                next=f"put {late} before {program[0]}",
            )
        raise click.MissingParameter(ctx=context, param_hint="--nproc", param_type="option")
    options = given(WorldSpec, place)  # and none of a rank's variables, which another launcher may have left
    sources = {name: source for name, source in sources.items() if name in options}
    if program and not program[0].startswith("-"):
        task: Program | TrainConfig = program_of(program, as_module=as_module, no_python=no_python)
        of_task: Any = {"may_differ": names_in(may_differ), "start": start}
    else:
        check_has_no_script(context, as_module=as_module, no_python=no_python, may_differ=may_differ)
        if not program:
            terminal.say("no script was given: these ranks do the built-in training, by default on mnist")
        local.check_train_options(program)
        train_flags = {**train.make_context("train", list(program)).params, "run_dir": run_dir}
        task, of_task = TrainConfig.from_file(train_flags.pop("config_file"), **given(TrainConfig, train_flags)), {}
        typed_after = given(WorldSpec, train_flags)
        options, sources = {**options, **typed_after}, {**sources, **dict.fromkeys(typed_after, "flag")}
    spec = WorldSpec(**{"max_restarts": max_restarts, **options}, sources=sources)
    if by_ssh:
        from ddp_manual.agent import ssh

        launched = ssh.hosted_launch(
            host_list.choose_hosts(hosts, hostfile),
            ssh.Remote.of(ssh_command, remote_dir, remote_python),
            spec,
            task,
            after=program,
            variables=launchers.exported(export),
            run_dir=run_dir,
            max_restarts=max_restarts,
            **of_task,
        )
        if dry_run:
            _say(launched.dry_run())
            return 0
        return launched.run()
    on = local.Hosts(nproc=launchers.ranks_per_host(str(place["nproc"])), nnodes=nnodes, node_rank=node_rank)
    if isinstance(task, Program):
        return local.launch_program(task, on, spec, typed[1:], run_dir=run_dir, max_restarts=max_restarts, **of_task)
    return local.launch_ranks(on, spec, task, program, run_dir, max_restarts)


def _check_hosts_options(flags: dict[str, Any]) -> None:
    """Raise BadOption if options of ``launch`` for other hosts and for this machine are mixed."""
    by = next((name for name in ("hosts", "hostfile") if flags[name] is not None), None)
    if by is not None:
        for name in ("nproc", "nnodes", "node_rank", "num_processes"):
            if flags[name] is not None:
                raise errors.BadOption(
                    f"--{name} and --{by} exclude each other",
                    why="the list of hosts says how many ranks each has",
                    next=f"leave --{name} out, or start launch on each host without the list",
                )
    for name in () if by else ("ssh_command", "remote_dir", "remote_python", "export", "dry_run"):
        if flags[name]:
            option = name.removesuffix("_command")
            raise errors.BadOption(
                f"--{option} needs --hosts or --hostfile",
                why="it is for ranks that are started by way of ssh",
                next="name the hosts, such as --hosts a:2,b:2",
            )


@ddp_manual.command(hidden=True)
def hosted() -> int:
    """Start the ranks of this host for ``launch --hosts`` on another one, which ssh connects to this process."""
    from ddp_manual.agent import hosted

    return hosted.serve()


@ddp_manual.command("commands", cls=GroupedCommand, context_settings={"allow_interspersed_args": False})
@hosts_options("The hosts, each with its number of ranks; rank 0 is on the first.")
@click.option("--tmux", "in_tmux", is_flag=True, help="Open them as panes of a new tmux session, through ssh.")
@click.option("--run_dir", metavar="DIR", help="Where rank 0 writes; given to each rank.")
@json_option
@launched_program
@click.pass_context
def list_commands(
    context: click.Context,
    /,
    hosts: str | None,
    hostfile: str | None,
    in_tmux: bool,
    run_dir: str | None,
    as_json: bool,
    program: tuple[str, ...],
    as_module: bool,
    no_python: bool,
    may_differ: str | None,
    **flags: Any,
) -> None:
    """Print what to type in each terminal of each host, to start a run by hand: of your own SCRIPT, or of our own
    training with the TRAIN_OPTIONS after --. With --tmux, start it so.
    """
    from ddp_manual.tools import commands, tmux

    chosen, own, typed = None, {"run_dir": run_dir}, {}
    if program and not program[0].startswith("-"):
        chosen = program_of(program, as_module=as_module, no_python=no_python)
        own["may_differ"] = may_differ
    else:
        check_has_no_script(context, as_module=as_module, no_python=no_python, may_differ=may_differ)
        typed = train.make_context("train", list(program)).params
    commands.check_order(hosts is not None or hostfile is not None, chosen, typed)
    found = commands.list_commands(
        host_list.choose_hosts(hosts, hostfile), given(WorldSpec, flags), program=chosen, training=program, own=own
    )
    session = found.open_in_tmux(Path.cwd()) if in_tmux else None
    if as_json:
        _say(json.dumps({**found.as_dict(), "tmux": session}, indent=2))
    else:
        _say(tmux.how_to_go_on(session) if session else found.text())


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
        if command[-1] == "launch" and isinstance(error, click.UsageError) and error.ctx is not None:
            command[-1] = error.ctx.info_name or "launch"  # train, of the options after the --
        no_such = "the command has no such option" if isinstance(error, click.NoSuchOption) else None
        usage = error.ctx.get_usage() if isinstance(error, click.UsageError) and error.ctx is not None else None
        return errors.BadOption(
            error.format_message().rstrip("."),
            why=about or no_such or usage or "the command line cannot be read so",
            next=f"{shlex.join(command)} --help",
        )
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "torchvision", "psutil", "rich"):
        return errors.not_installed(error.name)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return terminal.stdout_failed(error)  # click's own text, of --help
    return errors.TrainingFailed(
        f"{type(error).__name__}: {error}".splitlines()[0],
        why=errors.traceback_of(error),
        next="fix the code or the data that raised it, then try again",
    )
