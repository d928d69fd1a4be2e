"""However ranks are started, what they learn is the same."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import psutil

from ddp_manual.training.options import MODELS
from tests.conftest import REPOSITORY, Start, gone

# A rank of the command line trains one network. To save its start, this has it train all of them, one after the other.
EVERY_MODEL = """
    import dataclasses, os, sys
    from pathlib import Path

    if any(os.path.basename(word) == "worker" for word in sys.orig_argv):
        from ddp_manual.training.options import MODELS
        from ddp_manual.training import program

        train = program.train_as_agreed

        def train_every_model(world, config, resume, **options):
            run_dir = world.run_dir
            for model in MODELS:
                world.run_dir = run_dir / model
                own = dataclasses.replace(config, model=model, run_dir=str(world.run_dir))
                summary = train(world, own, resume, **options)
            return summary

        program.train_as_agreed = train_every_model
"""

SPAWNING = """
    import sys
    import ddp_manual
    from ddp_manual import TrainConfig
    from ddp_manual.training.options import MODELS

    def train_every_model(world, dataset, run_dir):
        for model in MODELS:
            config = TrainConfig(model=model, run_dir=f"{run_dir}/{model}", dataset=dataset, epochs=2, batch_size=10)
            ddp_manual.train(world, config)

    if __name__ == "__main__":
        ddp_manual.spawn(train_every_model, 2, args=sys.argv[1:])
"""


def test_every_model_learns_the_same_parameters_bit_for_bit_below_launch_torchrun_and_spawn(
    start: Start, few_images: Path, tmp_path: Path
) -> None:
    """Six steps of two ranks. Bit for bit, since two gradients have but one sum; three or more could be added up in
    another order. Ranks that are started by hand are compared with those of launch in test_own_training.py."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(EVERY_MODEL))
    (tmp_path / "spawning.py").write_text(textwrap.dedent(SPAWNING))
    dataset = f"folder:{few_images}"
    options = ["--dataset", dataset, "--epochs", 2, "--batch_size", 10]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "run_multi_gpu_train.py"]
    commands: dict[str, list[object]] = {
        "launch": ["-m", "ddp_manual", "launch", "--nproc", 2, "--run_dir", tmp_path / "launch", "--", *options],
        "torchrun": [*torchrun, "--run_dir", tmp_path / "torchrun", *options],
        "spawn": [tmp_path / "spawning.py", dataset, tmp_path / "spawn"],
    }
    env = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    started = {way: start(sys.executable, *command, **env) for way, command in commands.items()}
    for way, process in started.items():
        assert process.wait() == 0, f"{way}: {process.err}"
    for model in MODELS:
        learned = {(tmp_path / way / model / "model.pt").read_bytes() for way in started}
        assert len(learned) == 1, model


def test_the_ranks_of_a_torchrun_that_is_killed_end_and_say_so(start: Start) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    process = start(*torchrun, "-m", "ddp_manual", "run", "--no_python", "sh", "-c", "echo began; sleep 60")
    process.wait_for("began")
    below = psutil.Process(process.process.pid).children(recursive=True)
    process.process.kill()
    assert gone(below, 15), process.err
    assert f"torchrun (pid {process.process.pid}), which started this rank, is gone" in process.err
