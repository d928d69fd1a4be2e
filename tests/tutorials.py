"""Runs the commands of docs/from-tutorials.md as they stand there.

A block that begins with ``$ `` is what a user types and sees: each line after ``$ `` is a command, run by bash one
after the other; one that ends in `` &`` runs beside those that follow. Other lines of such a block are what is seen,
and are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, clean_environment

PAGE = REPOSITORY / "docs" / "from-tutorials.md"
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(number: int) -> str:
    """Return the text below the heading of tutorial ``number``."""
    parts = re.split(r"^## (\d)\. .*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))[number]


def commands(number: int) -> list[str]:
    """Return the commands of a section, in order."""
    blocks = [text for text in BLOCK.findall(section(number)) if text.startswith("$ ")]
    return [line.removeprefix("$ ") for text in blocks for line in text.splitlines() if line.startswith("$ ")]


def workspace(folder: Path, mnist: Path, cifar10: Path) -> Path:
    """Prepare a folder in which the page's commands can be typed."""
    for name in ("run_multi_gpu_train.py", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "data").symlink_to(mnist)
    (folder / "cifar10").symlink_to(cifar10)
    return folder


def type_in(folder: Path, number: int, *, timeout: float = 240, **env: str) -> list[str]:
    """Run all commands of a section in ``folder``; return the output of each, and fail if a command fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = clean_environment(PATH=path, **env)
    running: list[tuple[str, subprocess.Popen[str]]] = []
    said = []
    try:
        for command in commands(number):
            beside = command.endswith(" &")
            process = subprocess.Popen(
                ["bash", "-c", command.removesuffix(" &")],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            running.append((command, process))
            if beside:
                continue
            for typed, one in running:
                text, _ = one.communicate(timeout=timeout)
                assert one.returncode == 0, f"{typed}\n{text}"
                said.append(text)
            running = []
    finally:
        for _, process in running:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.communicate()
    return said


def jupyter_below(folder: Path) -> dict[str, str]:
    """Return variables that keep the files of Jupyter and matplotlib below ``folder``, out of the user's home."""
    (folder / "jupyter").mkdir()
    names = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    return {name: str(folder / "jupyter" / name.lower()) for name in names}
