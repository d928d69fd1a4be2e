"""What a program has started and left ends with its rank, however that ends and whoever has started it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to an ancestor")

# A child as a DataLoader's process is, a process with a session of its own, and a daemon whose parent has ended.
LEAVES = """
sh -c 'echo $$ > "$0"/$$; exec sleep 100' $FOLDER &
setsid sh -c 'echo $$ > "$0"/$$; exec sleep 100' $FOLDER &
(setsid sh -c 'echo $$ > "$0"/$$; exec sleep 100' $FOLDER &)
while [ $(ls $FOLDER | wc -l) -lt $ALL ]; do sleep 0.05; done
"""
# The first of two generations leaves four processes and loses rank 1, the second waits until they have ended.
REPLACED = """
if [ -f $FOLDER.$RANK ]; then
  for attempt in $(seq 200); do
    for pid in $(ls $FOLDER); do [ -e /proc/$pid ] && sleep 0.1 && continue 2; done
    exit 0
  done
  exit 4
fi
touch $FOLDER.$RANK
sh -c 'echo $$ > "$0"/$$; exec sleep 100' $FOLDER &
setsid sh -c 'echo $$ > "$0"/$$; exec sleep 100' $FOLDER &
while [ $(ls $FOLDER | wc -l) -lt 4 ]; do sleep 0.05; done
[ $RANK = 1 ] && kill -9 $$
sleep 100
"""
DATA_LOADER = """
import os, pathlib, sys, time, multiprocessing

def hang():
    os.setsid()
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(100)

for _ in range(2):
    multiprocessing.get_context("fork").Process(target=hang, daemon=True).start()
time.sleep(100)
"""


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Callable[[int], list[int]]]:
    """Returns the pids of what ranks have left, once there are so many; the folder is in ``tmp_path / "left"``."""
    folder = tmp_path / "left"
    folder.mkdir()

    def left(count: int) -> list[int]:
        deadline = time.monotonic() + 60
        while len(found := [int(path.name) for path in folder.iterdir()]) < count:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found

    yield left
    for pid in left(0):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "ends", "code"),
    [
        ("run", "exit 0", 0),
        ("run", "kill -9 $$", 137),
        ("launch", "exit 0", 0),
        ("launch", "sleep 100", 143),
    ],
)
def test_nothing_outlives_a_rank_that_ends(
    start: Start, left: Callable[[int], list[int]], tmp_path: Path, command: str, ends: str, code: int
) -> None:
    ranks = 2 if command == "launch" else 1
    place = ["--nproc", 2] if command == "launch" else ["--world_size", 1]
    words = [sys.executable, "-m", "ddp_manual", command, *place, "--no_python", "sh", "-c", LEAVES + ends]
    rank = start(*words, FOLDER=str(tmp_path / "left"), ALL=str(3 * ranks))
    pids = left(3 * ranks)
    if code == 143:
        rank.process.send_signal(signal.SIGTERM)
    assert rank.wait(30) == code, rank.err
    assert [pid for pid in pids if is_running(pid)] == []
    if code == 0:
        assert rank.err.count("ended what was left running: ") == ranks


def test_processes_of_a_script_that_hang_in_sessions_of_their_own_end_with_it(
    start: Start, left: Callable[[int], list[int]], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(DATA_LOADER)
    words = [sys.executable, "-m", "ddp_manual", "run", "--world_size", 1, tmp_path / "script.py", tmp_path / "left"]
    rank = start(*words)
    pids = left(2)
    rank.process.send_signal(signal.SIGTERM)
    assert rank.wait(30) == 143, rank.err
    assert [pid for pid in pids if is_running(pid)] == []


def test_what_a_worker_has_left_ends_before_the_worker_that_replaces_it_works(
    start: Start, left: Callable[[int], list[int]], tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 2, "--on_loss", "wait", "--no_python"]
    ranks = start(*words, "sh", "-c", REPLACED, FOLDER=str(tmp_path / "left"))
    left(4)
    assert ranks.wait(60) == 0, ranks.err
