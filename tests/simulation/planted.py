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

REPOSITORY = Path(__file__).resolve().parents[2]
SEED = 900_000


class Planted(NamedTuple):
    """A fault: in this file of agent/ the old text, which is there once, is replaced."""

    name: str
    file: str
    old: str
    new: str


FAULTS = (
    Planted(
        "a silent rank is never silent", "health.py", "if max(seconds.values(), default=0.0) <= silent", "if silent"
    ),
    Planted("a stopped worker counts for ever", "health.py", "now - known.stopped_since > seconds", "False"),
    Planted(
        "a stall is never found",
        "health.py",
        "        if not waiting:\n            return None\n",
        "        return None\n",
    ),
    Planted("who left counts as finished", "health.py", "if known.finished]", "if known.finished or known.left]"),
    Planted("a goodbye is not noted", "coordinator.py", "        peer.left = True\n        if", "        if"),
    Planted(
        "a closed connection is no loss",
        "coordinator.py",
        "                self._watch.end_because_of_gone(rank, reason)\n",
        "                pass\n",
    ),
    Planted(
        "words of a replaced worker count",
        "coordinator.py",
        "if isinstance(message, messages.OfWorker) and message.worker != peer.worker:",
        "if False:",
    ),
    Planted(
        "the newest state is the oldest", "seats.py", "max(found, default=(None, 0))", "min(found, default=(None, 0))"
    ),
    Planted("no state is said to be held", "coordinator.py", "if source is not None else None,", "if False else None,"),
    Planted("a generation never passes", "seats.py", "        self.generation += 1\n", ""),
    Planted("join_timeout never comes", "coordinator.py", "if waited > self._wait_within and", "if False and"),
    Planted("a newcomer restarts the clock", "coordinator.py", "else now - self._missing_for", "else now"),
    Planted(
        "left out for ever",
        "coordinator.py",
        "            self.roll_call.left_out -= self._left_out_to_stop\n",
        "",
    ),
    Planted("survivors are not awaited", "coordinator.py", "silent_after(self.run) + SURVIVORS_WITHIN", "0.0"),
    Planted(
        "a silent newcomer keeps its seat", "coordinator.py", "if not begun or rank in newcomers]", "if not begun]"
    ),
    Planted("a second holder of a rank", "roll_call.py", "if refusal is None and holder is not None:", "if False:"),
    Planted(
        "the worker is not replaced",
        "main.py",
        "            self.worker = self._start_worker(self.held)\n        except",
        "            pass\n        except",
    ),
    Planted(
        "rank 0's silence is no loss",
        "main.py",
        "if now - self._heard > silent_after(self._run) and passed < 1:",
        "if False:",
    ),
    Planted(
        "give up with what is held",
        "main.py",
        "if not isinstance(self.state, states.Placed) and self._so_far is None:",
        "if not isinstance(self.state, states.Placed):",
    ),
    Planted(
        "lines after the last error",
        "main.py",
        "case _ if isinstance(self.state, states.Ended):",
        "case _ if False:",
    ),
    Planted(
        "a rank that is done looks for rank 0",
        "main.py",
        "if isinstance(self.state, states.Closing):  # its work is done, and it needs nobody any more\n"
        "            self._enter(states.Alone())\n"
        "        if not isinstance(self.state, (states.Waiting, states.Working))",
        "if not isinstance(self.state, (states.Waiting, states.Working, states.Closing))",
    ),
    Planted(
        "looking ends with the idle worker",
        "main.py",
        "        if isinstance(self.state, (states.Looking, states.Ended)):\n            return  # another",
        "        if isinstance(self.state, states.Ended):\n            return  # another",
    ),
    Planted(
        "the first Ctrl-C ends the rank",
        "ending.py",
        "elif now - self._first.get(seen_by, now) > ONCE_WITHIN:",
        "elif True:",
    ),
    Planted(
        "the second Ctrl-C does nothing",
        "ending.py",
        "elif now - self._first.get(seen_by, now) > ONCE_WITHIN:",
        "elif False:",
    ),
    Planted(
        "what is held is thrown away", "coordinator.py", "elif self._expired or self.run.script or", "elif True or"
    ),
    Planted(
        "rank 0 leaves first",
        "main.py",
        "            await coordinator.wait_for_goodbyes(",
        "            coordinator.wait_for_goodbyes(",
    ),
    Planted(
        "a verdict about a replaced worker is awaited",
        "states.py",
        "            timer.cancel()\n",
        "            pass\n",
    ),
    Planted(
        "an ended rank comes to life",
        "main.py",
        "if not isinstance(self.state, states.Ended):\n            self.state",
        "if True:\n            self.state",
    ),
    Planted("the held memory stays open", "main.py", "            self.held.close()\n", ""),
    Planted(
        "who is silent has a second time-out",
        "coordinator.py",
        "hear(rank, None, max(member.heard, self._goes_on_since))",
        "hear(rank, None, now)",
    ),
    Planted(
        "the first Ctrl-C does nothing", "ending.py", "if (heeded or goes_on) and not self._is_script:", "if goes_on:"
    ),
    Planted("a dying newcomer restarts the clock", "coordinator.py", "self._waits_since -= missing_for", "pass"),
    Planted(
        "a rank may be lost for ever", "seats.py", "(rank in restarted and before >= MOST_WITHOUT_A_STEP)", "False"
    ),
    Planted(
        "an old worker is heard",
        "main.py",
        "if work is self._work:\n                self._take_from",
        "if True:\n                self._take_from",
    ),
    Planted(
        "no token is needed",
        "connection.py",
        'raise Unsealed("it is not signed with a token")',
        "return read(raw.decode())",
    ),
    Planted("any token will do", "connection.py", "if not hmac.compare_digest(", "if None is hmac.compare_digest("),
)


def found_by(planted: Planted, runs: int) -> tuple[bool, str]:
    """Run the simulator on a copy with this fault; return whether it was found, and what the simulator said last."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("ddp_manual", "tests"):
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / "ddp_manual" / "agent" / planted.file
        source = path.read_text(encoding="utf-8")
        assert source.count(planted.old) == 1, f"{planted.name}: its place is {source.count(planted.old)} times there"
        path.write_text(source.replace(planted.old, planted.new), encoding="utf-8")
        command = [sys.executable, "-m", "tests.simulation", "--runs", str(runs), "--seed", str(SEED), "--first"]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line]
    found = re.search(r"^seed (\d+): (.*)$", done.stdout, re.MULTILINE)
    if found:
        return True, f"after {int(found[1]) - SEED + 1} runs: {found[2]}"
    return done.returncode != 0, (lines or done.stderr.splitlines() or ["nothing was said"])[-1]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--runs", default=3000, help="Runs in which a fault must be found.")
@click.argument("names", nargs=-1)
def main(runs: int, names: tuple[str, ...]) -> None:
    missed = []
    for planted in FAULTS:
        if names and not any(name in planted.name for name in names):
            continue
        found, said = found_by(planted, runs)
        print(f"{'found ' if found else 'MISSED'} {planted.name}: {said}", flush=True)
        missed += [] if found else [planted.name]
    print(f"{len(missed)} of the planted faults were missed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
