"""Files that nobody ever reads half of: each is written under a temporary name, and then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_manual.errors import writing

# What a file system says that cannot sync a folder, or has nothing to sync.
NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it: after a crash, the old or the new content is there, complete.

    Raises:
        DiskFull, BadOption: the folder cannot take the file.
    """
    with writing(path, "--run_dir"):
        replace_files({path: content})


def replace_files(contents: Mapping[Path, bytes | Iterable[bytes]]) -> None:
    """Write all files under temporary names, then rename them in this order. An OSError names the file."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, content in contents.items():
            try:
                with open(temporary[path], "wb") as file:
                    file.writelines([content] if isinstance(content, bytes) else content)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                error.filename = error.filename or str(path)  # only open() names the file
                raise
        for path in contents:
            os.replace(temporary[path], path)
            # A renamed file keeps its new name after a crash only once its folder is on disk too.
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            except OSError as error:
                if error.errno not in NO_FSYNC:
                    raise
            finally:
                os.close(folder)
    finally:
        for left in temporary.values():
            left.unlink(missing_ok=True)


def unfinished(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each temporary file, of a write in progress or of a process that was killed, and the file name meant."""
    for path in folder.glob(".*.tmp"):
        if name := re.fullmatch(r"\.(.+)\.\d+\.tmp", path.name):
            yield path, name[1]


def sweep(folder: Path, names: re.Pattern[str]) -> None:
    """Remove the temporary files of processes that were killed while they wrote files of these ``names``.

    The caller must hold the lock, so that no other process is writing there.
    """
    for path, name in unfinished(folder):
        if names.fullmatch(name):
            path.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def append_json_line(path: Path, content: Any) -> None:
    """Append a line to a ``.jsonl`` file, in a single write; if there is no room for all of it, keep nothing of it."""
    line = f"{json.dumps(content, allow_nan=False)}\n".encode()
    with writing(path, "--run_dir"), open(path, "ab", buffering=0) as file:
        begin = file.tell()
        if file.write(line) < len(line):
            file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def keep_json_lines(path: Path, wanted: Callable[[Any], bool]) -> None:
    """Drop the lines of a ``.jsonl`` file that are not ``wanted``, and a line that a kill cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if wanted(json.loads(line)):
                kept.append(line + "\n")
        except (ValueError, LookupError, TypeError):
            continue  # cut off, or not written by us
    write_bytes(path, "".join(kept).encode())
