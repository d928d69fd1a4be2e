"""What lies between hosts, with a real firewall and real cables: closed ports, lost packets, cuts. Nothing closes a
connection here, so the ranks can only notice the silence; they name the hosts on the other side of it."""

from __future__ import annotations

import re
import time

import pytest

from tests.conftest import RankProcess, last_error, wait_until
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host
from tests.hosts.test_names import codes, start_ranks

PEER_TIMEOUT = 3
# Seconds until all have left, where torch itself waits for 30 minutes.
WITHIN = PEER_TIMEOUT + 20
WORKS = ("sleep", 60)


@pytest.mark.parametrize(
    ("closes", "said", "error"),
    [
        ("drop_from", "no answer from {}: dropped, or no route", "error[master-unreachable]: no answer for "),
        (
            "reject_from",
            "nothing listens at {}: is rank 0 started?",
            "error[master-refused]: nothing has listened for ",
        ),
    ],
)
def test_a_rank_whose_packets_to_rank_0_are_dropped_or_rejected_says_which(
    hosts: Hosts, port: int, closes: str, said: str, error: str
) -> None:
    two = hosts(2)
    getattr(two[0], closes)(two[1], port)
    rank_0 = two[0].start_program(0, 2)
    rank_0.wait_for("listening at ")
    lost = two[1].start_program(1, 2, "--join_timeout", 4)
    # A connection is given 2 s; the system's own timeout for one is two minutes.
    assert lost.wait_for(said.format(f"{two[0].address}:{port}")) < 10
    assert lost.wait(20) == 11
    assert last_error(lost.err).startswith(error)
    two[0].open_all()
    assert codes(rank_0, two[1].start_program(1, 2)) == [0, 0], rank_0.err


def test_one_direction_closed_between_two_of_three_hosts_is_the_one_that_is_named(hosts: Hosts) -> None:
    three = hosts(3)
    three[2].reject_from(three[1])
    ranks = start_ranks(three)
    assert codes(*ranks) == [18, 18, 18]
    _, second, third = (host.address for host in three)
    for rank in ranks:
        error = last_error(rank.err)
        what = "error[peer-unreachable]: 1 of the connections between hosts cannot be made: hostB -> hostC\n"
        assert error.startswith(what)
        why = rf"  why:  from {second} \(rank 1 on hostB\) to {third}:\d+ \(rank 2 on hostC\): connection refused\n"
        next = re.escape(f"  next: open all TCP ports from {second} to {third}, such as on hostC:\n")
        assert re.search(why + next, error), error


def test_where_only_rank_0s_port_is_open_every_rank_names_both_directions(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    for host in two:
        host.only_port_open(port)
    ranks = start_ranks(two)
    assert codes(*ranks) == [18, 18]
    for rank in ranks:
        error = last_error(rank.err)
        pairs = "2 of the connections between hosts cannot be made: hostA -> hostB, hostB -> hostA\n"
        assert error.startswith(f"error[peer-unreachable]: {pairs}")
        assert error.count(" (rank 0 on hostA): no answer within 3 s: dropped") == 1


def test_a_path_that_loses_large_packets_is_told_from_a_closed_port(hosts: Hosts) -> None:
    three = hosts(3)
    three[1].nft(f"add rule inet filter output ip daddr {three[2].address} meta length > 1400 drop")
    ranks = start_ranks(three)
    assert codes(*ranks) == [18] * 3
    for rank in ranks:
        error = last_error(rank.err)
        assert "connected, but only 0 of 16384 bytes came through: large packets are lost" in error
        assert "next: compare the MTU of the interfaces of both hosts" in error
        assert "open all TCP ports" not in error
    three[1].open_all()
    three[1].nft("add rule inet filter output meta length > 1400 drop")
    # Rank 1, which may begin later, is to leave first.
    rank_0, rank_1 = (host.start_rank(rank, 2, "--join_timeout", 24 - 12 * rank) for rank, host in enumerate(three[:2]))
    rank_1.wait_for("and what this rank sends does not arrive: large packets are lost")
    assert codes(rank_0, rank_1) == [10, 11]
    assert "next: compare the MTU of the interfaces of both hosts" in last_error(rank_1.err)


def silent(ranks: list[RankProcess], number: int) -> str:
    who = re.escape(f"rank {number} (host{'ABC'[number]}, pid {ranks[number].worker})")
    seconds = f"[{PEER_TIMEOUT + 1}{PEER_TIMEOUT + 2}]"  # the look at it may come a second late
    return rf"error\[{'peer' if number else 'master'}-lost\]: {who} has been silent for {seconds}(\.\d)? s\n"


def test_where_an_interface_goes_down_both_sides_end_and_name_the_other(hosts: Hosts) -> None:
    three = hosts(3)
    options = ("--peer_timeout", PEER_TIMEOUT)
    ranks = [host.start_program(rank, 3, *options, program=WORKS) for rank, host in enumerate(three)]
    all_started(ranks)
    three[2].interface_down()
    since = time.monotonic()
    assert codes(*ranks) == [14, 14, 14], ranks[0].err
    assert time.monotonic() - since < WITHIN
    for number, rank in enumerate(ranks):
        assert re.match(silent(ranks, 0 if number == 2 else 2), last_error(rank.err)), rank.err


def test_a_cut_between_two_hosts_is_named_while_all_wait_in_a_collective(hosts: Hosts) -> None:
    """Each of the two still reaches rank 0, and gloo would wait for 30 minutes."""
    three = hosts(3)
    ranks = [host.start_rank(rank, 3, "--epochs", 1000, "--stall_timeout", 5) for rank, host in enumerate(three)]
    for rank in ranks:
        rank.wait_for("process group ready")
    three[1].nft(f"add rule inet filter input ip saddr {three[2].address} drop")
    assert codes(*ranks) == [14, 14, 14], ranks[0].err
    for rank in ranks:
        error = last_error(rank.err)
        assert re.match(
            r"error\[peer-stalled\]: all ranks have waited in a collective for [\d.]+ s: "
            r"2 of the connections between hosts cannot be made: hostB -> hostC, hostC -> hostB\n",
            error,
        )
        assert "look at cables, switches and firewalls between these hosts" in error


def start_kept(on: Host, rank: int, *options: object) -> RankProcess:
    """Start one of three ranks whose seats are kept, and whose programs start again after a loss."""
    return on.start_program(rank, 3, "--on_loss", "wait", "--peer_timeout", 2, *options, program=("sleep", 15))


def all_started(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.wait_for("starting sleep as rank")


def test_a_cut_that_heals_costs_time_only_and_a_rank_whose_seat_was_given_away_leaves(hosts: Hosts) -> None:
    three = hosts(3)
    ranks = [start_kept(host, rank) for rank, host in enumerate(three)]
    all_started(ranks)
    three[2].disconnect()
    ranks[0].wait_for("has been silent for ")
    ranks[2].wait_for("looks for rank 0 for 1800 s")
    three[2].reconnect()
    ranks[0].wait_for("rank 2 is back, on hostC: all 3 start again; ")
    kept = ranks[0].err.count("Its seat is kept; ")
    three[2].disconnect()
    wait_until(lambda: ranks[2].err.count("looks for rank 0 for 1800 s") == 2)
    wait_until(lambda: ranks[0].err.count("Its seat is kept; ") > kept)
    newcomer = start_kept(three[1], 2)
    ranks[0].wait_for("rank 2 is back, on hostB: all 3 start again; ")
    three[2].reconnect()
    assert ranks[2].wait(60) == 13, ranks[2].err
    assert "error[rank-taken]: rank 2 is taken by hostB (pid " in ranks[2].err
    assert codes(*ranks[:2], newcomer) == [0, 0, 0], ranks[0].err


def test_rank_0_is_found_at_the_standby_address_when_its_host_is_gone(hosts: Hosts) -> None:
    three = hosts(3)
    ranks = [start_kept(host, rank, "--standby_addr", three[1].address) for rank, host in enumerate(three)]
    all_started(ranks)
    three[0].disconnect()
    ranks[0].kill()
    for rank in ranks[1:]:
        rank.wait_for("looks for rank 0 for 1800 s")
    newcomer = start_kept(three[1], 0, "--master_addr", three[1].address)
    ranks[1].wait_for("rank 0 is back, on hostB: all 3 start again; ")
    assert codes(newcomer, *ranks[1:]) == [0, 0, 0]
