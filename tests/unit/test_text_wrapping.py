"""What a person sees at the width of a terminal, and while a rank waits."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from ddp_manual import terminal
from ddp_manual.deadline import Waiting
from ddp_manual.errors import PeerFailed, RankMissing, from_dict
from ddp_manual.rank_output import RankOutput
from ddp_manual.text_wrapping import as_shell_words, whole
from ddp_manual.wording import byte_size, duration

COMMAND = "ddp-manual run --world_size 2 --rank 1 --master_addr 10.0.0.1 train.py --lr 0.1"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def on_screen() -> Iterator[Screen]:
    """Have stderr be a terminal 40 columns wide, of rank 0."""
    variables = {"COLUMNS": "40", "NO_COLOR": "1"}
    screen = mock.patch.object(sys, "stderr", Screen())
    foreground = mock.patch.object(terminal, "_is_in_foreground", return_value=True)
    with screen as shown, foreground, mock.patch.dict(os.environ, variables), terminal.log_as_found():
        terminal.log_to_stderr(0)
        yield shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("ddp_manual.deadline.time.monotonic", lambda: now[0])
    return now


def pass_seconds(clock: list[float], seconds: int, look: Callable[[], object]) -> None:
    for _ in range(seconds * 2):
        clock[0] += 0.5
        look()


def test_a_traceback_is_for_the_terminal_of_the_rank_that_raised_and_in_the_file_of_each() -> None:
    why = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: boom'
    error = PeerFailed("rank 1 (a, pid 7) left with error[training-failed]: ValueError: boom", why=why, next="fix it")
    assert error.render().splitlines() == [
        "error[peer-failed]: rank 1 (a, pid 7) left with error[training-failed]: ValueError: boom",
        "  next: look at its terminal, which has the traceback",
        "        fix it",
    ]
    assert from_dict(error.as_dict()).why == why


def test_a_terminal_has_one_line_about_waiting_below_the_command_to_type(clock: list[float]) -> None:
    with on_screen() as screen:
        waiting = Waiting(600, terminal.log)

        def look() -> None:
            waiting.about("waiting for rank 1; 1 of 2 here: 0 (hostA)")
            waiting.advise([whole(COMMAND)])

        pass_seconds(clock, 3, look)
        assert screen.getvalue().count("\n") == 4
        assert "waiting for rank 1; 1 of 2\n  here: 0 (hostA)\n" in screen.getvalue()
        before, _, last = screen.getvalue().rpartition("\r\x1b[2K")
        assert f"[rank 0] to start what is missing:\n  {COMMAND}\n" in before
        assert last == "[rank 0] wait ... (waited 3 s of 600 s)" and len(last) < 40
        waiting.about("waiting for rank 1; 1 of 2 here: 0 (hostA)", ["rank 1 was refused"])
        assert "\r\x1b[2K[rank 0] rank 1 was refused\n\r\x1b[2K[rank 0] " in screen.getvalue()
        waiting.ends()
        assert screen.getvalue().endswith("\r\x1b[2K")
        terminal.log("all ranks are here")
        assert screen.getvalue().endswith("\r\x1b[2K[rank 0] all ranks are here\n")


def test_a_file_has_a_line_about_waiting_every_10_s_and_after_a_minute_every_60_s(clock: list[float]) -> None:
    said: list[str] = []
    waiting = Waiting(600, said.append)
    pass_seconds(clock, 300, lambda: waiting.about("waiting for rank 1"))
    assert len(said) == 7 + 3
    assert said[0] == "waiting for rank 1 (waited 1 s of 600 s)"


def test_launch_wraps_what_its_ranks_say_beside_their_numbers_and_no_line_of_programs(tmp_path: Path) -> None:
    path, long = tmp_path / "log", "a line that is a good deal wider than the terminal"
    with on_screen() as screen, path.open("ab", buffering=0) as log, ThreadPoolExecutor(1) as writer:
        output = RankOutput(log, 0, writer)
        output.print(f"[rank 0] {long}")
        output.write(f"[rank 0] {long}\n{long}\n".encode())
        output.print("for the log alone", shown=False)
        output.print_error(RankMissing(long, why="", next=whole("type this")), shown=True)
        output.write("a\u2028b\x0cc\n".encode())
    own = ["[rank 0] a line that is a good deal", "[rank 0]   wider than the terminal"]
    shown = screen.getvalue().split("\n")
    assert shown[-2:] == ["[rank 0] a\u2028b\x0cc", ""]
    assert shown[:5] == [*own, *own, f"[rank 0] {long}"]
    assert shown[5] == "[rank 0] error[rank-missing]: a line" and shown[-3] == "[rank 0]   next: type this"
    logged = path.read_text().splitlines()
    assert logged[0] == f"[rank 0] {long}" and "for the log alone" in logged


def test_a_size_has_three_digits() -> None:
    shown = [byte_size(count) for count in (512, 1000, 1015 << 20, 3 << 40)]
    assert [*shown, byte_size(999.7e6, 1000)] == ["512 B", "0.977 KB", "0.991 GB", "3072 GB", "1 GB"]


def test_a_duration_is_in_the_largest_units() -> None:
    shown = [duration(seconds) for seconds in (0.42, 23.4, 103, 7503)]
    assert shown == ["0.4 s", "23 s", "1 min 43 s", "2 h 5 min"]


def test_words_with_control_characters_are_one_line_which_a_shell_reads_as_they_were() -> None:
    words = ["set -e\necho 'one'\t\\n", "\x1b[1m0\r", "plain", "a b", "it's", "", "é\x7f"]
    line = as_shell_words(words)
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], stdout=subprocess.PIPE, check=True).stdout
    assert line.isprintable() and read.decode().split("\0") == [*words, ""]
