"""The commands that are one rank: of our training, of a script, or of a check."""

from __future__ import annotations

import json
from typing import Any

import click

from ddp_manual import errors, orphans, terminal, unread
from ddp_manual.cli.flags_from_options import (
    PROGRAM_OPTIONS,
    GroupedCommand,
    ProgramCommand,
    given,
    json_option,
    names_in,
    not_empty,
    options_of,
    program_of,
    program_options,
)
from ddp_manual.cli.stdout import print_result
from ddp_manual.rank_options import STALL_TIMEOUT, STALL_TIMEOUT_OF_SCRIPT, WorldSpec
from ddp_manual.text_wrapping import wrapped
from ddp_manual.training.options import TrainConfig

FOUND_A_PROBLEM = 3
# What the help calls the default of an option, where that differs from the field's.
OF_OURS = {"stall_timeout": round(STALL_TIMEOUT)}
OF_CHECK = {**OF_OURS, "join_timeout": 30}
OF_SCRIPTS = {"stall_timeout": round(STALL_TIMEOUT_OF_SCRIPT)}


@click.command(cls=GroupedCommand, short_help="Run ONE rank of the built-in training.")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="A JSON file with training options, such as a run's config.json, or a run's folder; flags override it.",
)
@options_of(TrainConfig)
@options_of(WorldSpec, defaults=OF_OURS)
def train(config_file: str | None, **flags: Any) -> int:
    """Run ONE rank: wait for the others, then train together with them.

    Example: ddp-manual train --world_size 2 --rank 0

    A value comes from its flag; otherwise from the variable torchrun would set (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT) or from the file that --config names; otherwise it is the default.
    """
    spec = WorldSpec.from_environment(**given(WorldSpec, flags))
    config = TrainConfig.from_file(config_file, **given(TrainConfig, flags))

    from ddp_manual.agent import by_hand

    orphans.adopt()
    with unread.never_block(unread.A_PERSON_READS_WITHIN):
        ended = by_hand.train_by_hand(spec, config)
    if ended.error is None and spec.rank == 0:
        try:
            print_result(wrapped(terminal.result_text(ended.result), terminal.stdout_width()))
        except errors.DdpManualError as error:  # the run is complete, whether its result can be printed or not
            where = ended.result["run_dir"]
            terminal.LOGGER.warning("%s (%s): the result is in %s", error.what, error.why, where)
        except click.exceptions.Exit:
            pass
    return ended.exit_code


@click.command("run", cls=ProgramCommand, short_help="Run ONE rank of your own script, unmodified.")
@program_options
@click.option(
    "--run_dir",
    metavar="DIR",
    callback=not_empty,
    help="Where a rank that fails leaves why, as failure-rank<k>.json (default: nowhere).",
)
@options_of(WorldSpec, only=PROGRAM_OPTIONS, defaults=OF_SCRIPTS)
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run_program(
    script: tuple[str, ...], as_module: bool, no_python: bool, may_differ: str | None, run_dir: str | None, **flags: Any
) -> int:
    """Run ONE rank of your own SCRIPT, unmodified: wait for the others, then start it as torchrun would.

    Example: ddp-manual run --world_size 2 --rank 0 train.py --epochs 3

    A value comes from its flag; otherwise from the variable torchrun would set (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT); otherwise it is the default. The exit code is the script's own, or that of the error
    that has ended the run.
    """
    spec = WorldSpec.from_environment(**given(WorldSpec, flags))
    chosen = program_of(script, as_module=as_module, no_python=no_python)

    from ddp_manual.agent import by_hand

    orphans.adopt()
    with unread.never_block(unread.A_PERSON_READS_WITHIN):
        return by_hand.run_by_hand(spec, chosen, run_dir, names_in(may_differ)).exit_code


@click.command(cls=GroupedCommand, short_help="Meet the other ranks, probe and measure; do not train.")
@json_option
@click.option("--verbose", is_flag=True, help="Show also the options that have their defaults.")
@options_of(WorldSpec, defaults=OF_CHECK)
def check(as_json: bool, verbose: bool, **flags: Any) -> int:
    """Meet the other ranks, probe and measure, do not train: start it like train, one process per rank.

    Example: ddp-manual check --world_size 2 --rank 0

    Rank 0 prints the whole table, each other rank its
    own line. The exit code is 0, or 3 with the findings last.
    """
    from ddp_manual.tools import check

    with unread.never_block(unread.A_PERSON_READS_WITHIN):
        report = check.check(WorldSpec.from_environment(**given(WorldSpec, flags)))
    text = json.dumps(report) if as_json else check.text(report, verbose=verbose)
    print_result(text)
    return FOUND_A_PROBLEM if report["findings"] else 0
