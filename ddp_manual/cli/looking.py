"""The commands that look: at a run, at what runs have left, and at data."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from ddp_manual import errors, terminal
from ddp_manual.cli.flags_from_options import PATH, GroupedCommand, given, json_option, options_of
from ddp_manual.cli.stdout import print_result, redrawing
from ddp_manual.rank_options import WorldSpec
from ddp_manual.training.options import TrainConfig

# Options for which ``evaluate`` takes the run's values.
OF_THE_RUN = ("model", "normalization", "dataset", "image_size", "classes", "data_dir")


@click.command(cls=GroupedCommand, short_help="Look at a run: who is here, missing, and does what.")
@click.option(
    "--watch", is_flag=True, help="Wait for rank 0, and look again every second until the run ends or Ctrl-C."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text; with --watch one a line.")
@click.option("--stacks", is_flag=True, help="Ask every rank for its Python stacks, to see where a run hangs.")
@click.option("--shrink", is_flag=True, help="Have the run go on without the ranks that are lost (--on_loss wait).")
@options_of(WorldSpec, only=("master_addr", "master_port", "token_file"))
def status(watch: bool, as_json: bool, stacks: bool, shrink: bool, **flags: Any) -> int:
    """Look at a run from any third terminal: who is here, who is missing, what each rank does. Joins nothing.

    Example: ddp-manual status --master_addr hostA --watch

    With --watch, the exit code is that of the failure that has ended the run.
    """
    import asyncio

    from ddp_manual.tools import status

    spec = WorldSpec.from_environment(**given(WorldSpec, flags), is_rank=False)
    try:
        redraws = watch and not as_json and sys.stdout.isatty()
        with redrawing() if redraws else nullcontext(print_result) as show:
            text = json.dumps if as_json else status.text
            looking = status.watch(spec, lambda seen: show(text(seen)), again=watch, stacks=stacks, shrink=shrink)
            seen = asyncio.run(looking)
    except errors.DdpManualError as error:
        if as_json:
            print_result(json.dumps({"error": error.as_dict()}))
        raise
    except errors.StopSignal as stop:  # the usual way to end --watch, and no failure
        return 128 + stop.number
    if watch and not as_json:
        print_result(status.last_line(seen))
    return 0


@click.command("checkpoints", cls=GroupedCommand, short_help="List the checkpoints of a run, and what is damaged.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of text.")
@click.argument("folder", metavar="DIR", type=PATH)
def list_checkpoints(as_json: bool, folder: Path) -> None:
    """List the checkpoints of the run in DIR, newest first, and whether each is what was written.

    Example: ddp-manual checkpoints runs/mine

    The exit code is 0, also if a checkpoint is damaged; 15 if there is no checkpoint.
    """
    from ddp_manual.tools import checkpoints

    found = checkpoints.list_checkpoints(folder)
    print_result(json.dumps(found, indent=2) if as_json else checkpoints.text(found))


@click.command("runs", cls=GroupedCommand, short_help="List runs: how, when and why each has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of text.")
@click.argument("folder", metavar="[DIR]", type=PATH, default=Path("runs"))
def list_runs(as_json: bool, folder: Path) -> None:
    """List the runs in DIR (default: runs): state, ranks, accuracy, when and why they ended; the last one last."""
    from ddp_manual.tools import runs

    found = runs.list_runs(folder)
    print_result(json.dumps(found, indent=2) if as_json else runs.text(found) if found else f"no runs in {folder}")


@click.command("compare", cls=GroupedCommand, short_help="Put runs side by side: speed, accuracy, options.")
@json_option
@click.argument("folders", metavar="RUN RUN ...", nargs=-1, type=PATH)
def compare_runs(as_json: bool, folders: tuple[Path, ...]) -> None:
    """Put runs side by side: speed, efficiency, loss, accuracy, and the options that differ.

    Example: ddp-manual compare runs/one-rank runs/two-ranks

    Each RUN is the folder of a run, which may still be going on or have been stopped; a start that failed is passed
    over.
    """
    from ddp_manual.tools import compare

    terminal.log_to_stderr(None)
    compared = compare.compare(folders)
    print_result(json.dumps(compared, indent=2) if as_json else compare.text(compared))


@click.command(cls=GroupedCommand, short_help="Test a trained model again, in one process.")
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
@options_of(TrainConfig, only=OF_THE_RUN, defaults=dict.fromkeys(OF_THE_RUN, "the run's"))
def evaluate(checkpoint: Path, out_dir: Path | None, as_json: bool, **flags: Any) -> None:
    """Test a trained model, in one process: accuracy, loss, accuracy by class, and its guess for each image.

    Example: ddp-manual evaluate --checkpoint runs/mine

    Model, data and normalisation are those of the config.json beside it; flags override them.
    """
    from ddp_manual.tools import evaluate

    terminal.log_to_stderr(None)
    report = evaluate.evaluate(checkpoint, out_dir, given(TrainConfig, flags))
    print_result(json.dumps(report, indent=2) if as_json else evaluate.text(report))


@click.command("show-data", cls=GroupedCommand, short_help="Draw some images of a data set, and count its classes.")
@click.option("--part", type=click.Choice(["train", "test"]), default="train", help="Which part (default: train).")
@click.option("--count", type=click.IntRange(1, 1000), default=40, help="How many images to draw (default: 40).")
@click.option("--out", metavar="FILE", type=PATH, help="The PNG file to write, or its folder (default: in --data_dir).")
@options_of(TrainConfig, only=("dataset", "image_size", "classes", "data_dir"))
def show_data(part: str, count: int, out: Path | None, **flags: Any) -> None:
    """Look at a data set before training on it: some labelled images as a PNG file, and how many each class has.

    Example: ddp-manual show-data --dataset mnist

    On a terminal with colours, a few are drawn there too.
    """
    from ddp_manual.tools import show_data

    terminal.log_to_stderr(None)
    typed = given(TrainConfig, flags)
    config = TrainConfig(**typed, sources=dict.fromkeys(typed, "flag"))
    print_result(show_data.text(show_data.show(config, part, count, out)))
