"""The ssh session of one host of ``launch --hosts``: how it is started, what it says, and why it has ended."""

from __future__ import annotations

import asyncio
import getopt
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

import ddp_manual
from ddp_manual import unread
from ddp_manual.errors import BadOption, signal_name
from ddp_manual.launch import session_messages
from ddp_manual.launch.attempts import in_short
from ddp_manual.launch.host_list import LOCAL, Host
from ddp_manual.launch.session_messages import ALIVE_EVERY, END_WITHIN, MARK, SILENT_AFTER
from ddp_manual.text_wrapping import whole
from ddp_manual.wire import encode_local

T = TypeVar("T")

# With these intervals ssh ends 5 s after the network is cut. ssh uses and begins no shared connection: the intervals do
# not apply to that, its process keeps the pipes of a killed session, and it would outlive the run.
SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=7",
    "ControlMaster=no",
    "ControlPath=none",
    "ServerAliveInterval=1",
    f"ServerAliveCountMax={SILENT_AFTER - 1:.0f}",
)
# Seconds for Python to start on a host and find the script's modules.
READY_WITHIN = 60.0
NO_FOLDER = 77
# The options of ssh, as getopt has them.
OF_SSH = "1246AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:"
# The options that ssh-copy-id has too, and those that it has only as -o SETTING=VALUE.
OF_COPY_ID = ("-i", "-p", "-F", "-o")
SETTINGS = {"-J": "ProxyJump", "-l": "User"}

# What ssh says -> what that means, and what to do; {ssh} and {copy_id} are these commands, {host} is the host's name,
# {config} ssh's configuration file, {removal} the command that ssh itself names.
SSH_SAYS = (
    ("Could not resolve hostname", "its name has no address", "correct the name, or give its HostName in {config}"),
    ("Connection refused", "it answers, but no sshd listens there", "start sshd there, or give its Port in {config}"),
    ("timed out", "it does not answer", "see whether it is on, and whether a firewall drops its ssh port"),
    ("not responding", "it does not answer any more", "see whether it is on, and whether the network leads to it"),
    ("closed by remote host", "its sshd has ended the connection", "see whether it goes down, or who ended its sshd"),
    ("No route to host", "it does not answer", "see whether it is on, and whether the network leads to it"),
    (
        "IDENTIFICATION HAS CHANGED",
        "it has another host key than before",
        "if it was installed again:\n"
        + whole("{removal}")
        + "\nthen accept its new key:\n"
        + whole("{ssh} {host} true"),
    ),
    ("Host key verification failed", "its host key is not known", "accept its key:\n" + whole("{ssh} {host} true")),
    (
        "Permission denied",
        "it does not accept your key",
        "have it accept your key:\n" + whole("{copy_id} {host}") + "\nor, for a key with a passphrase: ssh-add",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """How to reach the hosts, and which folder and Python to use there."""

    ssh: Sequence[str] | None
    """The ssh command; None: ``ssh``, and a child process on this machine for localhost."""
    folder: str
    python: str

    @classmethod
    def of(cls, ssh: str | None, folder: str | None, python: str | None) -> Remote:
        """Return what was typed as a Remote; by default the folder and the Python are the same as here.

        Raises:
            BadOption: the folder begins with ``~`` and the name of a user, or is the current one, which is gone; or the
                ssh command is not quoted as a shell has it.
        """
        if folder is not None and re.match("~[^/]", folder):
            raise BadOption(
                f"--remote_dir {folder} cannot be found",
                why="only ~ and ~/ are known on each host, as the home of the user that ssh logs in as",
                next="give the whole path",
            )
        try:
            words = shlex.split(ssh) if ssh else None
        except ValueError as error:
            raise BadOption(f"--ssh {ssh} is no command", why=str(error), next="quote it as a shell does") from None
        try:
            folder = folder or str(Path.cwd())
        except OSError as error:
            raise BadOption("the current folder is gone", why=str(error), next="give --remote_dir") from None
        return cls(ssh=words, folder=folder, python=python or sys.executable)

    def command(self, host: str) -> list[str]:
        """Return the command that starts ``launch/on_each_host.py`` on a host."""
        at_home = self.folder == "~" or self.folder.startswith("~/")
        folder = '"$HOME"' + shlex.quote(self.folder[1:]) if at_home else shlex.quote(self.folder)
        script = f"cd {folder} 2>/dev/null || exit {NO_FOLDER}; exec {shlex.quote(self.python)} -m ddp_manual hosted"
        if self.ssh is None and host in LOCAL:
            return ["sh", "-c", f"unset SSH_CONNECTION; {script}"]  # it describes another login
        options = [word for option in SSH_OPTIONS for word in ("-o", option)]
        return [*(self.ssh or ["ssh"]), *options, "-T", "-x", "--", host, f"sh -c {shlex.quote(script)}"]

    def words(self, host: str) -> dict[str, str]:
        """Return what to type about a host, by the names in ``SSH_SAYS``; ``copy`` copies this folder to it."""
        program, *options = self.ssh or ["ssh"]
        ssh = shlex.join([program, *options])
        by = f"-e {shlex.quote(ssh)} " if options else ""
        user, at, address = host.rpartition("@")
        to = f"{user}{at}[{address}]" if ":" in address else host
        # Relative to the home: a path of rsync that does not begin with a slash begins there.
        folder = self.folder.removeprefix("~").removeprefix("/") or "." if self.folder[:1] == "~" else self.folder
        config = options[options.index("-F") + 1 :][:1] if "-F" in options else []
        return {
            "ssh": ssh,
            "host": shlex.quote(host),
            "config": shlex.join(config) or "~/.ssh/config",
            "copy_id": shlex.join(["ssh-copy-id", *_for_copy_id(options)]),
            "copy": f"rsync -a {by}./ {shlex.quote(f'{to}:{folder}/')}",
        }


def _for_copy_id(options: Sequence[str]) -> list[str]:
    """Return those options of ssh that ssh-copy-id knows, as it takes them."""
    try:
        given, _ = getopt.getopt(list(options), OF_SSH)
    except getopt.GetoptError:  # options of a program other than ssh
        return []
    kept = [(name, value) for name, value in given if name in OF_COPY_ID]
    kept += [("-o", f"{SETTINGS[name]}={value}") for name, value in given if name in SETTINGS]
    return [word for pair in kept for word in pair]


def why_not(host: str, remote: Remote, code: int | None, said: str) -> tuple[str, str]:
    """Return why a session has ended, and what to do.

    Args:
        code: the session's exit code.
        said: what it has written to stderr.
    """
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "nothing was said")
    words = remote.words(host)
    log_in = f"{words['ssh']} {words['host']}"
    if code == 255:
        removal = re.search(r"ssh-keygen -f .*", said)
        words["removal"] = removal[0].strip() if removal else f"ssh-keygen -R {shlex.quote(host.rpartition('@')[2])}"
        for says, cause, remedy in SSH_SAYS:
            if says in said:
                return f"{cause}: {last}", remedy.format(**words)
        return f"ssh has ended: {last}", f"see what ssh says:\n{whole(log_in)} true"
    if code == NO_FOLDER:
        return f"it has no folder {remote.folder}", f"copy this one:\n{whole(words['copy'])}\nor give --remote_dir"
    if code in (126, 127):
        return f"it has no Python at {remote.python}", "give --remote_python, such as --remote_python /usr/bin/python3"
    if "No module named ddp_manual" in said:
        return (
            f"{remote.python} there has no ddp_manual",
            f"install this package there (pip install .), version {ddp_manual.__version__}",
        )
    if "No such command" in said:
        return "its ddp_manual is too old", f"install version {ddp_manual.__version__} there"
    if code is not None and (code > 128 or code < 0):  # it is below 0 if no shell was in between
        name = signal_name(code - 128 if code > 0 else -code)
        if code < 0 and not (remote.ssh is None and host in LOCAL):
            return f"ssh on this machine was ended by {name}", "see who has sent it, or whether memory ran out: dmesg"
        return f"its agents were ended by {name}", f"see who has sent it, or whether memory ran out: {log_in} dmesg"
    return f"its Python has ended with exit code {code}: {last}", f"log in, and try it there: {log_in}"


class NotReady(Exception):
    """A host cannot run its ranks: the cause, and what to do."""


class Session:
    """The session of one host."""

    def __init__(self, host: Host, remote: Remote, writer: ThreadPoolExecutor) -> None:
        self.host, self.remote = host, remote
        self._writer = writer
        self._messages: asyncio.Queue[session_messages.FromHost | None] = asyncio.Queue()
        """What the host says, without signs of life; None once the session has ended."""
        self.hello: session_messages.Hello | None = None
        self.ready: session_messages.HostReady | None = None
        self.said = ""
        """What ssh and the host have written to stderr; the lines of ranks are left out."""
        self.process: asyncio.subprocess.Process | None = None
        self._silent_for = 0.0
        """Seconds that the host is silent, counted by our signs of life: none counts while this process is stopped."""
        self._showing = 0
        """How many streams wait for the terminal, which may be held; nothing is read from them meanwhile."""
        self._was_silent = self._is_unreadable = False

    async def prepare(self, order: session_messages.Order, code: Mapping[str, str]) -> None:
        """Start the session and wait until the host is ready.

        Args:
            code: part of the program -> digest of its source code here; the host is to have the same.

        Raises:
            NotReady: the host cannot run its ranks, or does not answer in time.
        """
        await self._start()
        self.send(order)
        self.hello = await self._answer(session_messages.Hello)
        own = ddp_manual.__version__
        if self.hello.version != own:
            raise NotReady(
                f"its ddp_manual is version {self.hello.version}, here it is {own}", f"install version {own} there"
            )
        self.ready = await self._answer(session_messages.HostReady)
        theirs = self.ready.code
        differs = sorted(name for name in {*code, *theirs} if code.get(name) != theirs.get(name))
        if differs and not order.job.spec.allow_mismatch:
            raise NotReady(
                f"its {', '.join(differs[:8])} is not the same as here",
                f"copy it:\n{whole(self.remote.words(self.host.name)['copy'])}",
            )

    async def _start(self) -> None:
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.remote.command(self.host.name), **pipes, start_new_session=True
            )
        except OSError as error:
            remedy = "correct --ssh" if self.remote.ssh else "apt-get install openssh-client"
            raise NotReady(f"ssh cannot be started: {error}", remedy) from None
        self._living = asyncio.create_task(self._live(self.process))

    async def hear(self) -> session_messages.FromHost | None:
        """Return what the host says next; None once the session has ended."""
        if (message := await self._messages.get()) is None:
            self._messages.put_nowait(None)
        return message

    async def _answer(self, kind: type[T]) -> T:
        try:
            message = await asyncio.wait_for(self.hear(), READY_WITHIN)
        except asyncio.TimeoutError:
            raise NotReady(f"it has said nothing for {READY_WITHIN:.0f} s", "see what that host is busy with") from None
        if isinstance(message, session_messages.Refused):
            raise NotReady(in_short(message.words.error()), message.words.next)
        if not isinstance(message, kind):
            raise NotReady(*self.why_ended())
        return message

    def why_ended(self) -> tuple[str, str]:
        """Return why the session has ended, and what to do."""
        assert self.process is not None
        if self._was_silent:
            return (
                f"it does not answer any more: nothing has come for {SILENT_AFTER:.0f} s",
                "see whether it is on, whether the network leads to it, and whether its agents are stopped (ps: T)",
            )
        if self._is_unreadable:
            return "its ddp_manual is another version", f"install version {ddp_manual.__version__} there"
        return why_not(self.host.name, self.remote, self.process.returncode, self.said)

    @property
    def others_end_within(self) -> float:
        """The seconds in which the other hosts must end their ranks, now that this session has ended."""
        return END_WITHIN - (SILENT_AFTER if self._was_silent or "not responding" in self.said else 0)

    async def _copy(self, stream: asyncio.StreamReader, sink: TextIO) -> None:
        rest = b""
        while piece := await stream.read(1 << 16):
            self._silent_for = 0
            *lines, rest = (rest + piece).split(b"\n")
            shown = []
            for line in lines:
                # Before the first message, its line may have a login greeting; later, text before MARK is a rank's.
                before, mark, message = line.partition(MARK)
                if sink is sys.stdout and mark and not (before and self.hello):
                    self._take(message)
                else:
                    shown.append(line)
            await self._show(shown, sink)
        await self._show([rest] if rest else [], sink)

    def _take(self, line: bytes) -> None:
        try:
            message = session_messages.read_from_host(line.decode())
        except (msgspec.MsgspecError, ValueError):  # from another version of this package
            self._is_unreadable = True
            self.kill()
            return
        if not isinstance(message, session_messages.Alive):
            self._messages.put_nowait(message)

    async def _show(self, lines: list[bytes], sink: TextIO) -> None:
        text = [line.decode(errors="replace") for line in lines]
        if sink is sys.stderr:
            own = [line for line in text if not line.startswith("[rank ")]
            self.said = "\n".join([self.said, *own])[-4000:]
        if text and self.ready:  # lines before that are a greeting, or say why it is not ready
            shown = "".join(f"[{self.host.name}] {line}\n" for line in text)
            self._showing += 1
            await asyncio.wrap_future(self._writer.submit(unread.write, shown, sink))
            self._showing -= 1

    async def _live(self, process: asyncio.subprocess.Process) -> None:
        """Read what the session writes, and send signs of life, until it has ended."""
        assert process.stdout and process.stderr
        copies = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
        copying = [asyncio.create_task(self._copy(stream, sink)) for stream, sink in copies]
        beating = asyncio.create_task(self._keep_alive())
        await process.wait()
        await asyncio.wait(copying, timeout=1)
        beating.cancel()
        self._messages.put_nowait(None)

    async def _keep_alive(self) -> None:
        """Send signs of life; kill the session if its host, once ready, sends nothing for ``SILENT_AFTER`` seconds."""
        while True:
            await asyncio.sleep(ALIVE_EVERY)
            self.send(session_messages.Alive())
            if self.ready and not self._showing:
                self._silent_for += ALIVE_EVERY
                if self._silent_for > SILENT_AFTER:
                    self._was_silent = True
                    self.kill()

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()

    def send(self, message: session_messages.FromLauncher) -> None:
        stdin = self.process.stdin if self.process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(encode_local(message))

    async def close(self) -> None:
        """End the session: once standard input ends, the host's process ends what is left there."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        # Before its Hello ssh may still wait for the host to answer: kill it at once.
        done, _ = await asyncio.wait([self._living], timeout=END_WITHIN if self.hello else 0)
        if not done:
            self.kill()
            await self._living
