"""A network that is cut while three hosts train: every rank ends, on both sides, and names the hosts on the other one.

Nothing closes a connection here, so the ranks can only notice the silence.
"""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.conftest import RankProcess
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host
from tests.world.deaths import PEER_TIMEOUT, STALL_TIMEOUT, TRAINING, WHERE_SILENT, WHERE_STUCK, ended, last_lines

CUTS = int(os.environ.get("DDP_MANUAL_SOAK_CUTS", "1"))
NAMES = ("hostA", "hostB", "hostC")
# Seconds. What a worker does is also 0.25 s old when its agent tells it.
TWO_HEARTBEATS = 1.0
SILENT = rf"has been silent for {PEER_TIMEOUT + 1} s\n"


def start_ranks(three: list[Host], *options: object) -> list[RankProcess]:
    """Start one rank per host, and wait until they train and have heard of a step of each other."""
    ranks = [host.start_rank(rank, 3, *TRAINING, *options) for rank, host in enumerate(three)]
    ranks[0].wait_for("[rank 0] step 100/")
    time.sleep(TWO_HEARTBEATS)
    return ranks


def held_to(expected: dict[int, str], ranks: list[RankProcess], since: float, within: float) -> float:
    """Assert that each rank's error matches its pattern, in time; return the seconds that the slowest took."""
    moments = ended(dict(enumerate(ranks)), within + 20)
    for number, rank in enumerate(ranks):
        assert number in moments, f"rank {number} still runs; it said:\n{rank.err}"
        error = last_lines(rank.err)
        assert error is not None and re.match(expected[number], error, re.DOTALL), rank.err
    assert [rank.process.returncode for rank in ranks] == [14, 14, 14]
    seconds = max(moments.values()) - since
    assert seconds <= within, f"the last rank was gone after {seconds:.1f} s"
    return seconds


def both_sides(ranks: list[RankProcess], alone: int) -> dict[int, str]:
    """What each rank has to say where one host is cut off from the two others."""
    who = [re.escape(f"rank {rank} ({NAMES[rank]}, pid {process.worker})") for rank, process in enumerate(ranks)]
    seen = r".*step [1-9]\d* of epoch [1-9]"
    if alone == 0:
        hears_nobody = rf"error\[peer-lost\]: (?:{who[1]}|{who[2]}) {SILENT}{seen}.*as silent: rank [12] \(host[BC], "
        lost = rf"error\[master-lost\]: {who[0]} {SILENT}{seen}"
        return {0: hears_nobody, 1: lost, 2: lost}
    lost = rf"error\[peer-lost\]: {who[alone]} {SILENT}{seen}"
    return dict.fromkeys(range(3), lost) | {alone: rf"error\[master-lost\]: {who[0]} {SILENT}{seen}"}


@pytest.mark.parametrize("alone", [0, 2])
def test_where_an_interface_goes_down_both_sides_end_and_name_the_other(hosts: Hosts, alone: int) -> None:
    three = hosts(3)
    ranks = start_ranks(three)
    since = time.monotonic()
    three[alone].interface_down()
    seconds = held_to(both_sides(ranks, alone), ranks, since, WHERE_SILENT)
    fault = f"the interface of rank {alone}'s host of 3 goes down, --peer_timeout {PEER_TIMEOUT}"
    named = "on each side rank, host and pid of the other, last step, for how long it has been silent"
    record(fault, "peer-lost, master-lost", named, seconds=seconds, within=WHERE_SILENT, codes=[14, 14, 14], row=18)


def test_a_cut_between_two_followers_is_a_stall_in_which_no_rank_is_behind(hosts: Hosts) -> None:
    """Both still reach rank 0, so all of them live; only what they have to tell each other does not arrive."""
    three = hosts(3)
    ranks = start_ranks(three, "--stall_timeout", STALL_TIMEOUT)
    since = time.monotonic()
    three[2].cut_from(three[1])
    places = r".*rank 0 \(hostA, pid \d+\): \w+, at step \d+.*rank 1 \(hostB, .*rank 2 \(hostC, .*may be cut"
    what = rf"error\[peer-stalled\]: all ranks have waited in a collective for \d s, and none is behind\n{places}"
    seconds = held_to(dict.fromkeys(range(3), what), ranks, since, WHERE_STUCK)
    fault = f"a cut between the hosts of ranks 1 and 2 of 3, --stall_timeout {STALL_TIMEOUT}"
    named = "that all wait in the same collective; rank, host, pid, step and line of each"
    record(fault, "peer-stalled", named, seconds=seconds, within=WHERE_STUCK, codes=[14, 14, 14], row=19)


@pytest.mark.soak
@pytest.mark.timeout(60 + 30 * CUTS)
def test_cuts_at_random_moments(hosts: Hosts, tmp_path: Path) -> None:
    """The number of a cut is its seed, so every cut can be repeated."""
    for number in range(CUTS):
        order = random.Random(number)
        three = hosts(3)
        alone, pause = order.randrange(3), order.uniform(0, 3)
        way = order.choice(("interface_down", "disconnect", "cut_from"))
        ranks = start_ranks(three, "--run_dir", tmp_path / f"run{number}")
        time.sleep(pause)
        since = time.monotonic()
        getattr(three[alone], way)(*([host for host in three if host is not three[alone]] if way == "cut_from" else []))
        seconds = held_to(both_sides(ranks, alone), ranks, since, WHERE_SILENT)
        print(f"cut {number}: {way} of rank {alone} {pause:.2f} s after step 100: {seconds:.1f} s", flush=True)
