"""Which rank or node a launcher's variables say that a process is."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_manual import WorldSpec
from ddp_manual.environment import launcher_variables
from ddp_manual.environment.launcher_variables import check_rank_0_is_found, of_node, of_rank, of_started_rank
from ddp_manual.environment.rank_0 import Sourced, job_port
from ddp_manual.environment.rank_0_of_kubernetes import first_pod
from ddp_manual.environment.rank_0_of_slurm import first_host
from ddp_manual.errors import BadOption
from tests.conftest import Start
from tests.unit import launcher_environments as recorded
from tests.unit.launcher_environments import variables

OPEN_MPI_RANK = variables("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1")
PYTORCHJOB = "RANK=1 WORLD_SIZE=2 PET_NODE_RANK=1"
SKYPILOT_NODE = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "a\nb"}


def values(environment: dict[str, str], read: Any = of_rank) -> dict[str, Any]:
    return {option: value for option, (value, _) in read(environment).items()}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({"RANK": "", "WORLD_SIZE": " "}, {}),
        (variables("RANK=1 WORLD_SIZE=2"), {"rank": 1, "world_size": 2}),
        (
            recorded.SRUN_TASK,
            {"rank": 1, "world_size": 2, "local_rank": 0, "master_addr": "n1", "master_port": job_port(7)},
        ),
        (OPEN_MPI_RANK, {"rank": 3, "world_size": 4, "local_rank": 1}),
        (variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0"), {"rank": 1, "world_size": 2, "local_rank": 0}),
        (variables("JOB_COMPLETION_INDEX=1 WORLD_SIZE=2"), {"rank": 1, "world_size": 2}),
        (SKYPILOT_NODE, {"rank": 1, "world_size": 2, "master_addr": "a"}),
        (
            variables("DSTACK_NODES_NUM=2 DSTACK_NODE_RANK=0 DSTACK_MASTER_NODE_IP=10.0.0.1"),
            {"rank": 0, "world_size": 2, "master_addr": "10.0.0.1"},
        ),
        (
            # Kubeflow's TrainJob is an Indexed Job too.
            variables(
                "JOB_COMPLETION_INDEX=1 PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=node-0 "
                "PET_MASTER_PORT=29400"
            ),
            {"rank": 1, "world_size": 2, "master_addr": "node-0", "master_port": 29400},
        ),
        # Kubeflow's PyTorchJob, and an elastic one.
        (variables(f"{PYTORCHJOB} PET_NNODES=2 PET_NPROC_PER_NODE=auto"), {"rank": 1, "world_size": 2}),
        (variables(f"{PYTORCHJOB} PET_NNODES=1:3"), {"rank": 1, "world_size": 2}),
    ],
)
def test_a_launchers_variables_say_which_rank_a_process_is(
    environment: dict[str, str], identity: dict[str, Any]
) -> None:
    assert values(environment) == identity


def test_the_launcher_next_to_a_process_counts_and_what_started_that_launcher_does_not() -> None:
    in_pod, in_task = {"JOB_COMPLETION_INDEX": "0"}, {**recorded.SRUN_ONE_TASK, "PMI_RANK": "0", "PMI_SIZE": "1"}
    for outer in (recorded.SRUN_TASK, in_pod, in_task):
        assert of_rank({**outer, **OPEN_MPI_RANK})["rank"] == (3, "OMPI_COMM_WORLD_RANK")
    torchrun = variables("RANK=5 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=none")
    assert values({**recorded.SRUN_TASK, **OPEN_MPI_RANK, **torchrun}) == {"rank": 5, "world_size": 8}


def test_variables_that_a_person_has_set_say_where_rank_0_is() -> None:
    found = of_rank({**recorded.SRUN_TASK, "MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "2"})
    assert found["master_addr"] == ("10.0.0.1", "MASTER_ADDR")
    assert found["rank"] == (1, "SLURM_PROCID")


@pytest.mark.parametrize("other", ["WORLD_SIZE=4", "RANK=0 WORLD_SIZE=2", "JOB_COMPLETION_INDEX=0 WORLD_SIZE=2 RANK=1"])
def test_two_launchers_that_disagree_are_both_named(other: str) -> None:
    environment = {**({} if "JOB" in other else recorded.SRUN_TASK), **variables(other)}
    with pytest.raises(BadOption) as raised:
        of_rank(environment)
    named = [f"{name}={value}" for name, value in environment.items()]
    assert sum(word in named for word in raised.value.what.split()) == 2


def test_a_rank_that_is_typed_was_started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in recorded.SRUN_TASK.items():
        monkeypatch.setenv(name, value)
    by_hand = WorldSpec.from_environment(rank=0, world_size=3)
    assert (by_hand.master_addr, by_hand.master_port, by_hand.from_variables) == ("127.0.0.1", 29500, [])
    task = WorldSpec.from_environment(world_size=3)
    assert (task.rank, task.world_size, task.master_addr) == (1, 3, "n1")


def test_who_only_looks_at_a_run_reads_no_more_than_where_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables("RANK=abc LOCAL_RANK=-1 WORLD_SIZE=1 MASTER_PORT=3000").items():
        monkeypatch.setenv(name, value)
    assert WorldSpec.from_environment(is_rank=False).master_port == 3000
    monkeypatch.setattr(launcher_variables, "first_pod", lambda: Sourced("pod-0", "HOSTNAME"))
    monkeypatch.setenv("WORLD_SIZE", "4")  # as in each pod of an Indexed Job, where ``status`` is its readiness probe
    assert WorldSpec.from_environment(is_rank=False).master_addr == "pod-0"


@pytest.mark.parametrize("variable", ["JOB_COMPLETION_INDEX", "PMIX_RANK"])
def test_a_rank_without_a_world_size_is_not_guessed(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(BadOption, match=f"{variable}=1 says which rank this is, and nothing says of how many"):
        WorldSpec.from_environment()
    assert WorldSpec.from_environment(world_size=3, master_addr="a").rank == 1
    assert WorldSpec.from_environment(world_size=1, rank=0).from_variables == []
    with pytest.raises(BadOption, match="--world_size '2' is not a whole number"):
        WorldSpec.from_environment(world_size="2", rank=0)


POD_HOSTS = "# Written by the kubelet.\n127.0.0.1\tlocalhost\n10.1.2.3\tmy-job-1.svc.ns.svc.cluster.local\tmy-job-1\n"


def test_rank_0_of_an_indexed_job_is_found_by_this_pods_own_name_or_the_manifest_lacks_something() -> None:
    index = Sourced(1, "JOB_COMPLETION_INDEX")
    for host in ("my-job-1", "my-job-1.svc.ns.svc.cluster.local"):
        assert first_pod(index, host, POD_HOSTS).value == "my-job-0.svc.ns.svc.cluster.local"
    for host, hosts, why in (
        ("node7", POD_HOSTS, "its host name node7 does not end with -1, as where hostNetwork is true"),
        ("my-job-1", "10.1.2.3 my-job-1", "my-job-1 has no full name in /etc/hosts: the pod template has no subdomain"),
    ):
        with pytest.raises(BadOption, match=r"cannot know rank 0's address \(JOB_COMPLETION_INDEX=1\)") as caught:
            first_pod(index, host, hosts)
        assert caught.value.why == why


def test_a_number_that_is_none_is_named_with_its_variable() -> None:
    with pytest.raises(BadOption, match="SLURM_PROCID='x' is not a number"):
        of_rank({**recorded.SRUN_TASK, "SLURM_PROCID": "x"})


def test_a_node_with_several_gpus_is_for_launch() -> None:
    node = {**SKYPILOT_NODE, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    for several in (node, variables(f"{PYTORCHJOB} PET_NNODES=1:3 PET_NPROC_PER_NODE=8")):
        with pytest.raises(BadOption, match="one process was started on this node for 8 ranks"):
            of_rank(several)
    assert values(node, of_node) == {"nnodes": 2, "node_rank": 1, "nproc": "8", "master_addr": "a"}
    assert of_rank({**node, "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}) == {}


def test_launch_takes_its_node_from_a_step_with_one_task_per_node() -> None:
    found = values(recorded.SRUN_TASK, of_node)
    assert found == {"nnodes": 2, "node_rank": 1, "master_addr": "n1", "master_port": job_port(7)}
    assert of_node(recorded.SRUN_ONE_TASK) == {}
    with pytest.raises(BadOption, match="Slurm runs launch 4 times on 2 nodes") as raised:
        of_node({**recorded.SRUN_TASK, "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"})
    assert "--nnodes 1" in raised.value.next


def test_launch_below_mpirun_is_refused_unless_it_is_the_only_process() -> None:
    with pytest.raises(BadOption, match="mpirun runs launch 4 times") as raised:
        of_node({**OPEN_MPI_RANK, "OMPI_COMM_WORLD_SIZE": "4"})
    assert "mpirun ... ddp-manual run" in raised.value.next
    assert of_node({**OPEN_MPI_RANK, "OMPI_COMM_WORLD_SIZE": "1"}) == {}


def test_in_a_persons_shell_of_several_tasks_launch_counts_as_typed_by_hand() -> None:
    """srun -n 2 --pty bash"""
    assert of_node({**recorded.SRUN_PTY, "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}) == {}


@pytest.mark.parametrize("other", [{"SLURM_JOB_NODELIST": "n[07-09]"}, {"SLURM_NTASKS": "1"}])
def test_a_batch_job_that_was_submitted_in_a_task_of_another_job_is_none_of_its_tasks(other: dict[str, str]) -> None:
    """The shell has the variables of that task's step."""
    shell = {**recorded.SRUN_TASK, **recorded.BATCH_SHELL, **other}
    assert of_rank(shell) == {} and of_node(shell) == {}


def test_the_shell_of_a_batch_job_is_none_of_its_tasks() -> None:
    for shell in (recorded.BATCH_SHELL, recorded.SALLOC_SHELL, recorded.INTERACTIVE_STEP, recorded.ARRAY_SHELL):
        assert of_rank(shell) == {}
        with pytest.raises(BadOption, match="this is the shell of Slurm's job 7, and none of its 2 tasks"):
            of_started_rank(shell)
    of_started_rank(recorded.BATCH_SHELL_OF_ONE_TASK)
    of_started_rank(recorded.SRUN_TASK)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1,n2", "n1"),
        ("n[05-07,9],m[1-2]-ib", "n05"),
        ("m[3,1-2]-ib,n1", "m3-ib"),
        ("r[1-2]c[07-09]", "r1c07"),
        ("gpu-a.cluster.local,gpu-b", "gpu-a.cluster.local"),
    ],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        (recorded.SRUN_RANK_0, "n1"),
        (recorded.SRUN_TASK, "n1"),
        (recorded.BATCH_SECOND_STEP, "n2"),
        (recorded.HETEROGENEOUS_ONE_COMPONENT, "n1"),
    ],
)
def test_the_tasks_of_a_step_meet_on_the_host_of_the_first(environment: dict[str, str], host: str) -> None:
    assert of_rank(environment)["master_addr"] == (host, "SLURM_STEP_NODELIST")
    check_rank_0_is_found(environment)


@pytest.mark.parametrize("read", [of_rank, of_node])
def test_where_the_order_of_hosts_is_the_users_every_task_says_what_to_add(read: Any) -> None:
    for environment, host in ((recorded.SRUN_ARBITRARY_RANK_0, "n2"), (recorded.SRUN_ARBITRARY_RANK_1, "HOST")):
        assert "master_addr" not in read(environment)
        with pytest.raises(BadOption, match="no variable says on which host rank 0 is") as raised:
            check_rank_0_is_found(environment)
        assert "SLURM_DISTRIBUTION=arbitrary" in raised.value.why
        assert f"--master_addr {host}\nor, for any program: MASTER_ADDR={host} srun ..." in raised.value.next
        told = {**environment, "MASTER_ADDR": "n2"}
        check_rank_0_is_found(told)
        assert read(told)["master_addr"] == ("n2", "MASTER_ADDR")


def test_rank_0_on_another_host_than_the_variables_say_ends_with_what_to_add() -> None:
    with pytest.raises(BadOption, match="rank 0 runs on n2, and the other ranks look for it on the first host"):
        check_rank_0_is_found({**recorded.SRUN_RANK_0, "SLURMD_NODENAME": "n2"})
    with pytest.raises(BadOption, match="no variable says on which host rank 0 is"):
        check_rank_0_is_found(recorded.HETEROGENEOUS_RANK_0)


def test_ports_of_jobs_differ_and_are_below_those_of_connections() -> None:
    ports = {job_port(job, step) for job in range(1000, 1100) for step in range(10)}
    assert len(ports) == 1000
    assert all(1024 < port < 32768 for port in ports)


def test_a_command_in_the_shell_of_a_batch_job_is_told_to_use_srun(start: Start) -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    process = start("ddp-manual", "train", **shell)
    assert process.wait() == 2
    assert "error[bad-option]: this is the shell of Slurm's job 7" in process.err
    assert "srun" in process.err
