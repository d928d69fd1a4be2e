"""Two hosts that are about to run a user's own program in different ways, provoked for real. See ``record``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.clock import said
from tests.conftest import REPOSITORY, RankProcess
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host
from tests.world.test_rendezvous import last_error

SCRIPT = "import helper, oddly\nimport sys\nprint(helper.VALUE, *sys.argv[1:])\n"
ARGUMENTS = ("--lr", 0.1, "--seed", 0)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with a script, a module of its own, and a package that is said to be installed."""
    return write_program(tmp_path / "program")


def write_program(folder: Path, value: int = 1, version: str = "1.0") -> Path:
    """Write the program. The package only says that it is installed: a real one takes a registry."""
    site = folder / "site-packages"
    info = site / f"oddly-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: oddly\nVersion: {version}\n")
    (site / "oddly.py").write_text("")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(f"VALUE = {value}\n")
    return folder


def start_program(on: Host, rank: int, folder: Path, *words: object, options: object = (), **env: str) -> RankProcess:
    """Start a rank of the program in a folder, with these arguments; ``options`` are those of ``run``."""
    network = on.network
    port = network.rank_command(0, 2)[network.rank_command(0, 2).index("--master_port") + 1]
    meeting = ("--world_size", 2, "--rank", rank, "--master_addr", network.hosts[0].address, "--master_port", port)
    command = (sys.executable, "-m", "ddp_manual", "run", *meeting, *options, "train.py", *(words or ARGUMENTS))
    path = f"{folder / 'site-packages'}:{REPOSITORY}"
    return on.start(*command, cwd=folder, **{"PYTHONPATH": path, **env})


DIFFERENCES = {
    "another argument": (
        "config-mismatch",
        "was started with other arguments than rank 0: --lr",
        "--lr: rank 0 (hostA) has 0.1, rank 1 has 0.2",
        "--may_differ lr",
        "the argument, both values",
    ),
    "one changed line in a local module": (
        "config-mismatch",
        "runs other code than rank 0: helper.py",
        "helper.py: rank 0 (hostA) has digest ",
        "bring the code on hostB to what hostA has",
        "the file, both digests and hosts",
    ),
    "another version of an imported package": (
        "version-mismatch",
        "has other versions than rank 0: oddly",
        "oddly: rank 0 (hostA) has 1.0, rank 1 has 2.0",
        "on hostB: pip install oddly==1.0",
        "the package, both versions, what to install",
    ),
    "a package that one host lacks": (
        "version-mismatch",
        "has other versions than rank 0: oddly",
        "oddly: rank 0 (hostA) has 1.0, rank 1 has none",
        "on hostB: pip install oddly==1.0",
        "the package, its version, what to install",
    ),
    "NCCL_ALGO=Ring on one host": (
        "config-mismatch",
        "has other variables than rank 0: NCCL_ALGO",
        "NCCL_ALGO: rank 0 (hostA) has it unset, rank 1 has Ring",
        "unset NCCL_ALGO",
        "the variable, both values",
    ),
}


@pytest.mark.parametrize("fault", DIFFERENCES)
def test_a_rank_of_a_program_that_differs_is_told_in_what_and_the_other_waits_on(
    hosts: Hosts, program: Path, tmp_path: Path, fault: str
) -> None:
    identifier, what, why, next, named = DIFFERENCES[fault]
    two = hosts(2)
    rank_0 = start_program(two[0], 0, program)
    rank_0.wait_for("listening at ")
    words: tuple[object, ...] = ()
    folder, env = program, {}
    if fault == "another argument":
        words = ("--seed=0", "--lr=0.2")
    elif fault == "one changed line in a local module":
        folder = write_program(tmp_path / "other", value=2)
    elif fault == "another version of an imported package":
        folder = write_program(tmp_path / "other", version="2.0")
    elif fault == "a package that one host lacks":
        env = {"PYTHONPATH": str(REPOSITORY)}
    else:
        env = {"NCCL_ALGO": "Ring"}
    odd = start_program(two[1], 1, folder, *words, **env)
    seconds = said(odd, f"error[{identifier}]: rank 1 (hostB, pid {odd.worker}) {what}\n") - odd.started
    assert odd.wait() == 12
    assert why in last_error(odd.err) and next in last_error(odd.err), odd.err
    rank_0.wait_for(f"rank 1 (hostB, pid {odd.worker}) was refused: {identifier}")
    right = start_program(two[1], 1, program)
    codes = [process.wait() for process in (rank_0, right, odd)]
    assert codes == [0, 0, 12], rank_0.err
    assert (rank_0.out, right.out) == ("1 --lr 0.1 --seed 0\n",) * 2
    record(f"run: {fault}", identifier, named, seconds=seconds, within=2, codes=codes, row=14)


def test_what_differs_on_purpose_is_allowed(hosts: Hosts, program: Path, tmp_path: Path) -> None:
    """Arguments by name, where one rank says so; all else with a warning, where one rank says so."""
    two = hosts(2)
    other = write_program(tmp_path / "other", value=2, version="2.0")
    rank_0 = start_program(two[0], 0, program, options=("--may_differ", "lr,seed"))
    words = ("--lr", 0.2, "--seed", 1)
    odd = start_program(two[1], 1, other, *words, options=["--allow_mismatch"], NCCL_ALGO="Ring")
    codes = [rank_0.wait(), odd.wait()]
    assert codes == [0, 0], rank_0.err
    assert (rank_0.out, odd.out) == ("1 --lr 0.1 --seed 0\n", "2 --lr 0.2 --seed 1\n")
    for rank in (rank_0, odd):
        assert "has other versions than rank 0: oddly (allowed)\n" in rank.err
        assert "runs other code than rank 0: helper.py (allowed)\n" in rank.err
        assert "has other variables than rank 0: NCCL_ALGO (allowed)\n" in rank.err
        assert "other arguments" not in rank.err
