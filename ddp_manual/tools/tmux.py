"""A new session of tmux with a pane for each of several commands; the panes stay when their commands have ended."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_manual.errors import BadOption

NAME = "ddp-manual"
MOST_SESSIONS = 100
# Of a session that no terminal shows yet, which tmux would give 80 x 24: too few for 16 panes.
SIZE = ("-x", "200", "-y", "60")
# Seconds; tmux answers within milliseconds, unless its server must start on a busy machine.
ANSWERS_WITHIN = 30
# tmux 3.3a does not learn every exit code: in 1 of 5 trials with two ranks both stayed unknown.
_WITH_CODE = "#{?#{!=:#{pane_dead_status},}, with exit code #{pane_dead_status},}"
BORDER = f" #{{@label}}#{{?pane_dead, (ended{_WITH_CODE}),}} "


class Pane(NamedTuple):
    """A command in a part of a window."""

    label: str
    """What its border shows."""
    words: Sequence[str]


class _Failed(Exception):
    """tmux has ended with an error; says which."""


def open_session(windows: Mapping[str, Sequence[Pane]], folder: Path) -> str:
    """Start each pane's command in ``folder``; return the name of the session, which is a new one.

    Args:
        windows: name -> the panes of a window.

    Raises:
        BadOption: there is no tmux, or it does not do that.
    """
    if shutil.which("tmux") is None:
        raise BadOption(
            "--tmux needs tmux, which was not found",
            why="this terminal's PATH leads to no program of that name",
            next="install it, on Debian and Ubuntu with: apt-get install tmux\n"
            "or leave --tmux out, and type the lines in terminals of your own",
        )
    session = ""
    try:
        for name, panes in windows.items():
            start = ["-n", name, "-c", str(folder), *map(_as_argument, panes[0].words)]
            if session:
                window = _tmux("new-window", *_tell("window_id"), "-t", f"={session}:", *start, ";", *_stay(session))
            else:
                session, window = _new_session(start)
            last = window
            _label(last, panes[0])
            for pane in panes[1:]:
                words = map(_as_argument, pane.words)
                last = _tmux("split-window", "-d", *_tell("pane_id"), "-t", last, "-c", str(folder), *words)
                _label(last, pane)
                # Before the next split, which needs the space.
                _tmux("select-layout", "-t", window, "tiled")
        _tmux("select-window", "-t", f"={session}:^")
    except BaseException as error:
        if session:
            subprocess.run(["tmux", "kill-session", "-t", f"={session}"], capture_output=True)
        if not isinstance(error, _Failed):
            raise
        raise BadOption(
            "tmux did not open the panes",
            why=str(error),
            next="leave --tmux out, and type the lines in terminals of your own",
        ) from None
    return session


def how_to_go_on(session: str) -> str:
    """Return what to type to see the panes, and to end them."""
    name = shlex.quote(session)
    return (
        f"see them:  tmux attach -t {name}\n"
        "end them:  Ctrl-C in the pane of any rank ends the run; the panes stay, with what the ranks said last\n"
        f"close all: tmux kill-session -t {name}"
    )


def _new_session(start: Sequence[str]) -> tuple[str, str]:
    """Return the name of a session that did not exist before, and the id of its window."""
    for number in range(1, MOST_SESSIONS + 1):
        name = NAME if number == 1 else f"{NAME}-{number}"
        try:
            made = _tmux("new-session", "-d", *_tell("window_id"), "-s", name, *SIZE, *start, ";", *_stay(name))
        except _Failed as error:
            if "duplicate session" not in str(error):
                raise
        else:
            return name, made
    raise _Failed(f"there are sessions from {NAME} to {NAME}-{MOST_SESSIONS} already")


def _stay(session: str) -> list[str]:
    """Return the command for panes that stay when their commands end, also if the first one ends at once."""
    window = ["set-option", "-q", "-w", "-t", f"={session}:"]  # -q: tmux before 3.3 has no remain-on-exit-format
    settings = {"remain-on-exit": "on", "pane-border-status": "top", "pane-border-format": BORDER}
    settings["remain-on-exit-format"] = ""  # it would scroll the first line away
    return [word for name, value in settings.items() for word in (*window, name, value, ";")][:-1]


def _label(target: str, pane: Pane) -> None:
    _tmux("set-option", "-p", "-t", target, "@label", _as_argument(pane.label))


def _tell(what: str) -> list[str]:
    return ["-P", "-F", f"#{{{what}}}"]


def _as_argument(word: str) -> str:
    """Return the word as tmux takes it: it reads ``;`` at the end of a word as the end of a command."""
    return f"{word[:-1]}\\;" if word.endswith(";") else word


def _tmux(*arguments: str) -> str:
    """Return what tmux has printed.

    Raises:
        _Failed: it ended with an error.
    """
    try:
        done = subprocess.run(["tmux", *arguments], capture_output=True, text=True, timeout=ANSWERS_WITHIN)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise _Failed(str(error)) from None
    if done.returncode:
        raise _Failed(f"tmux {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
