"""Hosts as network namespaces: each with its name, address, hosts file, resolver and firewall; files are shared by all.

The machine's own network is not touched: the switch that connects the hosts is a bridge in a namespace too. So every
network may have the same names and addresses, and whatever happens ends with its namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.conftest import RankProcess, Start, age_of, named

RankCommand = Callable[..., list[object]]

PREFIX = "ddp-manual-test-"
ETC = Path("/etc/netns")
_SYN = "tcp flags & (syn | ack) == syn"


class CommandFailed(Exception):
    """A set-up command ended with an error; says which and what it printed."""


def run(
    *arguments: object, check: bool = True, stdin: str = "", timeout: float = 30
) -> subprocess.CompletedProcess[str]:
    """The finished command with its output as text.

    Raises:
        CommandFailed: its exit code is not 0, and ``check`` is set.
    """
    words = [str(argument) for argument in arguments]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise CommandFailed(f"{' '.join(words)} gave {done.returncode}:\n{stdin}{done.stdout}{done.stderr}")
    return done


def why_not() -> str | None:
    """Return why this process cannot make hosts, and what to do about it; None if it can."""
    reasons = []
    if missing := [tool for tool in ("ip", "nft", "unshare") if not shutil.which(tool)]:
        packages = "iproute2 nftables util-linux"
        reasons.append(f"{' and '.join(missing)} not found (on Debian and Ubuntu: apt-get install {packages})")
    if os.geteuid() != 0:
        reasons.append("only root can make network namespaces (run the tests as root)")
    if reasons:
        return "; ".join(reasons)
    trial = Namespace(f"{PREFIX}{os.getpid()}-trial")
    try:
        trial.add()
        trial.execute("nft", "list", "ruleset")
    except CommandFailed as error:
        return str(error)
    finally:
        trial.remove()
    return None


def remove_leftovers() -> None:
    """Remove the namespaces of test processes that were killed; each name carries the process's id."""
    found = {path.name for folder in (Path("/run/netns"), ETC) if folder.is_dir() for path in folder.iterdir()}
    for name in sorted(found):
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and not Path(f"/proc/{pid}").exists():
            Namespace(name).remove()


class Namespace:
    """A named network namespace and its files in /etc/netns, which ip puts in the place of those in /etc."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.etc = ETC / name

    def add(self) -> None:
        run("ip", "netns", "add", self.name)
        self.execute("ip", "link", "set", "lo", "up")

    def execute(self, *arguments: object, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run("ip", "netns", "exec", self.name, *arguments, check=check, stdin=stdin)

    def pids(self) -> list[str]:
        """Return the processes in the namespace."""
        return run("ip", "netns", "pids", self.name, check=False).stdout.split()

    def remove(self) -> None:
        """Remove the namespace and kill every process in it, also those that have left their process group."""
        deadline = time.monotonic() + 10
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise CommandFailed(f"killed, but still in {self.name}: {' '.join(pids)}")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)
        if Path("/run/netns", self.name).exists():
            run("ip", "netns", "delete", self.name)
        shutil.rmtree(self.etc, ignore_errors=True)


class Host:
    """One host of a network. What is named ``other`` is another host of the same network.

    Attributes:
        name: its host name, ``hostA`` for the first.
        ipv4, ipv6: its addresses on the network; None where the network has none of that family.
        network: with ``hosts`` (all of them) and ``silent`` (an address where every packet is dropped).
    """

    def __init__(self, network: Network, position: int) -> None:
        self.name = f"host{chr(ord('A') + position)}"
        self.network = network
        self.namespace = Namespace(f"{network.name}-{self.name}")
        self.ipv4 = f"{network.ipv4}.{position + 1}" if network.ipv4 else None
        self.ipv6 = f"{network.ipv6}::{position + 1}" if network.ipv6 else None
        self._names: dict[str, tuple[str, ...]] = {"localhost": ("127.0.0.1", "::1")}

    @property
    def address(self) -> str:
        """Its IPv4 address; on a network without, its IPv6 address."""
        address = self.ipv4 or self.ipv6
        assert address
        return address

    # -- commands -----------------------------------------------------------------------------------------------

    def start(self, *arguments: object, **env: str) -> RankProcess:
        """Start any command on this host, like the fixture ``start``."""
        assert self.network.start
        return self.network.start(*arguments, place=(self.namespace.name, self.name), **env)

    def start_script(self, rank: int, world_size: int, *words: object, **env: str) -> RankProcess:
        """Start a rank of a script, which is the last of the words; rank 0 is on the first host, or as they say."""
        assert self.network.port
        meeting = ["--world_size", world_size, "--rank", rank, "--master_port", self.network.port]
        meeting += ["--master_addr", self.network.hosts[0].address]
        return self.start(sys.executable, "-m", "ddp_manual", "run", *meeting, *words, **env)

    def start_program(
        self, rank: int, world_size: int, *options: object, program: Sequence[object] = ("true",), **env: str
    ) -> RankProcess:
        """Start a rank of a program without torch; rank 0 is on the first host, or as ``options`` say."""
        return self.start_script(rank, world_size, *options, "--no_python", *program, **env)

    def start_rank(self, rank: int, world_size: int, *options: object, **env: str) -> RankProcess:
        """Start a rank like the fixture ``start_rank``; rank 0 is on the first host, or as ``options`` say."""
        assert self.network.rank_command
        master = ["--master_addr", self.network.hosts[0].address]
        return self.start(*self.network.rank_command(rank, world_size, *master, *options), **env)

    def run(self, *arguments: object, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, within 30 s. Raises CommandFailed if it fails and ``check`` is set."""
        return self.namespace.execute(*named(self.name), *arguments, check=check, stdin=stdin)

    def kill(self, words: str, *, parent: bool = False) -> None:
        """Kill the youngest process of this host that has these words in its command, or its ``parent``."""
        pids = {int(pid) for pid in self.namespace.pids()}
        here = [process for process in psutil.process_iter(["cmdline"]) if process.pid in pids]
        commands = {process.pid: process.info["cmdline"] or [] for process in here}
        # Not a fork that is about to become another program.
        own = (process for process in here if commands[process.pid] != commands.get(process.ppid()))
        found = max((process for process in own if words in " ".join(commands[process.pid])), key=age_of)
        os.kill(found.ppid() if parent else found.pid, signal.SIGKILL)

    # -- names --------------------------------------------------------------------------------------------------

    def resolve(self, name: str, *addresses: str) -> None:
        """Put these addresses for a name into this host's hosts file; without addresses, remove the name from it."""
        self._names[name] = addresses
        lines = [f"{address} {name}\n" for name, addresses in self._names.items() for address in addresses]
        # Written in place: the processes that run already have this very file mounted.
        (self.namespace.etc / "hosts").write_text("".join(lines))

    def resolver(self, address: str | None) -> None:
        """Use the name server at ``address``, such as ``network.silent``; with None no server, so look-ups fail."""
        text = f"nameserver {address}\n" if address else ""
        (self.namespace.etc / "resolv.conf").write_text(text)

    # -- the firewall and the cable -----------------------------------------------------------------------------

    def nft(self, rules: str) -> None:
        """Load nftables commands; there is a table ``inet filter`` with the chains ``input`` and ``output``."""
        table = "add table inet filter\n" + "".join(
            f"add chain inet filter {hook} {{ type filter hook {hook} priority 0; policy accept; }}\n"
            for hook in ("input", "output")
        )
        self.namespace.execute("nft", "-f", "-", stdin=f"{table}{rules}\n")

    def drop_from(self, other: Host, port: int | None = None) -> None:
        """Leave new connections from ``other`` unanswered; existing connections and those to it are not affected."""
        self._on_connection_from(other, port, "drop")

    def reject_from(self, other: Host, port: int | None = None) -> None:
        """Answer connections from ``other`` as if nothing listened."""
        self._on_connection_from(other, port, "reject with tcp reset")

    def cut_from(self, *others: Host) -> None:
        """Drop every packet to and from these hosts, also packets of existing connections."""
        for direction, other in ((end, other) for end in ("input {} saddr", "output {} daddr") for other in others):
            for family, address in (("ip", other.ipv4), ("ip6", other.ipv6)):
                if address:
                    self.nft(f"add rule inet filter {direction.format(family)} {address} drop")

    def open_all(self) -> None:
        """Take all firewall rules back."""
        self.nft("flush table inet filter")

    def disconnect(self) -> None:
        """Pull the cable out of the switch: no host is notified, and addresses and routes stay."""
        self.network.switch.execute("ip", "link", "set", self.name, "down")

    def interface_down(self) -> None:
        """Take the interface down as an administrator would: the routes go too, and no other host is notified."""
        self.namespace.execute("ip", "link", "set", "eth0", "down")

    def reconnect(self) -> None:
        self.network.switch.execute("ip", "link", "set", self.name, "up")

    def _on_connection_from(self, other: Host, port: int | None, verdict: str) -> None:
        to_port = f"tcp dport {port} " if port else ""
        sources = [f"ip saddr {other.ipv4}"] if other.ipv4 else []
        sources += [f"ip6 saddr {other.ipv6}"] if other.ipv6 else []
        self.nft("\n".join(f"add rule inet filter input {source} {to_port}{_SYN} {verdict}" for source in sources))

    # -- made and connected by the network ----------------------------------------------------------------------

    def add(self) -> None:
        self.namespace.etc.mkdir(parents=True)
        if Path("/etc/nsswitch.conf").exists():
            # A resolver daemon that the machine may have answers on a Unix socket, for which a namespace is no limit.
            (self.namespace.etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
        self.resolver(None)
        # As Debian's installer does it; this is what sends bare torch to the wrong interface.
        self.resolve(self.name, "127.0.1.1")
        self.namespace.add()

    def connect(self) -> None:
        """Plug into the switch, and know the others by name."""
        port = ["type", "veth", "peer", "name", "eth0", "netns", self.namespace.name]
        self.network.switch.execute("ip", "link", "add", self.name, *port)
        self.network.switch.execute("ip", "link", "set", self.name, "master", "bridge", "up")
        commands = [f"address add {self.ipv4}/24 dev eth0"] if self.ipv4 else []
        commands += [f"address add {self.ipv6}/64 dev eth0 nodad"] if self.ipv6 else []
        self.namespace.execute("ip", "-batch", "-", stdin="\n".join([*commands, "link set eth0 up"]) + "\n")
        for other in self.network.hosts:
            if other is not self:
                self.resolve(other.name, *(address for address in (other.ipv4, other.ipv6) if address))


class Network:
    """``count`` hosts on one switch, and a machine that drops every packet."""

    def __init__(
        self,
        number: int,
        count: int,
        *,
        ipv4: bool,
        ipv6: bool,
        start: Start | None = None,
        rank_command: RankCommand | None = None,
        port: int = 0,
    ) -> None:
        assert ipv4 or ipv6
        self.name = f"{PREFIX}{os.getpid()}-{number}"
        self.ipv4 = f"10.77.{number}" if ipv4 else None
        self.ipv6 = f"fd00:77:0:{number:x}" if ipv6 else None
        self.silent = f"{self.ipv4}.250" if ipv4 else f"{self.ipv6}::250"
        self.start, self.rank_command, self.port = start, rank_command, port
        self.switch = Namespace(f"{self.name}-switch")
        self.hosts = [Host(self, position) for position in range(count)]

    def add(self) -> None:
        self.switch.add()
        self.switch.execute("ip", "link", "add", "bridge", "type", "bridge", "mcast_snooping", 0)
        self.switch.execute("ip", "link", "set", "bridge", "up")
        length = ["/24"] if self.ipv4 else ["/64", "nodad"]
        self.switch.execute("ip", "address", "add", self.silent + length[0], *length[1:], "dev", "bridge")
        # Neighbours are still found, or the sender would be told after 3 s that there is no such host.
        self.switch.execute(
            "nft",
            "add table inet filter; add chain inet filter input { type filter hook input priority 0; policy drop; }; "
            "add rule inet filter input icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept",
        )
        for host in self.hosts:
            host.add()
        for host in self.hosts:
            host.connect()

    def remove(self) -> None:
        for namespace in (*(host.namespace for host in self.hosts), self.switch):
            namespace.remove()
