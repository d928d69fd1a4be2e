"""Rank 0's name and address, as real resolvers, hosts files and routes have them: each rank shows what it looked up,
and says at once what cannot work. Also where names are learnt late, which is what pods and new virtual machines see."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.conftest import RankProcess, last_error
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host

# Copies bytes between who connects to the first address and the second one: a number is a port on loopback, a path is
# a Unix socket, which network namespaces share, and ``host:port`` is what it says.
FORWARD = """
import socket, sys, threading

def family_of(address):
    if "/" in address:
        return socket.AF_UNIX, address
    host, _, port = address.rpartition(":")
    return socket.AF_INET, (host or "127.0.0.1", int(port))

def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass

listened, forwarded = map(family_of, sys.argv[1:])
listener = socket.socket(listened[0], socket.SOCK_STREAM)
listener.bind(listened[1])
listener.listen(64)
print("forwarding", file=sys.stderr, flush=True)
while True:
    near, _ = listener.accept()
    far = socket.socket(forwarded[0], socket.SOCK_STREAM)
    try:
        far.connect(forwarded[1])
    except OSError:  # rank 0 does not listen yet
        near.close()
        continue
    for pair in (near, far), (far, near):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


def start_ranks(on: list[Host], *options: object, **env: str) -> list[RankProcess]:
    """Start one rank per host, of a program without torch."""
    return [host.start_program(rank, len(on), *options, **env) for rank, host in enumerate(on)]


def codes(*ranks: RankProcess) -> list[int]:
    return [rank.wait(60) for rank in ranks]


def test_a_name_without_an_address_is_waited_for_and_ends_the_rank_when_the_time_is_up(hosts: Hosts) -> None:
    two = hosts(2)
    lost = two[1].start_program(1, 2, "--master_addr", "no.such.host.invalid", "--join_timeout", 5)
    two[0].resolve("job-0.svc", two[0].address)
    ranks = start_ranks(two, "--master_addr", "job-0.svc")
    ranks[1].wait_for("rank 0's address 'job-0.svc' has no IP address yet")
    lost.wait_for("rank 0's address 'no.such.host.invalid' has no IP address yet (looking")
    two[1].resolve("job-0.svc", two[0].address)
    assert codes(*ranks, lost) == [0, 0, 11], ranks[1].err
    assert last_error(lost.err).startswith("error[master-unresolvable]: rank 0's address 'no.such.host.invalid' has no")
    assert "looking it up on hostB gave: " in last_error(lost.err)


def test_a_name_that_gets_another_address_is_looked_up_again_and_the_address_that_answers_is_used(
    hosts: Hosts, port: int
) -> None:
    two = hosts(2)
    silent = two[0].network.silent
    two[1].resolve("job-0.svc", silent)
    rank_1 = two[1].start_program(1, 2, "--master_addr", "job-0.svc")
    rank_1.wait_for(f"no answer from job-0.svc:{port} (job-0.svc is {silent})")
    for host in two:
        host.resolve("job-0.svc", silent, two[0].address)
    rank_0 = two[0].start_program(0, 2, "--master_addr", "job-0.svc")
    assert codes(rank_0, rank_1) == [0, 0], rank_1.err
    shown = re.search("rank 0's address job-0.svc is (.*)", rank_0.err)
    assert shown and set(shown[1].split(", ")) == {silent, two[0].address}


def test_rank_0s_own_host_name_works_though_it_is_a_loopback_address_there(hosts: Hosts) -> None:
    """As Debian's installer has it in /etc/hosts."""
    two = hosts(2)
    ranks = start_ranks(two, "--master_addr", "hostA")
    assert codes(*ranks) == [0, 0], ranks[1].err
    first = f"{two[0].address}, 127.0.1.1 ({two[0].address} first: other hosts cannot reach 127.0.1.1)"
    assert f"rank 0's address hostA is {first}\n" in ranks[0].err and f"listening at {two[0].address}:" in ranks[0].err
    assert f"rank 0's address hostA is {two[0].address}\n" in ranks[1].err


def test_localhost_as_rank_0s_address_ends_the_ranks_of_several_hosts_at_once(hosts: Hosts) -> None:
    two = hosts(2)
    ranks = start_ranks(two, "--master_addr", "localhost", SLURM_STEP_NUM_NODES="2")
    assert codes(*ranks) == [11, 11]
    for host, rank in zip(two, ranks, strict=True):
        assert last_error(rank.err).startswith("error[loopback-master]: rank 0's address localhost ")
        assert "SLURM_STEP_NUM_NODES=2" in rank.err and f"if that is this one: --master_addr {host.address}" in rank.err


def test_localhost_on_a_host_of_its_own_names_the_host_that_it_is(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    ranks = start_ranks(two, "--master_addr", "localhost", "--join_timeout", 4)
    assert codes(*ranks) == [10, 11]
    advice = "(only hostA itself reaches 127.0.0.1: for ranks on other hosts, start rank 0 again with --master_addr "
    assert f"{advice}{two[0].address}" in ranks[0].err
    what = last_error(ranks[1].err).splitlines()[0]
    assert what.startswith(f"error[master-refused]: nothing has listened for 4 s at rank 0's address localhost:{port}")
    assert what.endswith(" (localhost is 127.0.0.1, ::1), which is hostB itself")


def test_rank_0_on_a_host_that_does_not_have_its_address_is_told_which_has(hosts: Hosts) -> None:
    two = hosts(2)
    rank_1 = two[1].start_program(1, 2)
    rank_1.wait_for("is rank 0 started?")
    astray = two[1].start_program(0, 2)
    assert astray.wait(30) == 11
    error = last_error(astray.err)
    assert f"error[address-not-local]: rank 0 runs on hostB, but {two[0].address} is not an address of this" in error
    assert two[1].address in error and f"start rank 0 on the host that has {two[0].address}" in error
    assert codes(two[0].start_program(0, 2), rank_1) == [0, 0], rank_1.err


def test_a_rank_that_comes_to_a_loopback_address_through_a_tunnel_is_refused(
    hosts: Hosts, port: int, tmp_path: Path
) -> None:
    two = hosts(2)
    rank_0 = two[0].start_program(0, 2, "--master_addr", "127.0.0.1")
    rank_0.wait_for("listening at ")
    tunnel = tmp_path / "tunnel"
    two[0].start(sys.executable, "-c", FORWARD, tunnel, port).wait_for("forwarding")
    two[1].start(sys.executable, "-c", FORWARD, port, tunnel).wait_for("forwarding")
    through = two[1].start_program(1, 2, "--master_addr", "127.0.0.1")
    assert through.wait(30) == 11
    what = "rank 0 listens on 127.0.0.1, which is not for other hosts, and rank 1 is on hostB"
    assert f"error[loopback-master]: {what}\n" in through.err
    assert "came through a tunnel to hostA" in last_error(through.err)
    rank_0.wait_for(f"rank 1 (hostB, pid {through.worker}) was refused: loopback-master")


def test_rank_0_may_listen_at_all_its_addresses_behind_a_port_forward_of_another_host(
    hosts: Hosts, port: int, tmp_path: Path
) -> None:
    three = hosts(3)
    forwarder, rest, tunnel = three[2], [*three[:2]], tmp_path / "forward"
    three[0].start(sys.executable, "-c", FORWARD, tunnel, f"{three[0].address}:{port}").wait_for("forwarding")
    forwarder.start(sys.executable, "-c", FORWARD, f"{forwarder.address}:{port}", tunnel).wait_for("forwarding")
    refused = three[0].start_program(0, 2, "--master_addr", forwarder.address)
    assert refused.wait(30) == 11
    assert f"--listen_addr {three[0].address}" in last_error(refused.err)
    ranks = start_ranks(rest, "--master_addr", forwarder.address, "--listen_addr", "0.0.0.0")
    assert codes(*ranks) == [0, 0], ranks[1].err
