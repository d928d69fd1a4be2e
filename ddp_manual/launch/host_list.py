"""The hosts of a run and how many ranks each has, as ``--hosts a:4,b:4`` or a hostfile lists them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ddp_manual.errors import BadOption

# A name begins with a letter or a digit: ssh would take -oProxyCommand=... for an option.
NAME = re.compile(r"\w[\w.-]*")
USER = re.compile(r"[^-\s@:,\[\]][^\s@:,\[\]]*")
SLOTS = re.compile(r"0*[1-9][0-9]{0,6}")
# The names by which every machine reaches itself.
LOCAL = ("localhost", "127.0.0.1", "::1")


class Host(NamedTuple):
    """A machine that has ranks."""

    name: str
    """What to give to ssh: ``a``, ``user@a`` or ``user@fe80::1``."""
    slots: int
    """How many ranks it has, at least 1."""

    @property
    def address(self) -> str:
        """Its name without the user."""
        return self.name.rpartition("@")[2]


def choose_hosts(hosts: str | None, hostfile: str | None) -> list[Host]:
    """Return the hosts that ``--hosts`` or ``--hostfile`` names, in their order; the first has rank 0.

    Raises:
        BadOption: both are given, or neither is, or what is given does not name hosts.
    """
    if hosts is None and hostfile is None:
        raise BadOption(
            "no hosts were given",
            why="neither --hosts nor --hostfile says which machines the ranks are for",
            next="name each with its number of ranks: --hosts a:4,b:4, or --hostfile FILE",
        )
    if hosts is not None and hostfile is not None:
        raise BadOption(
            "--hosts and --hostfile exclude each other",
            why=f"--hosts {hosts}, --hostfile {hostfile}: each names all hosts of the run",
            next="leave one of them out",
        )
    return parse_hosts(hosts) if hosts is not None else read_hostfile(str(hostfile))


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of ``a:4,user@b,[fe80::1]:2``; a host without a number has one rank.

    Raises:
        BadOption: an entry names no host or no number of ranks, or a host comes twice.
    """
    where = f"--hosts {text!r}"
    example = "write each host with its number of ranks, such as --hosts a:4,b:4"
    found = []
    for number, entry in enumerate((part.strip() for part in text.split(",")), 1):
        if not entry:
            why = f"nothing stands there: entry {number} of {text.count(',') + 1}" if "," in text else "it is empty"
            raise BadOption(f"{where} lacks a host", why=why, next=example)
        if entry.count(":") > 1 and "[" not in entry:
            raise BadOption(
                f"{where} has an IPv6 address without brackets: {entry}",
                why="the number of ranks comes after a colon too, so they cannot be told apart",
                next="write the address in brackets, such as --hosts [fe80::1]:4,[fe80::2]:4",
            )
        parts = re.fullmatch(r"(.*?)(?::([^:\]]*))?", entry)
        assert parts is not None  # it matches anything
        of_entry = f"{where}, entry {entry}"
        name = _host_name(parts[1], of_entry, example)
        found.append((of_entry, Host(name, 1 if parts[2] is None else _ranks(parts[2], of_entry, example))))
    return _without_twins(found, "{name}:{slots}")


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts of a hostfile in the format of Open MPI and DeepSpeed: ``host slots=N`` on each line.

    ``#`` begins a comment. As in Open MPI, a host without ``slots`` has M ranks by ``max_slots=M``, or one rank without
    that; beside ``slots``, ``max_slots`` is only an upper bound.

    Raises:
        BadOption: the file cannot be read or names no host, or a line has another form, or a host comes twice.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise BadOption(
            f"--hostfile {path} cannot be read",
            why=f"{error.strerror}: {path}",
            next="give a file with a line for each host, such as: a slots=4",
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if words:
            where = f"--hostfile {path}, line {number}"
            found.append((where, _host_of_line(words, where, line.strip())))
    if not found:
        raise BadOption(
            f"--hostfile {path} names no host",
            why="it has nothing but comments and blank lines" if any(lines) else "it is empty",
            next="write a line for each host, such as: a slots=4",
        )
    return _without_twins(found, "{name} slots={slots}")


def _host_of_line(words: list[str], where: str, line: str) -> Host:
    example = "write the host and its number of ranks, such as: a slots=4"
    given: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in ("slots", "max_slots") or name in given:
            twice = "is there twice" if name in given else "is neither slots=N nor max_slots=M"
            raise BadOption(f"{where}: {word} cannot be used", why=f"{word} {twice}: {line}", next=example)
        given[name] = value
    hosts_form = re.fullmatch(r"(.*[^:]):([0-9]+)", words[0])
    if hosts_form and not _is_ipv6(words[0].rpartition("@")[2]):
        raise BadOption(
            f"{where}: {words[0]} is not a host",
            why="a hostfile has no colon before the number of ranks, as --hosts has",
            next=f"write: {hosts_form[1]} slots={hosts_form[2]}",
        )
    name = _host_name(words[0], where, example)
    counts = {option: _ranks(value, where, example) for option, value in given.items()}
    most = counts.get("max_slots", 1)
    slots = counts.get("slots", most)
    if slots > counts.get("max_slots", slots):
        raise BadOption(
            f"{where}: slots={slots} is above max_slots={most}",
            why="slots=N is how many ranks the host has, max_slots=M how many it may have",
            next="make slots smaller, or leave max_slots out",
        )
    return Host(name, slots)


def _host_name(text: str, where: str, example: str) -> str:
    user, at, address = text.rpartition("@")
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    is_host = _is_ipv6(bare) if bare != address or ":" in address else NAME.fullmatch(address)
    if not is_host or (at and not USER.fullmatch(user)):
        raise BadOption(
            f"{where}: {text!r} is not a host",
            why="a host is a name, an IPv4 address or an IPv6 address, with user@ before it or without",
            next=example,
        )
    return f"{user}{at}{bare}"


def _ranks(text: str, where: str, example: str) -> int:
    if not SLOTS.fullmatch(text):
        is_zero = re.fullmatch("0+", text)
        raise BadOption(
            f"{where}: {text!r} is not a number of ranks",
            why="each host of a run has at least one rank" if is_zero else "it is no whole number from 1 to 9999999",
            next=f"leave the host out if it is to have no rank\notherwise {example}" if is_zero else example,
        )
    return int(text)


def _is_ipv6(text: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.IPv6Address(text))
    return False


def _without_twins(found: Sequence[tuple[str, Host]], form: str) -> list[Host]:
    """Return the hosts; raise BadOption if one comes twice, be it with another user.

    Open MPI adds up the lines that repeat a host without ``slots``, DeepSpeed refuses them. They are refused here too,
    because the ranks of a host are consecutive numbers, and such a file may mean another order.

    Args:
        found: for each host, the option or line that names it, and the host.
        form: how to write a host with all its ranks.
    """
    first: dict[str, tuple[str, Host]] = {}
    for where, host in found:
        before = first.setdefault(host.address.lower(), (where, host))
        if before[1] is not host:
            once = form.format(name=before[1].name, slots=before[1].slots + host.slots)
            raise BadOption(
                f"{where}: the host {host.address} is there already",
                why=f"{before[0]} has it with {before[1].slots}, and this one with {host.slots}",
                next=f"name each host once, with all its ranks: {once}",
            )
    return [host for _, host in found]
