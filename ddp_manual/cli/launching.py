"""The commands that start many ranks, or say what to type for each."""

from __future__ import annotations

import json
from typing import Any

import click

from ddp_manual import errors, orphans, terminal, unread
from ddp_manual.cli.flags_from_options import (
    ProgramCommand,
    check_before_script,
    given,
    hosts_options,
    json_option,
    launched_program,
    names_in,
    not_empty,
    own_program,
)
from ddp_manual.cli.ranks import train
from ddp_manual.cli.stdout import print_result
from ddp_manual.environment import launcher_variables, machine, user_variables
from ddp_manual.launch import host_list
from ddp_manual.program import EXECUTABLE
from ddp_manual.rank_options import WorldSpec
from ddp_manual.run_folder import default_run_dir, new_run_id
from ddp_manual.training.options import TrainConfig


@click.command(cls=ProgramCommand, short_help="Start all ranks of this machine, or of many, at once.")
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
    type=click.IntRange(1, 1 << 16),
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
    callback=not_empty,
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
@launched_program(defaults={"max_restarts": 0, "master_port": f"a free one; with --nnodes {WorldSpec.master_port}"})
@click.pass_context
def launch(context: click.Context, /, **typed: Any) -> int:
    """Start N ranks on this machine and end them together: of your own SCRIPT, unmodified, as torchrun would start it,
    or of our own training, each with the TRAIN_OPTIONS after --.

    Example: ddp-manual launch --nproc 4 train.py --epochs 3

    The exit code is that of the rank that failed first; 128 + n after signal n, such as 130 after Ctrl-C.
    """
    from ddp_manual.launch import this_host
    from ddp_manual.launch.job import Hosts, Job, command_to_go_on

    by_ssh = typed["hosts"] is not None or typed["hostfile"] is not None
    place, sources = _place(typed, by_ssh=by_ssh)
    _check_hosts_options(typed)
    script = own_program(context)
    if not by_ssh and "nproc" not in place:
        check_before_script("launch", script, "nproc", "nproc_per_node")
        raise click.MissingParameter(ctx=context, param_hint="--nproc", param_type="option")
    options = given(WorldSpec, place)  # not from a rank's variables: another launcher may have left them
    config, run_id, run_dir = None, new_run_id(), typed["run_dir"]
    if script is None:
        config, typed_after = _training(context)
        run_dir = run_dir or default_run_dir(run_id)  # here, so that all hosts have the same time in its name
        options, sources = {**options, **typed_after}, {**sources, **dict.fromkeys(typed_after, "flag")}
    spec = WorldSpec(**options, sources={name: sources[name] for name in options})
    variables = user_variables.exported(typed["export"]) if by_ssh else {}
    job = Job(
        spec=spec,
        run_id=run_id,
        run_dir=run_dir,
        go_on=command_to_go_on(typed["program"], run_dir=run_dir if config else None, variables=variables),
        program=script,
        config=config,
        may_differ=names_in(typed["may_differ"]),
        forks=script is None or (typed["start"] == "fork" and script.kind != EXECUTABLE),
        chose_folder=typed["run_dir"] is not None,
    )
    if by_ssh:
        from ddp_manual.launch.several_hosts import HostedLaunch
        from ddp_manual.launch.ssh_session import Remote

        remote = Remote.of(typed["ssh_command"], typed["remote_dir"], typed["remote_python"])
        hosts = host_list.choose_hosts(typed["hosts"], typed["hostfile"])
        launched = HostedLaunch(job, hosts, remote, variables)
        if typed["dry_run"]:
            print_result(launched.dry_run())
            return 0
        with unread.never_block(unread.A_PERSON_READS_WITHIN):
            return launched.run()
    ranks = machine.ranks_per_host(str(place["nproc"]))
    on = Hosts([ranks] * place.get("nnodes", 1), place.get("node_rank", 0))
    orphans.adopt()
    with unread.never_block(unread.A_PERSON_READS_WITHIN):
        return this_host.launch_here(job, on)


def _place(flags: dict[str, Any], *, by_ssh: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return nproc, nnodes, node_rank and the options of each rank, from flags or from the variables of a launcher that
    has started this process for a whole node; and where each comes from."""
    typed = {name: flags[name] for name in ("nproc", "nnodes", "node_rank") if flags[name] is not None}
    typed |= given(WorldSpec, flags)
    node = launcher_variables.of_node(user_variables.variables()) if "nnodes" not in typed and not by_ssh else {}
    place, sources = launcher_variables.with_flags(node, typed)
    all_ranks, nnodes = flags["num_processes"], place.get("nnodes", 1)
    if all_ranks is not None:  # as accelerate counts
        if "nproc" in typed or all_ranks % nnodes:
            also = "--nproc says it too" if "nproc" in typed else f"there are {nnodes} machines with as many ranks each"
            raise errors.BadOption(
                f"--num_processes {all_ranks} cannot say how many ranks each machine has",
                why=f"it is the number of all ranks, and {also}",
                next="give --nproc alone: the number of ranks on this machine",
            )
        place["nproc"], sources["nproc"] = str(all_ranks // nnodes), "flag"
    if node:
        terminal.say(", ".join(f"{name} {place[name]} ({sources[name]})" for name in node))
        if "master_addr" not in typed:
            launcher_variables.check_rank_0_is_found(user_variables.variables())
    return place, sources


def _training(context: click.Context) -> tuple[TrainConfig, dict[str, Any]]:
    """Return our own training, and the options of each rank, as they were typed after the ``--``."""
    if not context.params["program"]:
        terminal.say("no script was given: these ranks do the built-in training, by default on mnist")
    typed = _options_of_training(context, ("world_size", "rank", "local_rank", "run_id"))
    typed["run_dir"] = context.params["run_dir"]
    return TrainConfig.from_file(typed.pop("config_file"), **given(TrainConfig, typed)), given(WorldSpec, typed)


def _options_of_training(context: click.Context, of_each_rank: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of ``train`` that were typed after the ``--`` of another command; None for others.

    Args:
        of_each_rank: those that the command gives each rank itself.

    Raises:
        BadOption: an option comes too late, or the command would override it.
    """
    words, normalize = list(context.params["program"]), context.token_normalize_func
    typed = train.make_context("train", words, token_normalize_func=normalize).params
    for name in (*of_each_rank, "master_addr", "master_port", "listen_addr", "run_dir"):
        if typed[name] is not None:
            is_decided = name in of_each_rank
            why = f"gives each rank its own --{name}" if is_decided else "reads it before the --"
            raise errors.BadOption(
                f"--{name} cannot come after the --",
                why=f"{context.info_name} {why}",
                next=f"leave --{name} out" if is_decided else f"put --{name} before the --",
            )
    return typed


def _check_hosts_options(flags: dict[str, Any]) -> None:
    """Raise BadOption if options of ``launch`` for other hosts and for this machine are mixed."""
    by = next((name for name in ("hosts", "hostfile") if flags[name] is not None), None)
    for name in ("nproc", "nnodes", "node_rank", "num_processes") if by else ():
        if flags[name] is not None:
            raise errors.BadOption(
                f"--{name} and --{by} exclude each other",
                why="the list of hosts says how many ranks each has",
                next=f"leave --{name} out, or start launch on each host without the list",
            )
    for name in () if by else ("ssh_command", "remote_dir", "remote_python", "export", "dry_run"):
        if flags[name]:
            raise errors.BadOption(
                f"--{name.removesuffix('_command')} needs --hosts or --hostfile",
                why="it is for ranks that are started by way of ssh",
                next="name the hosts, such as --hosts a:2,b:2",
            )


@click.command(hidden=True)
def hosted() -> int:
    """Start the ranks of this host for ``launch --hosts`` on another one, which ssh connects to this process."""
    from ddp_manual.launch.on_each_host import serve

    return serve()


@click.command("commands", cls=ProgramCommand, short_help="Print what to type in each terminal of each host.")
@hosts_options("The hosts, each with its number of ranks; rank 0 is on the first.")
@click.option("--run_dir", metavar="DIR", callback=not_empty, help="Where rank 0 writes; given to each rank.")
@json_option
@launched_program()
@click.pass_context
def list_commands(context: click.Context, /, **typed: Any) -> None:
    """Print what to type in each terminal of each host, to start a run by hand: of your own SCRIPT, or of our own
    training with the TRAIN_OPTIONS after --.
    """
    from ddp_manual.launch import commands

    script = own_program(context)
    if typed["hosts"] is None and typed["hostfile"] is None:
        check_before_script("commands", script, "hosts", "hostfile")
    if script is None:
        _options_of_training(context, ("world_size", "rank", "local_rank"))
    found = commands.list_commands(
        host_list.choose_hosts(typed["hosts"], typed["hostfile"]),
        given(WorldSpec, typed),
        program=script,
        training=typed["program"],
        own={"run_dir": typed["run_dir"], "may_differ": typed["may_differ"]},
    )
    print_result(json.dumps(found, indent=2) if typed["as_json"] else commands.text(found, script))
