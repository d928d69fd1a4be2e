"""The commands that start many ranks, or say what to type for each."""

from __future__ import annotations

import json
from typing import Any

import click

from ddp_manual import errors, launchers, orphans, terminal, unread
from ddp_manual.cli.options import (
    GroupedCommand,
    check_has_no_script,
    given,
    hosts_options,
    json_option,
    launched_program,
    names_in,
    program_of,
)
from ddp_manual.cli.ranks import train
from ddp_manual.cli.stdout import print_result
from ddp_manual.launch import host_list
from ddp_manual.options import check_before_script
from ddp_manual.program import Program
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec


@click.command(cls=GroupedCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
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
    from ddp_manual.launch import this_host
    from ddp_manual.launch.job import Hosts, job_of

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
        this_host.check_train_options(program)
        train_flags = {**train.make_context("train", list(program)).params, "run_dir": run_dir}
        task, of_task = TrainConfig.from_file(train_flags.pop("config_file"), **given(TrainConfig, train_flags)), {}
        typed_after = given(WorldSpec, train_flags)
        options, sources = {**options, **typed_after}, {**sources, **dict.fromkeys(typed_after, "flag")}
    spec = WorldSpec(**options, sources=sources)
    variables = launchers.exported(export) if by_ssh else {}
    job = job_of(task, spec, after=program, run_dir=run_dir, variables=variables, **of_task)
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
    on = Hosts(nproc=launchers.ranks_per_host(str(place["nproc"])), nnodes=nnodes, node_rank=node_rank)
    orphans.adopt()
    with unread.never_block(unread.A_PERSON_READS_WITHIN):
        return this_host.launch_here(job, on)


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


@click.command("commands", cls=GroupedCommand, context_settings={"allow_interspersed_args": False})
@hosts_options("The hosts, each with its number of ranks; rank 0 is on the first.")
@click.option("--run_dir", metavar="DIR", help="Where rank 0 writes; given to each rank.")
@json_option
@launched_program
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
    print_result(json.dumps(found.as_dict(), indent=2) if as_json else found.text())
