"""Faults between hosts, provoked for real: rank 0's address, and what lies between the hosts. See ``record``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.clock import all_started, said
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import start_ranks
from tests.world.test_rendezvous import last_error

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


# -- 3: rank 0's name -----------------------------------------------------------------------------------------------


def test_a_name_that_one_host_cannot_resolve_is_named_at_once_and_ends_its_rank_when_the_time_is_up(
    hosts: Hosts,
) -> None:
    two = hosts(2)
    rank_0 = two[0].start_rank(0, 2)
    lost = two[1].start_rank(1, 2, "--master_addr", "no.such.host.invalid", "--join_timeout", 5)
    seconds = said(lost, "rank 0's address 'no.such.host.invalid' has no IP address yet (looking") - lost.started
    lost.wait_for("error[master-unresolvable]: rank 0's address 'no.such.host.invalid' has no")
    assert "looking it up on hostB gave: " in last_error(lost.err)
    right = two[1].start_rank(1, 2)
    codes = [process.wait() for process in (rank_0, right, lost)]
    assert codes == [0, 0, 11], rank_0.err
    named = "the name, and what looking it up gave, on which host"
    record("no such name", "master-unresolvable", named, seconds=seconds, within=2, codes=codes, row=3)


def test_a_name_that_gets_its_address_later_is_waited_for(hosts: Hosts) -> None:
    two = hosts(2)
    two[0].resolve("job-0.svc", two[0].address)
    ranks = start_ranks(two, "--master_addr", "job-0.svc")
    seconds = said(ranks[1], "rank 0's address 'job-0.svc' has no IP address yet") - ranks[1].started
    two[1].resolve("job-0.svc", two[0].address)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], ranks[1].err
    fault, named = "rank 0's name gets its address after the others have started", "the name, and that it is waited for"
    record(fault, "(joins)", named, seconds=seconds, within=2, codes=codes, row=3)


def test_a_name_that_gets_another_address_is_looked_up_again(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    two[1].resolve("job-0.svc", two[0].network.silent)
    rank_1 = two[1].start_rank(1, 2, "--master_addr", "job-0.svc")
    rank_1.wait_for(f"no answer from job-0.svc:{port} (job-0.svc is {two[0].network.silent})")
    for host in two:
        host.resolve("job-0.svc", two[0].address)
    rank_0 = two[0].start_rank(0, 2, "--master_addr", "job-0.svc")
    assert [rank_0.wait(), rank_1.wait()] == [0, 0], rank_1.err


def test_all_addresses_of_a_name_are_shown_and_the_one_that_answers_is_used(hosts: Hosts) -> None:
    two = hosts(2)
    for host in two:
        host.resolve("rank0.example", two[0].network.silent, two[0].address)
    ranks = start_ranks(two, "--master_addr", "rank0.example")
    seconds = max(said(rank, "rank 0's address rank0.example is ") - rank.started for rank in ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], ranks[1].err
    for rank in ranks:
        shown = re.search("rank 0's address rank0.example is (.*)", rank.err)
        assert shown and set(shown[1].split(", ")) == {two[0].network.silent, two[0].address}
    fault, named = "a name with two addresses, one dead", "both addresses"
    record(fault, "(joins)", named, seconds=seconds, within=2, codes=codes, row=3)


def test_rank_0s_own_host_name_works_though_it_is_a_loopback_address_there(hosts: Hosts) -> None:
    two = hosts(2)
    ranks = start_ranks(two, "--master_addr", "hostA")
    seconds = max(said(rank, "process group ready") for rank in ranks) - all_started(ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], ranks[1].err
    line = f"rank 0's address hostA is {two[0].address}, 127.0.1.1 ({two[0].address} first: other hosts cannot reach "
    assert f"{line}127.0.1.1)\n" in ranks[0].err
    assert f"rank 0's address hostA is {two[0].address}\n" in ranks[1].err
    fault, named = "rank 0's host name is 127.0.1.1 on its own host", "both addresses, and the one used"
    record(fault, "(joins)", named, seconds=seconds, within=30, codes=codes, row=3)


def test_of_a_name_with_a_loopback_and_a_real_address_the_real_one_is_taken(hosts: Hosts) -> None:
    two = hosts(2)
    two[0].resolve("hostA", "127.0.1.1", two[0].address)  # as of Debian and the list of a cluster
    ranks = start_ranks(two, "--master_addr", "hostA")
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], ranks[1].err
    assert f"listening at {two[0].address}:" in ranks[0].err
    assert f"({two[0].address} first: other hosts cannot reach 127.0.1.1)\n" in ranks[0].err


def test_a_host_name_of_digits_alone_is_not_taken_for_an_address(hosts: Hosts) -> None:
    two = hosts(2)
    for host in two:
        host.resolve("26727", two[0].address)
    ranks = start_ranks(two, "--master_addr", "26727")
    what = "error[master-unresolvable]: rank 0's address '26727' is all digits, and is read as the IP address "
    seconds = max(said(rank, f"{what}0.0.104.103\n") - rank.started for rank in ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [11, 11]
    assert "26727.example.org" in last_error(ranks[1].err)
    fault, named = "a host name of digits alone", "the name, and the address it is read as"
    record(fault, "master-unresolvable", named, seconds=seconds, within=2, codes=codes, row=27)


def test_an_address_that_nobody_has_gives_one_line_every_10_s_though_its_answers_differ(hosts: Hosts) -> None:
    two = hosts(2)
    nobody = two[0].address.rpartition(".")[0] + ".99"  # of this network: at first nothing comes back, then "no route"
    rank_1 = two[1].start_rank(1, 2, "--master_addr", nobody, "--join_timeout", 12)
    assert rank_1.wait() == 11
    lines = re.findall(r"no answer from .*\((\d+) s of 12 s\)", rank_1.err)
    assert 1 <= len(lines) <= 2, rank_1.err
    assert "may not be its address; or open TCP port " in rank_1.err


# -- 8: an address that is not rank 0's -----------------------------------------------------------------------------


def test_localhost_is_refused_at_once_where_a_launcher_tells_of_several_hosts(hosts: Hosts) -> None:
    two = hosts(2)
    ranks = start_ranks(two, "--master_addr", "localhost", SLURM_STEP_NUM_NODES="2")
    seconds = max(said(rank, "error[loopback-master]: rank 0's address localhost ") - rank.started for rank in ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [11, 11]
    for host, rank in zip(two, ranks, strict=True):
        assert "SLURM_STEP_NUM_NODES=2" in rank.err
        assert f"if that is this one: --master_addr {host.address}" in rank.err
    fault, named = "localhost, in a Slurm step of two hosts", "the variable, and the host's real address"
    record(fault, "loopback-master", named, seconds=seconds, within=2, codes=codes, row=8)


def test_localhost_on_a_host_of_its_own_names_the_host_that_it_is(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    ranks = start_ranks(two, "--master_addr", "localhost", "--join_timeout", 4)
    line = f"nothing listens at localhost:{port} (localhost is ::1, 127.0.0.1), which is hostB itself: is rank 0 start"
    seconds = said(ranks[1], line) - ranks[1].started
    ranks[0].wait_for(
        "(only hostA itself reaches ::1: for ranks on other hosts, start rank 0 again with --master_addr "
        f"{two[0].address}"
    )
    codes = [rank.wait(20) for rank in ranks]
    assert codes == [10, 11]
    assert last_error(ranks[0].err).startswith("error[rank-missing]: 1 of 2 ranks never joined within 4 s: rank 1\n")
    assert "(only hostA itself reaches ::1: " in last_error(ranks[0].err)
    what = last_error(ranks[1].err).splitlines()[0]
    assert what.startswith("error[master-refused]: nothing has listened for 4 s at rank 0's address localhost:")
    assert what.endswith(" (localhost is ::1, 127.0.0.1), which is hostB itself")
    fault, named = (
        "localhost, on each of two hosts",
        "the host that localhost is, on both",
    )
    record(fault, "master-refused, rank-missing", named, seconds=seconds, within=2, codes=codes, row=8)


def test_rank_0_on_a_host_that_does_not_have_its_address_is_told_which_has(hosts: Hosts) -> None:
    two = hosts(2)
    rank_1 = two[1].start_rank(1, 2)
    rank_1.wait_for("is rank 0 started?")
    astray = two[1].start_rank(0, 2)
    what = f"rank 0 runs on hostB, but {two[0].address} is not an address of this host"
    seconds = said(astray, f"error[address-not-local]: {what}\n") - astray.started
    assert astray.wait() == 11
    assert two[1].address in last_error(astray.err)
    assert f"start rank 0 on the host that has {two[0].address}" in last_error(astray.err)
    assert rank_1.process.poll() is None
    rank_0 = two[0].start_rank(0, 2)
    codes = [process.wait() for process in (rank_0, rank_1, astray)]
    assert codes == [0, 0, 11], rank_0.err
    fault, named = "rank 0 on another host than its address", "that host, its addresses, the address asked for"
    record(fault, "address-not-local", named, seconds=seconds, within=2, codes=codes, row=8)


def test_a_rank_that_comes_to_a_loopback_address_through_a_tunnel_is_refused(
    hosts: Hosts, port: int, tmp_path: Path
) -> None:
    two = hosts(2)
    rank_0 = two[0].start_rank(0, 2, "--master_addr", "127.0.0.1")
    rank_0.wait_for("listening at ")
    tunnel = tmp_path / "tunnel"
    two[0].start(sys.executable, "-c", FORWARD, tunnel, port).wait_for("forwarding")
    two[1].start(sys.executable, "-c", FORWARD, port, tunnel).wait_for("forwarding")
    through = two[1].start_rank(1, 2, "--master_addr", "127.0.0.1")
    what = "rank 0 listens on 127.0.0.1, which is not for other hosts, and rank 1 is on hostB"
    seconds = said(through, f"error[loopback-master]: {what}\n") - through.started
    assert through.wait() == 11
    assert "came through a tunnel to hostA" in last_error(through.err)
    rank_0.wait_for(f"rank 1 (hostB, pid {through.worker}) was refused: loopback-master")
    right = two[0].start_rank(1, 2, "--master_addr", "127.0.0.1")
    codes = [process.wait() for process in (rank_0, right, through)]
    assert codes == [0, 0, 11], rank_0.err
    fault, named = (
        "a tunnel from another host to a loopback address",
        "both hosts, and rank 0's address",
    )
    record(fault, "loopback-master", named, seconds=seconds, within=2, codes=codes, row=8)


def test_rank_0_may_listen_behind_a_port_forward_of_another_host(hosts: Hosts, port: int, tmp_path: Path) -> None:
    three = hosts(3)
    forwarder, rest = three[2], [*three[:2]]
    tunnel = tmp_path / "forward"
    three[0].start(sys.executable, "-c", FORWARD, tunnel, f"{three[0].address}:{port}").wait_for("forwarding")
    forwarder.start(sys.executable, "-c", FORWARD, f"{forwarder.address}:{port}", tunnel).wait_for("forwarding")
    refused = three[0].start_rank(0, 2, "--master_addr", forwarder.address)
    assert refused.wait() == 11
    assert f"--listen_addr {three[0].address}" in last_error(refused.err)
    options = ["--master_addr", forwarder.address, "--listen_addr", three[0].address]
    ranks = start_ranks(rest, *options)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[1].err
    assert f"listening at {three[0].address}:{port}" in ranks[0].err


def test_rank_0_may_listen_at_all_its_addresses(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    ranks = start_ranks(two, "--listen_addr", "0.0.0.0")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[1].err
    assert f"listening at {two[0].address}:{port}" in ranks[0].err


# -- 9: the hosts cannot connect to each other ----------------------------------------------------------------------


@pytest.mark.parametrize("closed", [1, 2])
def test_where_only_rank_0s_port_is_open_every_rank_names_the_pairs_and_leaves(
    hosts: Hosts, port: int, closed: int
) -> None:
    two = hosts(2)
    for host in two[:closed]:
        host.only_port_open(port)
    ranks = start_ranks(two)
    pairs = ("hostB -> hostA", "hostA -> hostB, hostB -> hostA")[closed - 1]
    what = f"error[peer-unreachable]: {closed} of the connections between hosts cannot be made: {pairs}\n"
    seconds = max(said(rank, what) for rank in ranks) - all_started(ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [18, 18]
    for rank in ranks:
        assert f"from {two[1].address} (rank 1 on hostB) to {two[0].address}:" in last_error(rank.err)
        assert last_error(rank.err).count(" (rank 0 on hostA): no answer within 3 s: dropped") == 1
    fault = f"only rank 0's port open, on {('its host', 'each host')[closed - 1]}"
    named = f"{('the one failing pair', 'both pairs')[closed - 1]}, ranks, addresses, on every rank"
    record(fault, "peer-unreachable", named, seconds=seconds, within=10, codes=codes, row=9)


@pytest.mark.parametrize(
    ("verdict", "answer"), [("drop", "no answer within 3 s: dropped"), ("reject", "connection refused")]
)
def test_one_direction_closed_between_two_of_three_hosts_is_the_one_that_is_named(
    hosts: Hosts, verdict: str, answer: str, tmp_path: Path
) -> None:
    three = hosts(3)
    getattr(three[2], f"{verdict}_from")(three[1])
    ranks = start_ranks(three)
    what = "error[peer-unreachable]: 1 of the connections between hosts cannot be made: hostB -> hostC\n"
    seconds = max(said(rank, what) for rank in ranks) - all_started(ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [18, 18, 18]
    _, second, third = (host.address for host in three)
    for rank in ranks:
        error = last_error(rank.err)
        why = re.search(r"  why:  (.*)\n  next: (.*)\n", error)
        assert why, error
        assert re.fullmatch(
            rf"from {second} \(rank 1 on hostB\) to {third}:\d+ \(rank 2 on hostC\): {answer}", why[1]
        ), error
        assert why[2].startswith(f"open all TCP ports from {second} to {third}, such as on hostC: ")
    fault = f"connections from the 2nd to the 3rd of three hosts {verdict}{'p' * (verdict == 'drop')}ed"
    named = "that pair and direction alone, and the answer, on every rank"
    record(fault, "peer-unreachable", named, seconds=seconds, within=10, codes=codes, row=9)
    if verdict == "reject":
        three[2].open_all()
        again = start_ranks(three, "--run_dir", tmp_path / "again")
        assert [rank.wait() for rank in again] == [0, 0, 0], again[0].err


def test_a_path_that_loses_large_packets_is_told_from_a_closed_port(hosts: Hosts) -> None:
    three = hosts(3)
    three[1].nft(f"add rule inet filter output ip daddr {three[2].address} meta length > 1400 drop")
    ranks = start_ranks(three)
    codes = [rank.wait() for rank in ranks]
    assert codes == [18] * 3
    for rank in ranks:
        error = last_error(rank.err)
        assert "connected, but only 0 of 16384 bytes came through: large packets are lost" in error
        assert "next: compare the MTU of the interfaces of both hosts" in error
        assert "open all TCP ports" not in error


def test_a_rank_whose_large_packets_do_not_reach_rank_0_says_so(hosts: Hosts) -> None:
    two = hosts(2)
    two[1].nft("add rule inet filter output meta length > 1400 drop")
    rank_0, rank_1 = start_ranks(two, "--join_timeout", 12)
    rank_1.wait_for("and what this rank sends does not arrive: large packets are lost")
    assert [rank_0.wait(), rank_1.wait()] == [10, 11]
    assert "is ending" not in rank_1.err
    error = last_error(rank_1.err)
    assert error.startswith("error[master-unreachable]: rank 0 at ")
    assert "next: compare the MTU of the interfaces of both hosts" in error
