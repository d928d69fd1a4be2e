"""Where the ranks of mpirun and mpiexec meet, from variables that these really gave to their ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from ddp_manual import WorldSpec
from ddp_manual.environment.launcher_variables import check_rank_0_is_found, of_rank
from ddp_manual.environment.rank_0 import FIRST_JOB_PORT, JOB_PORTS
from ddp_manual.errors import BadOption
from tests.unit import launcher_environments as recorded

Environments = list[dict[str, str]]


def read(environments: Environments, option: str) -> list[Any]:
    return [found[option].value if option in (found := of_rank(rank)) else None for rank in environments]


EVERY = [value for value in vars(recorded).values() if isinstance(value, list)]


@pytest.mark.parametrize("environments", EVERY)
def test_each_rank_knows_its_number_also_below_another_launcher(environments: Environments) -> None:
    assert read(environments, "rank") == [0, 1]
    assert read(environments, "world_size") == [2, 2]


@pytest.mark.parametrize(
    ("environments", "host"),
    [
        (recorded.OPEN_MPI_4_ONE_HOST, "127.0.0.1"),
        (recorded.INTEL_MPI_ONE_HOST, "127.0.0.1"),
        (recorded.OPEN_MPI_4_TWO_HOSTS, "10.91.0.1"),
        (recorded.OPEN_MPI_4_IN_A_SLURM_JOB, "10.77.1.1"),
        (recorded.OPEN_MPI_5_TWO_HOSTS, "nodeA"),
    ],
)
def test_the_ranks_of_an_mpirun_meet_at_one_place_that_other_runs_do_not_share(
    environments: Environments, host: str
) -> None:
    assert read(environments, "master_addr") == [host, host]
    first, second = read(environments, "master_port")
    assert first == second
    assert FIRST_JOB_PORT <= first < FIRST_JOB_PORT + JOB_PORTS
    for environment in environments:
        check_rank_0_is_found(environment)


def test_mpich_tells_no_job_so_that_the_default_port_counts() -> None:
    assert read(recorded.MPICH_ONE_HOST, "master_addr") == ["127.0.0.1", "127.0.0.1"]
    assert read(recorded.MPICH_ONE_HOST, "master_port") == [None, None]


@pytest.mark.parametrize(
    ("own", "nodes", "name"),
    [
        ("0", "", "nodeA"),
        ("1", "n[2:05-12],m@0(9)", "n05"),
        ("1", "[2:10].91.0.2,nodeA@0(2)", "10.91.0.2"),
    ],
)
def test_where_mpiruns_host_has_several_addresses_its_name_counts(own: str, nodes: str, name: str) -> None:
    environment = {
        **recorded.OPEN_MPI_4_TWO_HOSTS[int(own)],
        "OMPI_MCA_orte_hnp_uri": "2971533312.0;tcp://172.17.0.1,10.91.0.1:60945",
        "OMPI_MCA_orte_node_regex": nodes,
    }
    assert of_rank(environment)["master_addr"].value == name


def test_ranks_of_mpich_on_several_hosts_ask_for_rank_0s_address_unless_it_was_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in recorded.MPICH_TWO_HOSTS[1].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadOption, match="no variable says on which host rank 0 is") as raised:
        WorldSpec.from_environment()
    assert "mpiexec -genv MASTER_ADDR" in raised.value.next
    assert WorldSpec.from_environment(master_addr="nodeA").rank == 1


def test_the_launcher_is_the_nearest_process_that_was_started_without_the_ranks_variable() -> None:
    """This Python takes mpirun's place: a program of that name would be a shell's script, and the shell the process."""
    asks = "import ddp_manual.environment.launcher_variables as it; print(it.process_that_set('OMPI_COMM_WORLD_RANK'))"
    shell = f'"{sys.executable}" -c "{asks}"; exit'  # a shell in between, as of a job's script
    assert WorldSpec.from_environment(world_size=2, rank=0).launcher_pid is None

    def launcher(shell: str, **variables: str) -> str:
        command, environment = ["sh", "-c", shell], {**os.environ, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert launcher(shell, OMPI_COMM_WORLD_RANK="0") == str(os.getpid())
    assert launcher(f"export OMPI_COMM_WORLD_RANK=0; {shell}") == "None"  # a person's shell, which may be closed
