"""examples/cifar10_two_ranks.ipynb: how it is stored, and that interrupting its cell ends the ranks it has started."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.conftest import REPOSITORY, clean_environment, first_of_each_class
from tests.tutorials import jupyter_below

NOTEBOOK = REPOSITORY / "examples" / "cifar10_two_ranks.ipynb"


def test_the_notebook_is_stored_without_outputs_and_begins_with_its_settings() -> None:
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)
    for name in ("images", "epochs", "options", "run_dir"):
        assert f"\n{name} = " in code[0].source


def test_the_curves_are_drawn_of_a_run_that_was_interrupted_within_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    lines = [{"step": step, "epoch": step // 4, "loss": 1.0, "accuracy": 0.5} for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "accuracies.json").write_text("[0.25]")
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    names = {"run_dir": str(tmp_path)}
    exec(next(cell.source for cell in cells if "plt.subplots" in cell.source), names)
    test = names["accuracies"].lines[-1]  # type: ignore[attr-defined]
    assert test.get_xydata().tolist() == [[3, 25]]
    names["plt"].close("all")  # type: ignore[attr-defined]


def test_interrupting_the_cell_ends_the_ranks_with_a_checkpoint(tmp_path: Path, cifar10: Path) -> None:
    few = first_of_each_class(cifar10, tmp_path / "few", train=16, test=4)
    settings = {
        "images": str(few),
        "epochs": 100_000,
        "options": ["--model", "mlp", "--batch_size", "80", "--log_every", "1", "--checkpoint_every", "0"],
        "run_dir": str(tmp_path / "run"),
    }
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    numbers = {cell.id: number for number, cell in enumerate(notebook.cells)}
    notebook.cells[numbers["settings"]].source += "".join(f"\n{name} = {value!r}" for name, value in settings.items())
    client = NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, timeout=120)

    def said() -> str:
        return "".join(output.get("text", "") for output in notebook.cells[numbers["training"]].outputs)

    async def execute(name: str) -> None:
        await client.async_execute_cell(notebook.cells[numbers[name]], numbers[name])

    async def execute_and_interrupt() -> None:
        async with client.async_setup_kernel(env=clean_environment(**jupyter_below(tmp_path))):
            await execute("settings")
            training = asyncio.create_task(execute("training"))
            while "[rank 0] step 20/" not in said() and not training.done():
                await asyncio.sleep(0.05)
            assert not training.done(), said()
            interrupted = time.monotonic()
            await client.km.interrupt_kernel()
            with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                await training
            assert time.monotonic() - interrupted < 20
            assert ranks_of(settings["run_dir"]) == []

    try:
        asyncio.run(execute_and_interrupt())
    finally:
        for process in ranks_of(settings["run_dir"]):
            process.kill()
    assert said().count("\nstopped by Ctrl-C") == 2, said()
    for rank in range(2):
        failure = json.loads((tmp_path / "run" / f"failure-rank{rank}.json").read_text())
        assert failure["identifier"] == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.pt"))


def ranks_of(run_dir: str) -> list[psutil.Process]:
    """The ranks that still run, which have the run's folder among their arguments."""
    return [process for process in psutil.process_iter(["cmdline"]) if run_dir in (process.info["cmdline"] or [])]
