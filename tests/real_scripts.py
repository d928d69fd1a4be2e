"""Scripts that know nothing of this package, started in every way: those of tests/scripts, and accelerate's tests."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RankProcess, Start
from tests.hosts.hosts import Host

FOLDER = Path(__file__).with_name("scripts")
# ``./scripts/soak`` tries every script with every start and every fault.
ALL = "DDP_MANUAL_SOAK_SCRIPTS" in os.environ
# Without a GPU, accelerate takes a rank for the only one unless it is told to use the CPU: ``accelerate launch --cpu``.
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, what it is given, and where a fault can strike it."""

    words: tuple[str, ...]
    """What follows the options of torchrun, or of ours."""
    runs: tuple[tuple[str, ...], ...] = ((),)
    """Its arguments; of several, it is run with one after the other, in the same folder."""
    on_hosts: tuple[str, ...] = ()
    """Further arguments where each of two ranks is on a host of its own."""
    fault: str = "4"
    """The call in which a fault strikes, as tests/scripts/site-packages/sitecustomize.py takes it."""
    until_then: tuple[str, ...] = ()
    """Further arguments with which it gets there."""
    at: str = "loss.backward()"
    """The line of the script that is then at work; "" for any."""

    handles_sigterm: bool = False

    @property
    def file(self) -> str:
        """The end of the path of its file, as tracebacks name it."""
        return Path(self.words[-1].replace(".", "/") + ".py" if self.words[0] == "-m" else self.words[0]).name

    @property
    def line(self) -> str:
        """A pattern such as ``plain_ddp.py:25`` for the line at which a fault strikes."""
        if not self.at:
            return rf"{re.escape(self.file)}:\d+"
        lines = Path(self.words[0]).read_text().splitlines()
        numbers = [number for number, line in enumerate(lines, start=1) if self.at in line]
        assert len(numbers) == 1, f"{self.at} is on lines {numbers} of {self.file}"
        return rf"{re.escape(self.file)}:{numbers[0]}"


def _own(name: str, **how: object) -> Script:
    return Script(words=(str(FOLDER / name),), **how)  # type: ignore[arg-type]


def _of_accelerate(name: str, **how: object) -> Script:
    return Script(words=("-m", f"accelerate.test_utils.scripts.{name}"), at="", **how)  # type: ignore[arg-type]


SCRIPTS = {
    # Late enough for a heartbeat, which comes every 0.25 s, to tell the line it is on.
    "plain": _own("plain_ddp.py", fault="1000", until_then=("--steps", "2000")),
    "checkpoints": _own("with_checkpoints.py", runs=(("2",), ("4",))),
    "lightning": _own(
        "lightning_ddp.py",
        on_hosts=("--devices", "1", "--num_nodes", "2"),
        at="trainer.fit(",
        handles_sigterm=True,
    ),
    "trainer": _own("transformers_trainer.py", at="trainer.train()"),
    "sync": _of_accelerate("test_sync"),
    "ops": _own("accelerate_ops.py", fault="2:torch.distributed.all_reduce", at="test_ops.main()"),
    "script": _of_accelerate("test_script"),
    "fsdp2": _own("fsdp2.py"),
    "groups": _own("three_groups.py", fault="5:torch.distributed.all_reduce", at="group=data"),
    "pipeline": _own("pipeline.py", at="schedule.step(target="),
}


def of(names: Iterable[str] = SCRIPTS) -> pytest.MarkDecorator:
    """Run a test with these scripts."""
    return pytest.mark.parametrize("script", [pytest.param(SCRIPTS[name], id=name) for name in names])


def environment(fault: str = "") -> dict[str, str]:
    """Return the variables of ranks, of which one may have a fault."""
    if not fault:
        return ON_CPU
    return {**ON_CPU, "SCRIPT_FAULT": fault, "PYTHONPATH": f"{FOLDER / 'site-packages'}:{REPOSITORY}"}


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Starts two ranks of a script in a folder of its own, on this host or each on its own."""

    start: Start
    script: Script
    port: int
    folder: Path
    hosts: Sequence[Host] = ()

    def _start(self, *command: object, host: int = 0, fault: str = "") -> RankProcess:
        start = self.hosts[host].start if self.hosts else self.start
        return start(sys.executable, "-m", *command, cwd=self.folder, **environment(fault))

    def _words(self, arguments: Sequence[str]) -> list[str]:
        return [*self.script.words, *arguments, *(self.script.on_hosts if self.hosts else ())]

    @property
    def _meeting(self) -> list[object]:
        address = ["--master_addr", self.hosts[0].address] if self.hosts else []
        return [*address, "--master_port", self.port]

    def rank(self, rank: int, of: int, *options: object, fault: str = "", arguments: Sequence[str]) -> RankProcess:
        """Start one rank by hand."""
        words = ["--world_size", of, "--rank", rank, *self._meeting, *options, *self._words(arguments)]
        return self._start("ddp_manual", "run", *words, host=rank, fault=fault)

    def by_hand(self, *options: object, fault: str = "", arguments: Sequence[str]) -> list[RankProcess]:
        return [self.rank(rank, 2, *options, fault=fault, arguments=arguments) for rank in (1, 0)][::-1]

    def launch(self, *options: object, fault: str = "", arguments: Sequence[str], nproc: int = 2) -> list[RankProcess]:
        """Start all ranks with one command, or two ranks with one on each host."""
        words = [*self._meeting, *options, *self._words(arguments)]
        if not self.hosts:
            return [self._start("ddp_manual", "launch", "--nproc", nproc, *words, fault=fault)]
        counts = [["--nproc", 1, "--nnodes", 2, "--node_rank", node] for node in range(2)]
        return [
            self._start("ddp_manual", "launch", *count, *words, host=node, fault=fault)
            for node, count in enumerate(counts)
        ]

    def torchrun(self, *, arguments: Sequence[str]) -> list[str]:
        """Run two ranks of torchrun to a good end, and return what they have printed. Each writes to a file of its own:
        in one pipe their lines mix."""
        logs = self.folder / "-".join(["logs", *arguments])
        options = ["--standalone", "--nproc_per_node", 2, "--redirects", 1, "--log_dir", logs]
        run = self._start("torch.distributed.run", *options, *self._words(arguments))
        if run.wait() != 0 and "(SIGABRT)" in run.err:
            raise AbortedAtItsEnd(run.err)
        assert run.process.returncode == 0, run.err
        return cleaned(path.read_text() for path in logs.rglob("stdout.log"))


def struck(ranks: Sequence[RankProcess], timeout: float = 60) -> float:
    """Wait until the fault has struck; return when."""
    deadline = time.monotonic() + timeout
    while True:
        for rank in ranks:
            if found := re.search(r"fault: \w+ in \S+, at ([\d.]+)\n", rank.err):
                return float(found[1])
        running = any(rank.process.poll() is None for rank in ranks)
        assert time.monotonic() < deadline and running, "\n".join(rank.err for rank in ranks)
        time.sleep(0.02)


def printed(processes: Iterable[RankProcess]) -> list[str]:
    return cleaned(process.out for process in processes)


def cleaned(texts: Iterable[str]) -> list[str]:
    """Return the lines of what ranks have printed, sorted, without what says how long something took."""
    lines = [line for text in texts for line in text.splitlines()]
    lines = [re.sub(r"^\[rank \d\] ?", "", line) for line in lines]
    return sorted(line for line in lines if line and "_runtime'" not in line)


def completed(begin: Callable[..., list[RankProcess]], script: Script) -> list[str]:
    """Run a script with all its arguments, to a good end; return what it has printed."""
    lines = []
    for arguments in script.runs:
        processes = begin(arguments=arguments)
        codes = [process.wait() for process in processes]
        assert codes == [0] * len(processes), (codes, [one.err for one in processes])
        lines += printed(processes)
    return lines


class AbortedAtItsEnd(Exception):
    """A rank of torchrun had done its work, and was aborted by a thread of gloo while Python ended."""


def _printed_under_torchrun(starts: Starts) -> list[str]:
    """Run a script with all its arguments under torchrun, three times at most if ranks of it are aborted."""
    for attempt in range(3):
        own = starts.folder.with_name(f"torchrun-{attempt}")  # no other run may have left checkpoints there
        own.mkdir()
        run = replace(starts, folder=own, hosts=()).torchrun
        try:
            return [line for arguments in starts.script.runs for line in run(arguments=arguments)]
        except AbortedAtItsEnd as error:
            aborted = error
    raise aborted


def under_torchrun(starts: Starts, shared_folder: Path) -> list[str]:
    """Return what a script prints under torchrun on one host, which one test process finds out for all."""
    name = next(name for name, script in SCRIPTS.items() if script is starts.script)
    folder = shared_folder / "under_torchrun" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = folder / "printed.txt"
        if not found.exists():
            lines = _printed_under_torchrun(starts)
            assert lines, f"{name} prints nothing under torchrun"
            found.write_text("\n".join(lines), encoding="utf-8")
        return found.read_text(encoding="utf-8").split("\n")
