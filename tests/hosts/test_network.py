"""What lies between hosts, with a real firewall and real cables: closed ports, lost packets, cuts. Nothing closes a
connection here, so the ranks can only notice the silence; they name the hosts on the other side of it."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.conftest import RankProcess, last_error, wait_until
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host
from tests.hosts.test_names import codes, start_ranks
from tests.real_scripts import FOLDER

PEER_TIMEOUT = 3
# Seconds until all have left, where torch itself waits for 30 minutes.
WITHIN = PEER_TIMEOUT + 20
WORKS = ("sleep", 60)
LARGE = ("true", *(f"--option{number}" for number in range(200)))


def test_a_rank_whose_packets_to_rank_0_are_dropped_or_rejected_says_which(hosts: Hosts, port: int) -> None:
    three = hosts(3)
    three[0].drop_from(three[1], port)
    three[0].reject_from(three[2], port)
    three[0].start_program(0, 3).wait_for("listening at ")
    dropped, rejected = (three[rank].start_program(rank, 3, "--join_timeout", 4) for rank in (1, 2))
    # A connection is given 2 s; the system's own timeout for one is two minutes.
    assert dropped.wait_for(f"no answer from {three[0].address}:{port}: dropped, or no route") < 10
    assert rejected.wait_for(f"nothing listens at {three[0].address}:{port}: is rank 0 started?") < 10
    assert [dropped.wait(20), rejected.wait(20)] == [11, 11]
    assert last_error(dropped.err).startswith("error[master-unreachable]: no answer for ")
    assert last_error(rejected.err).startswith("error[master-refused]: nothing has listened for ")


def test_directions_closed_between_three_hosts_are_named_with_what_became_of_the_packets(hosts: Hosts) -> None:
    three = hosts(3)
    three[2].drop_from(three[0])
    three[2].reject_from(three[1])
    ranks = start_ranks(three)
    assert codes(*ranks) == [18, 18, 18]
    first, second, third = (host.address for host in three)
    for rank in ranks:
        error = last_error(rank.err)
        what = "2 of the connections between hosts cannot be made: hostA -> hostC, hostB -> hostC\n"
        assert error.startswith(f"error[peer-unreachable]: {what}")
        to = rf"to {third}:\d+ \(rank 2 on hostC\)"
        assert re.search(rf"from {first} \(rank 0 on hostA\) {to}: no answer within 3 s: dropped", error), error
        assert re.search(rf"from {second} \(rank 1 on hostB\) {to}: connection refused\n", error), error
        assert f"  next: open all TCP ports from {first} to {third}, such as on hostC:\n" in error


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
    # Rank 1 is to leave first. What it says of itself is larger than a packet.
    rank_0 = three[0].start_program(0, 2, "--join_timeout", 14, program=LARGE)
    rank_0.wait_for("listening at ")
    rank_1 = three[1].start_program(1, 2, "--join_timeout", 8, program=LARGE)
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
    ranks = [host.start_script(rank, 3, "--stall_timeout", 5, FOLDER / "adding.py") for rank, host in enumerate(three)]
    for rank, process in enumerate(ranks):
        process.wait_for(f"rank {rank} of 3 adds")
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


def start_kept(on: Host, rank: int, done: Path, *options: object) -> RankProcess:
    """Start one of three ranks whose seats are kept, and whose programs start again after a loss, until ``done``."""
    program = ("sh", "-c", f"until [ -e {done} ]; do sleep 0.1; done")
    return on.start_program(rank, 3, "--on_loss", "wait", "--peer_timeout", 2, *options, program=program)


def all_started(ranks: list[RankProcess]) -> None:
    for rank, process in enumerate(ranks):
        process.wait_for(f" as rank {rank} of 3 on ")


def test_a_cut_that_heals_costs_time_only_and_a_rank_whose_seat_was_given_away_leaves(
    hosts: Hosts, tmp_path: Path
) -> None:
    three, done = hosts(3), tmp_path / "done"
    ranks = [start_kept(host, rank, done) for rank, host in enumerate(three)]
    all_started(ranks)
    three[2].disconnect()
    ranks[0].wait_for("has been silent for ")
    ranks[2].wait_for("looks for rank 0 for 1800 s")
    three[2].reconnect()
    ranks[0].wait_for("rank 2 is back, on hostC: all 3 start again; ")
    kept = ranks[0].err.count("Its seat is kept; ")
    three[2].disconnect()
    wait_until(lambda: len(re.findall(r"looks for rank 0 for 1[78]\d\d s", ranks[2].err)) == 2)
    wait_until(lambda: ranks[0].err.count("Its seat is kept; ") > kept)
    newcomer = start_kept(three[1], 2, done)
    ranks[0].wait_for("rank 2 is back, on hostB: all 3 start again; ")
    three[2].reconnect()
    assert ranks[2].wait(60) == 13, ranks[2].err
    assert "error[rank-taken]: rank 2 is taken by hostB (pid " in ranks[2].err
    done.touch()
    assert codes(*ranks[:2], newcomer) == [0, 0, 0], ranks[0].err


def test_rank_0_is_found_at_the_standby_address_when_its_host_is_gone(hosts: Hosts, tmp_path: Path) -> None:
    three, done = hosts(3), tmp_path / "done"
    ranks = [start_kept(host, rank, done, "--standby_addr", three[1].address) for rank, host in enumerate(three)]
    all_started(ranks)
    three[0].disconnect()
    ranks[0].kill()
    for rank in ranks[1:]:
        rank.wait_for("looks for rank 0 for 1800 s")
    newcomer = start_kept(three[1], 0, done, "--master_addr", three[1].address)
    ranks[1].wait_for("rank 0 is back, on hostB: all 3 start again; ")
    done.touch()
    assert codes(newcomer, *ranks[1:]) == [0, 0, 0]
