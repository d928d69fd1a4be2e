"""Faults of a host, and differences from one host to the next, provoked for real. See ``record``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.clock import all_started, said, with_site
from tests.conftest import DRAWN, REPOSITORY, RankProcess, source
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host, start_ranks
from tests.world.test_rendezvous import last_error


def start_below(limit: str, host: Host, world_size: int, **env: str) -> RankProcess:
    """Rank 0 in a shell that has called ``ulimit``."""
    command = host.network.rank_command(0, world_size, "--master_addr", host.address)
    return host.start("sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *command, **env)


# -- 14: code and versions ------------------------------------------------------------------------------------------


@pytest.fixture
def other_code(tmp_path: Path) -> Path:
    """A copy of the program with one more line in a training module."""
    copy = tmp_path / "copy"
    shutil.copytree(REPOSITORY / "ddp_manual", copy / "ddp_manual", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "run_multi_gpu_train.py", copy)
    with (copy / "ddp_manual/training/learning_rate.py").open("a") as file:
        file.write("# changed\n")
    return copy


def test_a_rank_with_other_code_is_told_which_part_differs(hosts: Hosts, other_code: Path, tmp_path: Path) -> None:
    two = hosts(2)
    rank_0 = two[0].start_rank(0, 2)
    rank_0.wait_for("listening at ")
    odd = two[1].start_rank(1, 2, cwd=other_code, **with_site(tmp_path / "odd", package=other_code))
    what = f"rank 1 (hostB, pid {odd.worker}) runs other code than rank 0: ddp_manual/training"
    seconds = said(odd, f"error[config-mismatch]: {what}\n") - odd.started
    assert odd.wait() == 12
    assert "ddp_manual/training: rank 0 (hostA) has digest " in last_error(odd.err)
    assert "--allow_mismatch" in last_error(odd.err)
    rank_0.wait_for(f"rank 1 (hostB, pid {odd.worker}) was refused: config-mismatch")
    right = two[1].start_rank(1, 2)
    codes = [process.wait() for process in (rank_0, right, odd)]
    assert codes == [0, 0, 12], rank_0.err
    fault, named = "one changed line in a training module", "the part of the package, both digests and hosts"
    record(fault, "config-mismatch", named, seconds=seconds, within=2, codes=codes, row=14)


def test_other_code_that_is_allowed_is_a_warning(hosts: Hosts, other_code: Path, tmp_path: Path) -> None:
    two = hosts(2)
    rank_0 = two[0].start_rank(0, 2, "--allow_mismatch")
    environment = with_site(tmp_path / "odd", package=other_code)
    odd = two[1].start_rank(1, 2, "--allow_mismatch", cwd=other_code, **environment)
    seconds = said(rank_0, "runs other code than rank 0: ddp_manual/training (allowed)\n") - all_started([rank_0, odd])
    codes = [rank_0.wait(), odd.wait()]
    assert codes == [0, 0], rank_0.err
    fault, named = "the same with --allow_mismatch", "the part of the package, on rank 0"
    record(fault, "(joins)", named, seconds=seconds, within=2, codes=codes, row=14)


def test_a_rank_with_another_torch_is_told_what_to_install(hosts: Hosts, tmp_path: Path) -> None:
    two = hosts(2)
    rank_0 = two[0].start_rank(0, 2)
    rank_0.wait_for("listening at ")
    # A second torch takes minutes to install. This one only says that it is installed.
    installed = tmp_path / "other" / "torch-2.9.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    odd = two[1].start_rank(1, 2, PYTHONPATH=f"{installed.parent}:{REPOSITORY}")
    what = f"rank 1 (hostB, pid {odd.worker}) has other versions than rank 0: torch"
    seconds = said(odd, f"error[version-mismatch]: {what}\n") - odd.started
    assert odd.wait() == 12
    assert "torch: rank 0 (hostA) has " in last_error(odd.err)
    assert "rank 1 has 2.9.1\n" in last_error(odd.err)
    assert "on hostB: pip install torch==" in last_error(odd.err)
    rank_0.wait_for(f"rank 1 (hostB, pid {odd.worker}) was refused: version-mismatch")
    right = two[1].start_rank(1, 2)
    codes = [process.wait() for process in (rank_0, right, odd)]
    assert codes == [0, 0, 12], rank_0.err
    fault, named = "another torch on one host", "both versions and hosts, what to install"
    record(fault, "version-mismatch", named, seconds=seconds, within=2, codes=codes, row=14)


# -- 24: data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_the_host_whose_data_differ_by_one_byte_is_named_on_every_rank(
    hosts: Hosts, small_data: Path, tmp_path: Path, count: int
) -> None:
    several = hosts(count)
    shutil.copytree(small_data, tmp_path / "other")
    other = source("synthetic", tmp_path / "other")
    test, cache = other.load("test"), other.cache("test")
    assert cache is not None
    test.images[0, 0, 14, 14] ^= 1
    next((tmp_path / "other").rglob("synthetic-test-*.cache")).unlink()
    cache.save(test)
    ranks = [
        host.start_rank(rank, count, "--data_dir", tmp_path / "other" if rank == 1 else small_data)
        for rank, host in enumerate(several)
    ]
    # From here on they read it.
    ready = said(ranks[0], "process group ready")
    what = "error[data-differs]: the data on hostB are not those of rank 0 on hostA: rank 1\n"
    seconds = max(said(rank, what) for rank in ranks) - ready
    codes = [rank.wait() for rank in ranks]
    assert codes == [16] * count
    for rank in ranks:
        assert f"test: rank 1 (hostB) has {DRAWN['test']} samples, digest " in last_error(rank.err)
        assert "train: " not in last_error(rank.err)
    fault = f"one byte of the test images changed on one of {count} hosts"
    named = "the host and its rank, part, counts and digests, on every rank"
    record(fault, "data-differs", named, seconds=seconds, within=10, codes=codes, row=24)


# -- 25: a name server that does not answer -------------------------------------------------------------------------


def test_a_name_server_that_does_not_answer_delays_nobody_for_5_s(hosts: Hosts, tmp_path: Path) -> None:
    seconds = {}
    for server in ("none", "silent"):
        two = hosts(2)
        if server == "silent":
            for host in two:
                host.resolver(host.network.silent)
        ranks = start_ranks(two, "--run_dir", tmp_path / server)
        seconds[server] = max(said(rank, "process group ready") for rank in ranks) - all_started(ranks)
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], ranks[0].err
    fault, named = "a dead name server for every host", f"({seconds['none']:.1f} s where look-ups fail at once)"
    record(fault, "(joins)", named, seconds=seconds["silent"], within=4, codes=codes, row=25)


# -- 26: limits of a host -------------------------------------------------------------------------------------------


def test_a_host_whose_clock_is_off_is_warned_about(hosts: Hosts, tmp_path: Path) -> None:
    """The clock is shifted inside the process: a time namespace leaves the time of day alone, and libfaketime makes
    sleeps of 10 ms fail."""
    two = hosts(2)
    shifted = with_site(tmp_path / "ahead", "real = time.time; time.time = lambda: real() + 120")
    ranks = [two[0].start_rank(0, 2), two[1].start_rank(1, 2, **shifted)]
    seconds = max(said(rank, "the clock of hostB is 120 s ahead of hostA's") for rank in ranks) - all_started(ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], ranks[0].err
    fault, named = "a clock that is 120 s ahead (shifted in the process)", "both hosts and by how much, on every rank"
    record(fault, "(joins)", named, seconds=seconds, within=2, codes=codes, row=26)


def test_rank_0_that_may_not_open_enough_files_says_how_many_it_needs(hosts: Hosts) -> None:
    (host,) = hosts(1)
    rank_0 = start_below("-n 256", host, 1000)
    what = "error[bad-option]: rank 0 on hostA may open 256 files, and a run of 1000 ranks needs 2100\n"
    seconds = said(rank_0, what) - rank_0.started
    codes = [rank_0.wait()]
    assert codes == [2]
    assert "raise it before rank 0 is started: ulimit -n 2100" in last_error(rank_0.err)
    fault, named = "ulimit -n 256 for rank 0 of 1000", "the limit, and what is needed"
    record(fault, "bad-option", named, seconds=seconds, within=2, codes=codes, row=26)


def test_a_soft_limit_of_open_files_is_raised_to_the_hard_one(hosts: Hosts) -> None:
    two = hosts(2)
    rank_0 = start_below("-S -n 64 && ulimit -H -n 4000", two[0], 2)
    seconds = said(rank_0, "listening at ") - rank_0.started
    limits = Path(f"/proc/{rank_0.process.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == ["4000", "4000"]
    codes = [process.wait() for process in (rank_0, two[1].start_rank(1, 2))]
    assert codes == [0, 0], rank_0.err
    fault, named = "ulimit -S -n 64 for rank 0 of 2", "(raised to the hard limit)"
    record(fault, "(joins)", named, seconds=seconds, within=2, codes=codes, row=26)


# -- 27: address families -------------------------------------------------------------------------------------------


def test_a_rank_whose_interface_has_another_address_family_is_told(hosts: Hosts) -> None:
    two = hosts(2, ipv6=True)
    commands = ("link add only6 type veth peer name end", "link set end up", "link set only6 up")
    for command in (*commands, "address add fd00:99::1/64 dev only6 nodad"):
        two[1].run("ip", *command.split())
    rank_0 = two[0].start_rank(0, 2)
    rank_0.wait_for("listening at ")
    odd = two[1].start_rank(1, 2, GLOO_SOCKET_IFNAME="only6")
    what = f"rank 1 (hostB, pid {odd.worker}) was started with other options than rank 0: address_family"
    seconds = said(odd, f"error[config-mismatch]: {what}\n") - odd.started
    assert odd.wait() == 12
    assert (
        f"rank 0 has IPv4 (eth0, on the way to {two[0].address}), rank 1 has IPv6 (only6, from GLOO_SOCKET_IFNAME)"
        in (last_error(odd.err))
    )
    rank_0.wait_for(f"rank 1 (hostB, pid {odd.worker}) was refused: config-mismatch")
    right = two[1].start_rank(1, 2)
    codes = [process.wait() for process in (rank_0, right, odd)]
    assert codes == [0, 0, 12], rank_0.err
    fault, named = "an interface with IPv6 only against one with IPv4", "both families, interfaces, and who chose them"
    record(fault, "config-mismatch", named, seconds=seconds, within=2, codes=codes, row=27)
