"""A network that is cut, and heals before or after a lost rank's seat was given away; and rank 0 on another host."""

from __future__ import annotations

import time
from pathlib import Path

from tests.conftest import LONGER, SHORT, RankProcess
from tests.hosts.conftest import Hosts, SshInto
from tests.hosts.hosts import Host
from tests.hosts.test_ssh import command

PEER_TIMEOUT = 2
# Nobody trains while a rank is missing; the old rank has 2,000 steps to find out that its seat was given away.
EPOCHS = 10
KEPT = (*LONGER, EPOCHS, "--on_loss", "wait", "--peer_timeout", PEER_TIMEOUT, "--hold_every", 1)
FEW = ("--epochs", 3)


def start_ranks(three: list[Host], *options: object) -> list[RankProcess]:
    ranks = [host.start_rank(rank, 3, *KEPT, *options) for rank, host in enumerate(three)]
    ranks[0].wait_for("[rank 0] step 100/")
    return ranks


def test_a_cable_that_heals_before_the_seat_is_given_away_costs_time_only(hosts: Hosts) -> None:
    three = hosts(3)
    ranks = start_ranks(three, *FEW)
    three[2].disconnect()
    ranks[0].wait_for("rank 2 (hostC, pid ")
    ranks[0].wait_for("has been silent for ")
    ranks[2].wait_for("; this rank keeps its state, and looks for rank 0 for 1800 s")
    three[2].reconnect()
    ranks[0].wait_for("rank 2 is back, on hostC: all 3 go on after step ")
    assert [rank.wait() for rank in ranks] == [0, 0, 0]


def test_a_cable_that_heals_after_the_seat_was_given_away_lets_the_old_rank_leave(hosts: Hosts) -> None:
    three = hosts(3)
    ranks = start_ranks(three)
    three[2].disconnect()
    ranks[0].wait_for("Its seat is kept; state of step ")
    newcomer = three[1].start_rank(2, 3, *KEPT)
    ranks[0].wait_for("rank 2 is back, on hostB: all 3 go on after step ")
    three[2].reconnect()
    assert ranks[2].wait(60) == 13, ranks[2].err
    assert "error[rank-taken]: rank 2 is taken by hostB (pid " in ranks[2].err
    assert "the run goes on without this process" in ranks[2].err
    assert [rank.wait() for rank in (*ranks[:2], newcomer)] == [0, 0, 0]


def test_over_ssh_a_worker_on_another_host_is_started_again_by_itself(
    ssh_into: SshInto, small_data: Path, tmp_path: Path
) -> None:
    reached = ssh_into(2)
    options = ["--on_loss", "wait", "--run_dir", tmp_path / "run"]
    training = ["--", *SHORT, "--data_dir", small_data, "--epochs", 20]
    run = reached.hosts[0].start(*command(reached, "a:1,b:1", *options, *training))
    run.wait_for("[rank 0] step 100/")
    reached.hosts[1].kill("ddp_manual/worker")
    run.wait_for("is gone: SIGKILL. It is started again; state of step ")
    run.wait_for("rank 1 is back, on hostB: all 2 go on after step ")
    assert run.wait(60) == 0, run.err


def test_rank_0_is_found_at_the_standby_address_when_its_host_is_gone(hosts: Hosts) -> None:
    three = hosts(3)
    ranks = start_ranks(three, *FEW, "--standby_addr", three[1].address)
    three[0].disconnect()
    ranks[0].process.send_signal(9)
    for rank in ranks[1:]:
        rank.wait_for("this rank keeps its state, and looks for rank 0 for 1800 s")
    time.sleep(0.5)
    newcomer = three[1].start_rank(0, 3, *KEPT, *FEW, "--master_addr", three[1].address)
    ranks[1].wait_for("rank 0 is back, on hostB: all 3 go on after step ")
    assert [rank.wait() for rank in (newcomer, *ranks[1:])] == [0, 0, 0]
