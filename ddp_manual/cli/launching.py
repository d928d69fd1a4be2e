"""The commands that start many ranks, or say what to type for each."""

from __future__ import annotations

import json
from typing import Any

import click

from ddp_manual import errors, orphans, terminal, unread
from ddp_manual.cli.options import (
    GroupedCommand,
    check_after_dashes,
    check_before_script,
    given,
    hosts_options,
    json_option,
    launched_program,
    names_in,
    own_program,
    refuse_options_of_torchrun,
)
from ddp_manual.cli.ranks import train
from ddp_manual.cli.stdout import print_result
from ddp_manual.environment import launcher, machine, settings
from ddp_manual.launch import host_list
from ddp_manual.program import Program
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec


@click.command(
    cls=GroupedCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Start all ranks of this machine, or of many, at once.",
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
    "--nnodes",
    "--num_machines",
    "nnodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many machines (default: 1).",
)
@click.option(
    "--node_rank",
    "--machine_rank",
    "node_rank",
    type=click.IntRange(min=0),
    metavar="K",
    help="Which of them this is: 0 to nnodes - 1. Start the same command once on each (default: 0).",
)
@click.option(
    "--run_dir",
    metavar="DIR",
    help="Where logs and results go (default: runs/<start time>-<run_id>; of a script: nowhere).",
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
@refuse_options_of_torchrun
@launched_program(defaults={"max_restarts": 0, "master_port": f"a free one; with --nnodes {WorldSpec.master_port}"})
@click.pass_context
def launch(
    context: click.Context,
    /,
    nproc: str | None,
    num_processes: int | None,
    nnodes: int | None,
    node_rank: int | None,
    run_dir: str | None,
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

    Example: ddp-manual launch --nproc 4 train.py --epochs 3

    The exit code is that of the rank that failed first; 128 + n after signal n, such as 130 after Ctrl-C.
    """
    from ddp_manual.launch import this_host
    from ddp_manual.launch.job import Hosts, job_of

    by_ssh = hosts is not None or hostfile is not None
    place, sources = _place(context, by_ssh=by_ssh, num_processes=num_processes)
    _check_hosts_options(context.params)
    script = own_program(context)
    if not by_ssh and "nproc" not in place:
        check_before_script("launch", script, "nproc", "nproc_per_node")
        raise click.MissingParameter(ctx=context, param_hint="--nproc", param_type="option")
    options = given(WorldSpec, place)  # and none of a rank's variables, which another launcher may have left
    sources = {name: source for name, source in sources.items() if name in options}
    task: Program | TrainConfig
    if script is not None:
        task = script
    else:
        task, typed_after = _training(context, run_dir)
        options, sources = {**options, **typed_after}, {**sources, **dict.fromkeys(typed_after, "flag")}
    spec = WorldSpec(**options, sources=sources)
    variables = settings.exported(export) if by_ssh else {}
    own: Any = {"variables": variables, "may_differ": names_in(may_differ), "start": start}
    job = job_of(task, spec, after=program, run_dir=run_dir, **own)
    if by_ssh:
        from ddp_manual.launch.ssh import HostedLaunch
        from ddp_manual.launch.ssh_session import Remote

        remote = Remote.of(ssh_command, remote_dir, remote_python)
        launched = HostedLaunch(job, host_list.choose_hosts(hosts, hostfile), remote, variables)
        if dry_run:
            print_result(launched.dry_run())
            return 0
        with unread.never_block(unread.A_PERSON_READS_WITHIN):
            return launched.run()
    ranks = machine.ranks_per_host(str(place["nproc"]))
    on = Hosts(nproc=ranks, nnodes=place.get("nnodes", 1), node_rank=place.get("node_rank", 0))
    orphans.adopt()
    with unread.never_block(unread.A_PERSON_READS_WITHIN):
        return this_host.launch_here(job, on)


def _place(context: click.Context, *, by_ssh: bool, num_processes: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return nproc, nnodes, node_rank and the options of each rank, from flags or from the variables of a launcher that
    has started this process for a whole node; and where each comes from."""
    typed = {name: context.params[name] for name in ("nproc", "nnodes", "node_rank")}
    typed |= given(WorldSpec, context.params)
    place = {name: value for name, value in typed.items() if value is not None}
    sources = dict.fromkeys(place, "flag")
    node = launcher.of_node(settings.variables()) if typed["nnodes"] is None and not by_ssh else {}
    for name, (value, variable) in node.items():
        if name not in place:
            place[name], sources[name] = value, f"from {variable}"
    if node:
        terminal.say(", ".join(f"{name} {place[name]} ({sources[name]})" for name in node))
        if sources.get("master_addr") != "flag":
            launcher.check_rank_0_is_found(settings.variables())
    nnodes = place.get("nnodes", 1)
    if "nproc" not in place and num_processes is not None and num_processes % nnodes == 0:  # as accelerate counts
        place["nproc"] = str(num_processes // nnodes)
    return place, sources


def _training(context: click.Context, run_dir: str | None) -> tuple[TrainConfig, dict[str, Any]]:
    """Return our own training, and the options of each rank, as they were typed after the ``--``."""
    if not context.params["program"]:
        terminal.say("no script was given: these ranks do the built-in training, by default on mnist")
    typed = _options_of_training(context, ("world_size", "rank", "local_rank", "run_id"))
    typed["run_dir"] = run_dir
    return TrainConfig.from_file(typed.pop("config_file"), **given(TrainConfig, typed)), given(WorldSpec, typed)


def _options_of_training(context: click.Context, of_each_rank: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of ``train`` that were typed after the ``--`` of another command; None for others.

    Args:
        of_each_rank: see ``check_after_dashes``.
    """
    words, normalize = list(context.params["program"]), context.token_normalize_func
    typed = train.make_context("train", words, token_normalize_func=normalize).params
    check_after_dashes(str(context.info_name), typed, of_each_rank)
    return typed


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


@click.command(hidden=True)
def hosted() -> int:
    """Start the ranks of this host for ``launch --hosts`` on another one, which ssh connects to this process."""
    from ddp_manual.launch import hosted

    return hosted.serve()


@click.command(
    "commands",
    cls=GroupedCommand,
    context_settings={"allow_interspersed_args": False},
    short_help="Print what to type in each terminal of each host.",
)
@hosts_options("The hosts, each with its number of ranks; rank 0 is on the first.")
@click.option("--run_dir", metavar="DIR", help="Where rank 0 writes; given to each rank.")
@json_option
@launched_program()
@click.pass_context
def list_commands(
    context: click.Context,
    /,
    hosts: str | None,
    hostfile: str | None,
    run_dir: str | None,
    as_json: bool,
    program: tuple[str, ...],
    as_module: bool,
    no_python: bool,
    may_differ: str | None,
    **flags: Any,
) -> None:
    """Print what to type in each terminal of each host, to start a run by hand: of your own SCRIPT, or of our own
    training with the TRAIN_OPTIONS after --.
    """
    from ddp_manual.launch import commands

    script = own_program(context)
    if hosts is None and hostfile is None:
        check_before_script("commands", script, "hosts", "hostfile")
    if script is None:
        _options_of_training(context, ("world_size", "rank", "local_rank"))
    found = commands.list_commands(
        host_list.choose_hosts(hosts, hostfile),
        given(WorldSpec, flags),
        program=script,
        training=program,
        own={"run_dir": run_dir, "may_differ": may_differ},
    )
    print_result(json.dumps(found.as_dict(), indent=2) if as_json else found.text())
