"""The ranks of an Indexed Job of Kubernetes, in pods that are made of namespaces: see ``pods.py``."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import ALL_DIGITS
from tests.hosts.conftest import Hosts
from tests.hosts.pods import Cluster, why_not

TERMINATED = 128 + signal.SIGTERM


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Callable[[int], Cluster]:
    """``cluster(4)`` has room for four pods."""
    if reason := why_not():
        pytest.skip(reason)
    return lambda pods: Cluster(hosts(1 + pods), tmp_path)


def test_pods_start_before_rank_0s_name_exists_and_an_agent_that_is_the_first_process_hands_sigterm_on(
    cluster: Callable[[int], Cluster],
) -> None:
    nodes = cluster(2)
    last, first = nodes.create_pod(1), nodes.create_pod(0)
    program = ["sh", "-c", "trap 'echo tidied up; exit 143' TERM; echo begun; while :; do sleep 0.05; done"]
    ranks = [last.start("run", "--no_python", *program, first_process=True)]
    ranks[0].wait_for(f"rank 0's address '{first.full_name}' has no IP address yet")
    ranks.insert(0, first.start("run", "--no_python", *program, first_process=True))
    ranks[0].wait_for(f"listening at {first.host.address}:")
    assert nodes.denied(first)
    nodes.serve_names(first, last)
    for rank in ranks:
        rank.wait_for("begun")
    assert "world_size 2 (from WORLD_SIZE), rank 1 (from JOB_COMPLETION_INDEX)" in ranks[1].err
    assert f"rank 0's address {first.full_name} is {first.host.address}" in ranks[1].err
    (first_process,) = psutil.Process(ranks[1].process.pid).children()
    first_process.terminate()
    # A program does not agree with the others on a step to stop after: it is gone for them.
    assert [rank.wait(30) for rank in ranks] == [14, TERMINATED]
    assert [rank.out for rank in ranks] == ["begun\ntidied up\n"] * 2
    assert re.search(r"error\[peer-failed\]: rank 1 \(mnist-1, pid \d\) left with error\[stopped\]", ranks[0].err)


def test_pods_of_the_trainjob_train_although_rank_0_itself_does_not_know_its_name_yet(
    cluster: Callable[[int], Cluster], small_data: Path, tmp_path: Path
) -> None:
    nodes = cluster(2)
    pods = [nodes.create_pod_of_trainjob(index) for index in range(2)]
    short = ["--dataset=synthetic", "--model=mlp", "--epochs=1"]
    launches = [pod.start("launch", *pod.arguments(*short, runs=tmp_path, data=small_data)) for pod in pods]
    for rank, launch in enumerate(launches):
        launch.wait_for(f"[rank {rank}] rank 0's address 'mnist-node-0-0.mnist' has no IP address yet")
    nodes.serve_names(*pods)
    assert [launch.wait() for launch in launches] == [0, 0], launches[0].err
    assert "nnodes 2 (from PET_NNODES), node_rank 1 (from PET_NODE_RANK), nproc 1" in launches[1].err


@pytest.mark.soak(only=True)
@pytest.mark.timeout(600)
def test_the_manifests_job_trains_the_real_mnist_and_pod_0_is_ready_meanwhile(
    cluster: Callable[[int], Cluster], digits: Path, tmp_path: Path
) -> None:
    nodes = cluster(2)
    pods = [nodes.create_pod(index) for index in range(2)]
    nodes.serve_names(*pods)
    assert [pod.readiness() for pod in pods] == [11, 0]
    ranks = [pod.start(*pod.arguments("--epochs=1", runs=tmp_path, data=digits)) for pod in pods]
    ranks[0].wait_for("process group ready")
    assert pods[0].readiness() == 0
    assert [rank.wait(500) for rank in ranks] == [0, 0], ranks[0].err
    summary = json.loads((tmp_path / "mnist" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["final_test_accuracy"] >= (0.985 if ALL_DIGITS else 0.5)
