"""What docs/clusters.md says in "By hand, on several machines", typed to the letter on several hosts.

What is printed may differ from the page in process ids, digests, seconds, percentages and speeds.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from pathlib import Path

from tests.conftest import REPOSITORY, RankProcess
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host

PAGE = (REPOSITORY / "docs" / "clusters.md").read_text()
SECTION = PAGE.partition("\n## By hand, on several machines\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"(host[A-Z])[$#] (.*)")
VARYING = re.compile(r"(?<=pid )\d+|(?<=digest )\w+|[\d.,]+(?=%| s\b| samples)")
PROGRAM = [sys.executable, "-m", "ddp_manual"]
TYPED_AS = "python -m ddp_manual"

# The page's train.py. It stays until the ports have been tried.
TRAIN = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {total.item():.0f} works", flush=True)
while not os.path.exists("../tried"):
    time.sleep(0.02)
dist.destroy_process_group()
"""
# Tries all these ports of these addresses at once.
CONNECT = """
import socket, sys, threading

def connect(word):
    address, port = word.rsplit(":", 1)
    try:
        socket.create_connection((address, int(port)), 0.7)
    except OSError as error:
        print(f"{word} {type(error).__name__}\\n", end="")
    else:
        print(f"{word} connected\\n", end="")

for word in sys.argv[1:]:
    threading.Thread(target=connect, args=(word,)).start()
"""


def on_page(host: Host, begins: str) -> tuple[str, list[str]]:
    """Return the only command that the page has for this host and that begins so, and the lines shown below it."""
    found: dict[str, list[str]] = {}
    for block in BLOCKS:
        shown: list[str] = []
        for line in block.splitlines():
            typed = PROMPT.fullmatch(line)
            if typed and typed[1] == host.name and typed[2].startswith(begins):
                shown = found[typed[2]] = []
            else:
                shown.append(line)
    [command] = found
    return command, found[command]


def start(host: Host, begins: str, folder: Path) -> RankProcess:
    """Type that command in the host's own folder."""
    program, *words = shlex.split(on_page(host, begins)[0])
    assert program == "ddp-manual"
    return host.start(*PROGRAM, *words, cwd=folder / host.name)


def assert_shown(process: RankProcess, host: Host, begins: str) -> None:
    """Check that it has printed the page's lines in their order, and others only where the page has dots."""
    _, shown = on_page(host, begins)
    text = "\n" + (process.err + process.out).replace(TYPED_AS, "ddp-manual")
    pieces = "\n".join(["", *shown, ""]).split("\n...")
    pattern = ".*".join(re.escape(VARYING.sub("<n>", piece)) for piece in pieces)
    assert re.match(pattern, VARYING.sub("<n>", text), re.DOTALL), "\n".join([pattern, text])


def folders(of: list[Host], below: Path) -> list[Path]:
    """Make a folder for each host: one that no other host uses."""
    for host in of:
        (below / host.name).mkdir()
    return [below / host.name for host in of]


def raise_fence(hosts: list[Host], folder: Path) -> None:
    """Save the page's rules on each host, and load them as the page says."""
    [rules] = [block for block in BLOCKS if block.startswith("# fence.nft")]
    for host in hosts:
        (folder / host.name / "fence.nft").write_text(rules)
        host.run("sh", "-c", f"cd {folder / host.name} && {on_page(host, 'nft ')[0]}")


def listening(host: Host) -> list[str]:
    """Return ``address:port`` of all sockets that listen on a host."""
    return [line.split()[3] for line in host.run("ss", "-Hltn").stdout.splitlines()]


def tried(host: Host, places: list[str]) -> set[str]:
    """Return how connections from a host to these places end."""
    lines = host.run(sys.executable, "-S", "-c", CONNECT, *places).stdout.splitlines()
    assert len(lines) == len(places)
    return {line.split()[1] for line in lines}


def test_a_script_runs_as_the_page_says_behind_the_pages_fence_which_keeps_a_fourth_host_out(
    hosts: Hosts, tmp_path: Path
) -> None:
    *three, stranger = hosts(4)
    first, second, third = three
    for folder in folders(three, tmp_path):
        (folder / "train.py").write_text(TRAIN)
    (tmp_path / third.name / "train.py").write_text(TRAIN.replace("0.02", "0.03"))
    for _ in range(2):  # the second replaces the first
        raise_fence(three, tmp_path)

    listed = start(first, "ddp-manual commands", tmp_path)
    assert listed.wait() == 0
    assert_shown(listed, first, "ddp-manual commands")
    for host in three:
        assert on_page(host, "ddp-manual run")[0] in listed.out.replace(TYPED_AS, "ddp-manual").splitlines()

    ranks = [start(first, "ddp-manual run", tmp_path)]
    ranks[0].wait_for("1 of 3 here")
    ranks.append(start(second, "ddp-manual run", tmp_path))
    ranks[0].wait_for("2 of 3 here")
    refused = start(third, "ddp-manual run", tmp_path)
    assert refused.wait() == 12
    assert_shown(refused, third, "ddp-manual run")
    places = [place for host in three for place in listening(host)]
    assert len(places) >= 3  # rank 0's port, and those at which two hosts answer probes

    shutil.copy(tmp_path / first.name / "train.py", tmp_path / third.name)
    ranks.append(start(third, "ddp-manual run", tmp_path))
    for rank, process in enumerate(ranks):
        process.wait_for(f"rank {rank} of 3 works")
    in_use = [place for host in three for place in listening(host)]
    assert len(in_use) >= 5  # rank 0's port, torch's store, and gloo's on each host
    assert {int(place.rpartition(":")[2]) for place in places + in_use} <= {29500, *range(*free_ports(first))}
    assert tried(stranger, in_use) == {"TimeoutError"}
    server = stranger.start(sys.executable, "-S", "-m", "http.server", "8080", "--bind", stranger.address)
    deadline = time.monotonic() + 10
    while not listening(stranger):
        assert time.monotonic() < deadline, server.err
        time.sleep(0.02)
    assert tried(first, [f"{stranger.address}:8080"]) == {"connected"}
    [take_away] = re.findall(r"`(nft delete .*?)`", SECTION)
    first.run(*shlex.split(take_away))
    assert tried(stranger, [f"{first.address}:29500"]) == {"connected"}

    (tmp_path / "tried").touch()
    assert [rank.wait() for rank in ranks] == [0, 0, 0], ranks[0].err
    for host, process in zip(three[:2], ranks, strict=False):
        assert_shown(process, host, "ddp-manual run")


def free_ports(host: Host) -> tuple[int, int]:
    """Return the kernel's range of ports as for ``range``, after comparing it with the page's."""
    low, high = host.run("cat", "/proc/sys/net/ipv4/ip_local_port_range").stdout.split()
    assert f"({low} to {high})" in SECTION and f"29500, {low}-{high} " in SECTION
    return int(low), int(high) + 1
