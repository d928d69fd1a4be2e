"""Seconds until two ranks have a process group: by hand, with ``launch``, and with torchrun and a plain script.

python benchmarks/startup.py
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.measuring import REPOSITORY, free_port, interleave, machine, ratio

READY = "process group ready"
PLAIN_SCRIPT = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
print("{READY}", flush=True)
dist.destroy_process_group()
"""


def until_ready(commands: list[list[str]], ranks: int = 2) -> float:
    """Seconds from starting these commands until they have said READY ``ranks`` times; then they are ended."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    reading, writing = os.pipe()
    started = time.perf_counter()
    processes = [
        subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=writing, stderr=writing, start_new_session=True)
        for command in commands
    ]
    os.close(writing)
    said = b""
    while said.count(READY.encode()) < ranks:
        piece = os.read(reading, 65536)
        if not piece:
            raise click.ClickException(f"{commands} ended without a process group:\n{said.decode()}")
        said += piece
    seconds = time.perf_counter() - started
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    while os.read(reading, 65536):
        pass
    os.close(reading)
    for process in processes:
        process.wait()
    return seconds


def by_hand(options: list[str]) -> float:
    port = str(free_port())
    identity = ["--world_size", "2", "--master_port", port]
    return until_ready(
        [[sys.executable, "run_multi_gpu_train.py", *identity, "--rank", rank, *options] for rank in ("0", "1")]
    )


@click.command()
@click.option("--repetitions", default=5, show_default=True)
def main(repetitions: int) -> None:
    click.echo(machine())
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain.py")
        plain.write_text(PLAIN_SCRIPT)
        run_number = iter(range(10_000))

        def options() -> list[str]:
            return ["--run_dir", f"{folder}/run{next(run_number)}"]

        training = ["--dataset", "synthetic", "--data_dir", f"{folder}/data"]
        launch = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", "2"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        results = interleave(
            {
                "by hand": lambda: by_hand([*options(), *training]),
                "launch": lambda: until_ready([[*launch, *options(), "--", *training]]),
                "torchrun": lambda: until_ready([[*torchrun, str(plain)]]),
            },
            repetitions,
        )
    click.echo("| | seconds to a process group of 2 | launch / this |\n|---|---|---|")
    for name, seconds in results.items():
        click.echo(f"| {name} | {statistics.median(seconds):.2f} | {ratio(results['launch'], seconds)} |")


if __name__ == "__main__":
    main()
