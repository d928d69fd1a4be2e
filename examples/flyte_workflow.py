"""Training as tasks of a workflow engine: https://flyte.org. First, with Python 3.12 at most: pip install -e '.[flyte]'

On this machine, without an engine (leave out hyperparameters.json to take the default options):
    python examples/flyte_workflow.py hyperparameters.json
On a cluster:
    pyflyte run --remote examples/flyte_workflow.py training --config '{"epochs": 3, "lr": 0.05}'

GPUS=4 before either command starts four ranks and requests a GPU for each rank; RANKS=4 starts four ranks without GPUs.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from flytekit import Resources, current_context, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import CSVFile, FlyteFile, PNGImageFile

from ddp_manual import TrainConfig
from ddp_manual.run_folder import RunPaths

HYPERPARAMETERS = TrainConfig()
GPUS = int(os.environ.get("GPUS", 0))
RANKS = int(os.environ.get("RANKS", GPUS or 2))


class Trained(NamedTuple):
    accuracies: FlyteFile[TypeVar("json")]  # on the test set, after each epoch
    model: FlyteFile[TypeVar("pt")]
    predictions: CSVFile  # every test image: truth, guess, probability of each class; mistakes first
    figures: list[PNGImageFile]


@task(requests=Resources(cpu="1", mem="2Gi"))
def prepare_data(config: TrainConfig) -> FlyteDirectory:
    """Download or draw the data before the ranks start, on a machine without GPUs, so that no GPU waits for it."""
    from ddp_manual.training.datasets import source_of  # here: it imports torch, without which tasks can be registered

    source_of(config).prepare()
    return FlyteDirectory(config.data_dir)


@task(
    requests=Resources(cpu=str(RANKS), mem="4Gi", gpu=str(GPUS) if GPUS else None),
    environment={"RANKS": str(RANKS)},  # this file is imported again on the machine where the task runs
)
def train(config: TrainConfig, data: FlyteDirectory) -> Trained:
    """Train with RANKS processes; if a rank fails, the task fails too, after that rank has said why."""
    here = Path(current_context().working_directory)
    run, options = RunPaths(here / "run"), here / "hyperparameters.json"
    options.write_text(json.dumps(replace(config, data_dir=data.download()).values()))
    launch = ["launch", "--nproc", str(RANKS), "--run_dir", str(run.run_dir), "--", "--config", str(options)]
    subprocess.run([sys.executable, "-m", "ddp_manual", *launch], check=True)
    return Trained(
        accuracies=FlyteFile(str(run.accuracies)),
        model=FlyteFile(str(run.model)),
        predictions=CSVFile(str(run.predictions.table)),
        figures=[PNGImageFile(str(path)) for path in sorted(run.run_dir.glob("*.png"))],
    )


@workflow
def training(config: TrainConfig = HYPERPARAMETERS) -> Trained:
    return train(config=config, data=prepare_data(config=config))


if __name__ == "__main__":
    trained = training(config=TrainConfig.from_file(sys.argv[1] if sys.argv[1:] else None))
    for name, output in trained._asdict().items():
        for file in output if isinstance(output, list) else [output]:
            print(f"{name}: {file.path}")
