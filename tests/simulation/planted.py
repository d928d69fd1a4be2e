"""The simulator can fail: plant a fault in what decides, one after the other, and see that simulated runs find it.

    python -m tests.simulation.planted [--runs 3000] [NAME ...]

Each fault is a change of one place, made in a copy of the package; the runs use that copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click

from tests.simulation.__main__ import simulate
from tests.simulation.plan import draw

REPOSITORY = Path(__file__).resolve().parents[2]
SEED = 900_000


class Planted(NamedTuple):
    """A fault: ``new`` replaces ``old``, a text that the package has exactly once."""

    name: str
    old: str
    new: str


class Finding(NamedTuple):
    """What the simulator has said about a planted fault."""

    runs: int | None
    """How many runs it took to find the fault; None: the simulator missed it."""
    said: str

    @property
    def row(self) -> str:
        """The runs until it was found, the seed of the last one, and the invariant that it broke."""
        if self.runs is None:
            return f"MISSED          {self.said}"
        return f"{self.runs:6} {SEED + self.runs - 1:8} {self.said}"


FAULTS = (
    Planted("a silent rank is never silent", "default=0.0) <= self._run.silent_after:", "default=0.0) or True:"),
    Planted("a stopped worker counts for ever", "now - known.stopped_since > seconds", "False"),
    Planted(
        "a stall is never found",
        "    if not waiting:\n        return None\n",
        "    return None\n",
    ),
    Planted("who left counts as finished", "if known.finished]", "if known.finished or known.left]"),
    Planted("a rank that is done may be lost", "elif self._is_done(rank) and loss.kind is not AWAITED:", "elif False:"),
    Planted(
        "a closed connection is no loss",
        "            self._watch.end_because_of_gone(rank, how, reason)\n",
        "            pass\n",
    ),
    Planted(
        "words of a replaced worker count",
        "if isinstance(message, messages.OfWorker) and message.worker != peer.worker:",
        "if False:",
    ),
    Planted("the newest state is the oldest", "max(found, default=(None, 0))", "min(found, default=(None, 0))"),
    Planted("no state is said to be held", "if source is not None else None,", "if False else None,"),
    Planted("a generation never passes", "        self.generation += 1\n", ""),
    Planted("join_timeout never comes", "if waited > state.limit:", "if False:"),
    Planted(
        "a newcomer restarts the clock",
        "self.missing_since, self.loading_since = now - self.missing_for(now), None",
        "self.missing_since, self.loading_since = now, None",
    ),
    Planted("left out for ever", "            self._become(rank, Seat.EMPTY)\n", "            pass\n"),
    Planted("survivors are not awaited", "run.silent_after + SURVIVORS_WITHIN", "0.0"),
    Planted("a silent newcomer keeps its seat", "if not begun or self._roll_call.is_left_out(rank)]", "if not begun]"),
    Planted("a second holder of a rank", "if refusal is None and holder is not None:", "if False:"),
    Planted(
        "the worker is not replaced",
        "            self.worker = self._start_worker(self.held)\n        except",
        "            pass\n        except",
    ),
    Planted("rank 0's silence is no loss", "if now - self._heard > rank.run.silent_after and passed < 1:", "if False:"),
    Planted(
        "give up with what is held",
        "if not isinstance(self._rank.state, states.Placed) and self._rank.so_far is None:",
        "if not isinstance(self._rank.state, states.Placed):",
    ),
    Planted(
        "a rank that is done looks for rank 0",
        "if isinstance(rank.state, states.Closing):  # its work is done, and it needs nobody any more\n"
        "            rank.enter(states.Alone())\n"
        "        if not isinstance(rank.state, (states.Waiting, states.Working))",
        "if not isinstance(rank.state, (states.Waiting, states.Working, states.Closing))",
    ),
    Planted(
        "looking ends with the idle worker",
        "        if isinstance(rank.state, (states.Looking, states.Ended)):\n            return  # Looking: another",
        "        if isinstance(rank.state, states.Ended):\n            return  # Looking: another",
    ),
    Planted(
        "the first Ctrl-C ends the rank",
        "if now - first_at > ONCE_WITHIN:",
        "if True:",
    ),
    Planted(
        "the second Ctrl-C does nothing",
        "if now - first_at > ONCE_WITHIN:",
        "if False:",
    ),
    Planted(
        "what is held is thrown away",
        "elif not self._run.resumes:\n            self.refuse_all(never",
        "elif True:\n            self.refuse_all(never",
    ),
    Planted(
        "rank 0 leaves first",
        "            await coordinator.wait_for_goodbyes(",
        "            coordinator.wait_for_goodbyes(",
    ),
    Planted(
        "a verdict about a replaced worker is awaited",
        "if work is self.work:\n                call()",
        "if True:\n                call()",
    ),
    Planted(
        "an ended rank comes to life",
        "if not isinstance(self.state, states.Ended):\n            self.state",
        "if True:\n            self.state",
    ),
    Planted("the held memory stays open", "            self.held.close()\n", ""),
    Planted(
        "who is silent has a second time-out",
        "hear(rank, None, max(member.heard, self._recovery.resumed_at))",
        "hear(rank, None, now)",
    ),
    Planted(
        "the first Ctrl-C does nothing",
        "if self._handling is not Handling.DONE:\n                self._ask_all",
        "if is_early:\n                self._ask_all",
    ),
    Planted(
        "a dying newcomer restarts the clock", "missing_for=state.missing_for if no_further else 0.0", "missing_for=0.0"
    ),
    Planted(
        "a rank may be lost for ever",
        "too_often = rank in among and before >= MOST_WITHOUT_A_STEP",
        "too_often = False",
    ),
    Planted(
        "an old worker is heard",
        "if work is self.rank.work:\n                if isinstance(message",
        "if True:\n                if isinstance(message",
    ),
    Planted(
        "no token is needed",
        'raise Unsealed("it is not signed with a token")',
        "return read(raw.decode())",
    ),
    Planted(
        "a program waits on its way out for ever",
        "self._shell.leave_in_order(math.inf)  # rank 0's worker has torch's store, which others may need",
        "pass",
    ),
    Planted(
        "the state goes with rank 0",
        "if not stops_all and self.recovery.is_awaited(self.roll_call.rank_0):",
        "if False:",
    ),
    Planted(
        "the state goes with a slow rank",
        "            if self._policy.began and self._roll_call.all_here:\n",
        "            if False:\n",
    ),
    Planted(
        "lines after the error",
        "        self._ending.cancel_background()  # it might print something after the error\n",
        "",
    ),
    Planted("a newcomer costs a rank its seat", "bool(held_without) and not new.intersection(*involved)", "True"),
    Planted("any token will do", "if not hmac.compare_digest(", "if None is hmac.compare_digest("),
)


def found_by(planted: Planted, runs: int) -> Finding:
    """Run the simulator on a copy with this fault, until an invariant is broken that holds without it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("ddp_manual", "tests"):
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        plant(planted, copy)
        environment, begin = {**os.environ, "PYTHONPATH": folder}, SEED
        while True:
            of_runs = ["--runs", str(SEED + runs - begin), "--seed", str(begin), "--first"]
            command = [sys.executable, "-m", "tests.simulation", *of_runs]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
            found = re.search(r"^seed (\d+): (.*)$", done.stdout, re.MULTILINE)
            if found is None:
                said = (done.stdout if done.returncode == 0 else done.stderr).splitlines()
                return Finding(None, said[-1] if said else "nothing was said")
            seed = int(found[1])
            if not simulate(draw(seed)).broken:
                return Finding(seed - SEED + 1, found[2])
            print(f"seed {seed} breaks without a planted fault too: {found[2]}", file=sys.stderr)
            begin = seed + 1


def plant(planted: Planted, copy: Path) -> None:
    """Put a fault into a copy of the package."""
    file = place_of(planted, copy)
    file.write_text(file.read_text(encoding="utf-8").replace(planted.old, planted.new), encoding="utf-8")


def place_of(planted: Planted, repository: Path) -> Path:
    """Return the file with the text that a fault replaces; the package must have that text exactly once."""
    files = [*(repository / "ddp_manual").glob("*/*.py")]
    there = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(planted.old))]
    assert len(there) == 1, f"{planted.name}: its place is {len(there)} times there"
    return there[0]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--runs", default=3000, help="Runs in which a fault must be found.")
@click.argument("names", nargs=-1)
def main(runs: int, names: tuple[str, ...]) -> None:
    chosen = [planted for planted in FAULTS if not names or any(name in planted.name for name in names)]
    width = max(len(planted.name) for planted in FAULTS)
    print(f"{'planted':{width}}   runs     seed what it broke")
    missed = 0
    for planted in chosen:
        finding = found_by(planted, runs)
        missed += finding.runs is None
        print(f"{planted.name:{width}} {finding.row}", flush=True)
    print(f"{len(chosen)} planted, {len(chosen) - missed} found within {runs} runs, {missed} missed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
