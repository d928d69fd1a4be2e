"""Training as tasks of a workflow engine: https://flyte.org; pip install -e '.[flyte]' brings flytekit.

python examples/flyte_workflow.py hyperparameters.json                                          here, without an engine
pyflyte run --remote examples/flyte_workflow.py training --config '{"epochs": 3, "lr": 0.05}'   on a cluster

GPUS=4 before either starts four ranks and asks the engine for a GPU for each; RANKS=4, for none.
"""

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
    accuracies: FlyteFile[TypeVar("json")]  # of the test set, after each epoch
    model: FlyteFile[TypeVar("pt")]
    predictions: CSVFile  # every test image: truth, guess, probability of each class; mistakes first
    figures: list[PNGImageFile]


@task(requests=Resources(cpu="1", mem="2Gi"))
def prepare_data(config: TrainConfig) -> FlyteDirectory:
    """Once, before there are any ranks, and not on a machine whose GPUs would wait for it."""
    from ddp_manual.training.sources import prepared  # and torch, which nobody needs who only registers the tasks

    prepared(config)
    return FlyteDirectory(config.data_dir)


@task(
    requests=Resources(cpu=str(RANKS), mem="4Gi", gpu=str(GPUS) if GPUS else None),
    environment={"RANKS": str(RANKS)},  # where the task runs, this file is imported anew
)
def train(config: TrainConfig, data: FlyteDirectory) -> Trained:
    """RANKS processes; if one fails so does the task, after that rank has said why."""
    here = Path(current_context().working_directory)
    run, options = RunPaths(here / "run"), here / "hyperparameters.json"
    options.write_text(replace(config, data_dir=data.download()).to_json())
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
