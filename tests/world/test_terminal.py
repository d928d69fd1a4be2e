"""What a person sees at a terminal 80 columns wide, for real: a pseudo terminal, Ctrl-C typed, and commands pasted."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONGER, REPOSITORY, SHORT, Start, age_of, clean_environment

BAR = re.compile(r"^[━╸╺]{10} +\d+/\d+ +[\d:]+ left epoch 1/\d+ loss \d.\d{4} accuracy ")
PROMPT = "$ "


class Terminal:
    """A terminal in which a shell runs commands; ``python`` is the one that runs the tests."""

    def __init__(self, command: str, env: dict[str, str]) -> None:
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        # Opened by the leader of a session, it becomes its terminal, from which Ctrl-C comes.
        shell = f"exec <>{os.ttyname(self._theirs)} >&0 2>&0; trap : INT; {command}; printf '{PROMPT}'"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = clean_environment(PATH=path, TERM="xterm-256color", NO_COLOR="", **env)
        self.process = subprocess.Popen(["sh", "-c", shell], cwd=REPOSITORY, env=env, start_new_session=True)
        self.raw = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        received = b""
        with suppress(OSError):  # of a terminal that nobody has open any more
            while piece := os.read(self._ours, 65536):
                received += piece
                self.raw = received.decode(errors="replace")

    def _read_the_rest(self) -> None:
        if self._reading.is_alive():
            os.close(self._theirs)
            self._reading.join(5)

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without colours; a line that is wider than the screen is one line."""
        rows, row, column = [""], 0, 0
        for word in re.split(r"(\r|\n|\x1b\[[0-9;?]*[A-Za-z])", self.raw):
            if word == "\n":
                row += 1
                rows += [""] * (row == len(rows))
            elif word == "\r":
                column = 0
            elif word == "\x1b[1A":
                row -= 1
            elif word == "\x1b[2K":
                rows[row] = ""
            elif not word.startswith("\x1b"):
                rows[row] = rows[row][:column].ljust(column) + word + rows[row][column + len(word) :]
                column += len(word)
        return rows

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, seen: Callable[[list[str]], object], timeout: float = 60) -> list[str]:
        deadline = time.monotonic() + timeout
        while not seen(self.lines):
            assert time.monotonic() < deadline and self.process.poll() is None, self.raw
            time.sleep(0.02)
        return self.lines

    def wait(self, timeout: float = 30) -> list[str]:
        """Wait until the command has ended and the shell asks for the next one; returns the lines above."""
        self.process.wait(timeout)
        self._read_the_rest()
        *lines, last = self.lines
        assert last == PROMPT, self.raw
        assert "━" not in "".join(lines)
        return lines

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._read_the_rest()
        os.close(self._ours)


Type = Callable[..., Terminal]


@pytest.fixture
def at_terminal() -> Iterator[Type]:
    """Type a command at a terminal of its own."""
    opened: list[Terminal] = []

    def at_terminal(command: str, **env: str) -> Terminal:
        opened.append(Terminal(command, env))
        return opened[-1]

    yield at_terminal
    for terminal in opened:
        terminal.close()


@pytest.fixture
def typed(port: int, small_data: Path, tmp_path: Path) -> Callable[..., str]:
    """The line that starts rank 0, as a person types it."""

    def typed(world_size: int, *options: object) -> str:
        place = ["--world_size", world_size, "--rank", 0, "--master_port", port]
        files = ["--data_dir", small_data, "--run_dir", tmp_path / "run"]
        return shlex.join(
            map(str, ["python", "run_multi_gpu_train.py", *place, *SHORT, *LONGER, 500, *options, *files])
        )

    return typed


def has_bar(lines: list[str]) -> bool:
    return any(BAR.match(line) for line in lines)


def command_below(lines: list[str], text: str) -> str:
    (found,) = [number for number, line in enumerate(lines) if text in line]
    return lines[found + 1].strip()


def test_the_bar_fits_80_columns_and_gives_way_to_an_error_whose_command_can_be_pasted(
    at_terminal: Type, typed: Callable[..., str], tmp_path: Path
) -> None:
    """Of a rank alone; what ranks say of each other is in tests/scenarios."""
    command = typed(1, "--checkpoint_steps", 20)
    terminal = at_terminal(command)
    terminal.wait_for(lambda lines: any(line.startswith("[rank 0] saved") for line in lines))
    bar = next(line for line in terminal.wait_for(has_bar) if BAR.match(line))
    assert len(bar.rstrip()) <= 77  # so that ^C, which the terminal shows, does not begin another line
    (agent,) = psutil.Process(terminal.process.pid).children()
    min(agent.children(), key=age_of).kill()  # its worker
    lines = terminal.wait()
    assert "\x1b[1;31merror[master-lost]:\x1b[0m rank 0 (" in terminal.raw
    go_on = command_below(lines, "start all ranks again, from the last checkpoint if there is one:")
    assert go_on == f"{command.partition(' --run_dir')[0]} --resume auto --run_dir {tmp_path / 'run'}"
    again = at_terminal(go_on)
    again.wait_for(lambda lines: any("going on after step " in line for line in lines))
    again.wait_for(has_bar)
    again.type("\x03")
    lines = again.wait()
    assert any(line.startswith("stopped by Ctrl-C (SIGINT) after step ") for line in lines), lines
    assert command_below(lines, "  next: go on:") == go_on


def test_ctrl_c_on_a_rank_that_waits_alone_is_answered_in_place_of_the_line_that_says_so(
    at_terminal: Type, typed: Callable[..., str]
) -> None:
    terminal = at_terminal(typed(2))
    waiting = r"\[rank 0] waiting for rank 1; 1 of 2 here: 0 \(\S+\) \(waited 3 s of 1800 s\)"
    *before, _ = terminal.wait_for(lambda lines: re.fullmatch(waiting, lines[-1]))
    assert any(line.startswith("  python run_multi_gpu_train.py --world_size 2 --rank 1 ") for line in before)
    terminal.type("\x03")
    said, code = terminal.wait()[len(before) :]
    assert said == "error[stopped]: stopped by Ctrl-C (SIGINT) while it waited for the other ranks"
    assert re.fullmatch(r"  exit code 130, after \d+ s", code)


def test_a_terminal_that_is_not_read_neither_ends_the_run_nor_its_own_rank(
    at_terminal: Type, start: Start, port: int
) -> None:
    words = ["-m", "ddp_manual", "run", "--no_python", "--world_size", 2, "--master_port", port, "--peer_timeout", 2]
    first, second = ([*map(str, words), "--rank", str(rank), "sleep", "6"] for rank in range(2))
    terminal = at_terminal(f"python {shlex.join(second)}")
    terminal.wait_for(lambda lines: any("1 of 2 here" in line or "nothing listens at" in line for line in lines))
    terminal.type("\x13")
    other = start(sys.executable, *first)
    assert other.wait() == 0, other.err
    terminal.type("\x11")
    assert "error[" not in "".join(terminal.wait())
