"""The manifests and the Dockerfile, against Kubernetes' schemas and what they say of this package."""

from __future__ import annotations

import json
import re
import shlex
import signal
from configparser import ConfigParser
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from ddp_manual import WorldSpec, errors
from ddp_manual.agent.to_type import rank_command
from ddp_manual.cli import main as cli
from ddp_manual.environment import rank_0_of_kubernetes, user_variables
from ddp_manual.environment.rank_0 import Sourced
from ddp_manual.protocol.agent import LEAVE_TIMEOUT
from ddp_manual.protocol.stop_signals import SAVE_WITHIN
from ddp_manual.training.position import SYNC_EVERY
from ddp_manual.worker.process_group import CLOSE_WITHIN
from tests.conftest import REPOSITORY

MANIFESTS = REPOSITORY / "scripts" / "kubernetes"
OLDEST = "1.29"  # the first with backoffLimitPerIndex
COMMANDS = cli.ddp_manual.commands
# What the same start would end with again; errors.py gives 2 to 13 to no other error.
FAIL_AGAIN = sorted(
    {code for error in errors.EVERY_ERROR.values() if 1 < (code := getattr(error, "exit_code", 0)) < 14}
)


def documents(name: str) -> dict[str, Any]:
    """The documents of a manifest, by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((MANIFESTS / name).read_text())}


@pytest.fixture(scope="module")
def indexed() -> dict[str, Any]:
    return documents("indexed-job.yaml")


@pytest.fixture(scope="module")
def of_kubeflow() -> dict[str, Any]:
    return documents("trainjob.yaml")


def job_in(runtime: dict[str, Any]) -> dict[str, Any]:
    """The only Job that a TrainingRuntime makes."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return dict(replicated["template"]["spec"])


def jobs(indexed: dict[str, Any], of_kubeflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [indexed["Job"]["spec"], job_in(of_kubeflow["TrainingRuntime"])]


def pod_of(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod that a Job starts, and its only container."""
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def test_manifests_are_valid_for_the_oldest_kubernetes_they_name_and_the_newest_one_known(
    indexed: dict[str, Any], of_kubeflow: dict[str, Any]
) -> None:
    needs = re.search(r"Needs Kubernetes ([\d.]+) or later", (MANIFESTS / "indexed-job.yaml").read_text())
    assert needs and needs[1] == OLDEST
    schemas = json.loads((REPOSITORY / "tests" / "schemas" / "kubeflow-trainer.json").read_text())
    for version in (OLDEST, kubernetes_validate.latest_version()):
        for kind, document in {**indexed, **of_kubeflow}.items():
            if kind not in schemas:
                kubernetes_validate.validate(document, version, strict=True)
        job = {"apiVersion": "batch/v1", "kind": "Job", "spec": job_in(of_kubeflow["TrainingRuntime"])}
        # Trainer puts the image and the command of the TrainJob into the container.
        kubernetes_validate.validate(job, version, strict=True)
    for kind, schema in schemas.items():
        if kind != "$comment":
            jsonschema.validate(of_kubeflow[kind], schema)


def test_only_exit_codes_that_would_come_again_fail_the_job(
    indexed: dict[str, Any], of_kubeflow: dict[str, Any]
) -> None:
    assert FAIL_AGAIN == [2, 10, 11, 12, 13]
    for job in jobs(indexed, of_kubeflow):
        pod, container = pod_of(job)
        rules = {rule["action"]: rule.get("onExitCodes") for rule in job["podFailurePolicy"]["rules"]}
        of_container = {"containerName": container["name"], "operator": "In"}
        assert rules["FailJob"] == {**of_container, "values": FAIL_AGAIN}
        # The TrainJob has no such rule: it is JobSet that starts the ranks again.
        assert rules.get("Ignore") in ({**of_container, "values": [errors.Stopped(signal.SIGTERM).exit_code]}, None)
        assert pod["restartPolicy"] == "Never"


def test_the_grace_period_is_longer_than_what_a_stop_may_take(
    indexed: dict[str, Any], of_kubeflow: dict[str, Any]
) -> None:
    longest = 2 * SYNC_EVERY + SAVE_WITHIN + CLOSE_WITHIN + LEAVE_TIMEOUT
    for job in jobs(indexed, of_kubeflow):
        assert longest <= pod_of(job)[0]["terminationGracePeriodSeconds"] < longest + 30


def test_pods_of_the_indexed_job_find_each_other_before_they_are_ready(indexed: dict[str, Any]) -> None:
    service, job = indexed["Service"], indexed["Job"]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert pod_of(job["spec"])[0]["subdomain"] == service["metadata"]["name"]
    selected = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}  # a label that the Job gives to its pods
    assert service["spec"]["selector"] == selected
    assert indexed["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selected


def test_the_world_size_is_the_number_of_pods(indexed: dict[str, Any]) -> None:
    job = indexed["Job"]["spec"]
    env = {variable["name"]: variable.get("value") for variable in pod_of(job)[1]["env"]}
    assert (job["completionMode"], job["podReplacementPolicy"]) == ("Indexed", "Failed")
    assert env[rank_0_of_kubernetes.KUBERNETES["world_size"]] == str(job["completions"]) == str(job["parallelism"])
    assert rank_0_of_kubernetes.KUBERNETES["rank"] not in env  # Kubernetes sets it


@pytest.mark.parametrize("name", ["indexed-job.yaml", "trainjob.yaml"])
def test_the_token_comes_from_a_secret_and_checkpoints_go_to_a_volume(name: str) -> None:
    found = documents(name)
    pod, container = pod_of(found["Job"]["spec"] if "Job" in found else job_in(found["TrainingRuntime"]))
    started = found["TrainJob"]["spec"]["trainer"] if "TrainJob" in found else container
    (token,) = [variable for variable in started["env"] if variable["name"] == user_variables.TOKEN_VARIABLE]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "mnist-token", "key": "token"} and "value" not in token
    assert "kubectl create secret generic mnist-token --from-literal=token=" in (MANIFESTS / name).read_text()
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (runs,) = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert runs["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    (run_dir,) = [word.partition("=")[2] for word in started["args"] if word.startswith("--run_dir=")]
    assert str(Path(run_dir).parent) == mounted[runs["name"]]
    assert "--resume=auto" in started["args"]


def test_the_command_line_accepts_what_the_manifests_and_the_readiness_probe_type(
    indexed: dict[str, Any], of_kubeflow: dict[str, Any]
) -> None:
    """With the real values: tests/hosts/test_kubernetes.py, which takes the words after these from the manifests."""
    _, container = pod_of(indexed["Job"]["spec"])
    trainer = of_kubeflow["TrainJob"]["spec"]["trainer"]
    line = container["readinessProbe"]["exec"]["command"][-1]
    skips_rank_0, probe = line.split("|| ddp-manual ")
    assert skips_rank_0 == f'test "${rank_0_of_kubernetes.KUBERNETES["rank"]}" != 0 '
    assert trainer["command"] == ["tini", "--", "ddp-manual", "launch"]
    for command, *arguments in (container["args"], shlex.split(probe), ["launch", *trainer["args"]]):
        COMMANDS[command].make_context(command, arguments)


def test_a_pod_says_how_to_look_at_the_pod_that_is_missing(indexed: dict[str, Any]) -> None:
    name = indexed["Job"]["metadata"]["name"]
    index, full_name = Sourced(1, "JOB_COMPLETION_INDEX"), f"{name}-1.svc.ns.svc.cluster.local"
    first = rank_0_of_kubernetes.first_pod(index, f"{name}-1", f"10.1.2.3 {full_name} {name}-1")
    spec = WorldSpec(world_size=2, rank=1, master_addr=first.value, sources={"master_addr": f"from {first.source}"})
    label = "batch.kubernetes.io/job-"
    expected = f"kubectl describe pods --namespace ns --selector {label}name={name},{label}completion-index={{rank}}"
    assert rank_command(spec, "train") == expected


def test_the_image_has_what_the_package_is_made_of_and_nothing_else() -> None:
    copied = [source for words in instructions()["COPY"] for source in words.split()[:-1]]
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    readme = setup["metadata"]["long_description"].removeprefix("file: ")
    needed = {readme, setup["metadata"]["license_files"], setup["options"]["py_modules"] + ".py"}
    assert {*copied} == {"pyproject.toml", "setup.cfg", "ddp_manual", *needed}
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert "*" in ignored and {line for line in ignored if line[0] == "!"} == {f"!{name}" for name in copied}
    data = setup["options.package_data"]["ddp_manual"].split()
    files = [path for path in (REPOSITORY / "ddp_manual").rglob("*") if path.is_file()]
    others = [path.name for path in files if path.suffix not in (".py", ".pyc")]
    assert all(any(fnmatch(name, pattern) for pattern in data) for name in others), others


def test_the_image_is_for_cpus_or_gpus_by_one_argument_and_its_user_is_not_root(
    indexed: dict[str, Any], of_kubeflow: dict[str, Any]
) -> None:
    lines, text = instructions(), (REPOSITORY / "Dockerfile").read_text()
    assert "TORCH=cpu" in " ".join(lines["ARG"]) and "--build-arg TORCH=cu130" in text
    assert any("whl/${TORCH} torch torchvision" in words for words in lines["RUN"])
    (user,) = lines["USER"]
    assert any(f"useradd --uid {user} " in words for words in lines["RUN"])
    for job in jobs(indexed, of_kubeflow):
        security = pod_of(job)[0]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == int(user) != 0
    (entry,) = lines["ENTRYPOINT"]
    assert json.loads(entry) == ["tini", "--", "ddp-manual"]
    (example,) = re.findall(r"docker run --rm ddp_manual:cpu (\w+) (.+)", text)
    COMMANDS[example[0]].make_context(example[0], shlex.split(example[1]))


def instructions() -> dict[str, list[str]]:
    """The Dockerfile's instructions, by their names."""
    text = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", "")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, words = line.partition(" ")
            found.setdefault(name, []).append(" ".join(words.split()))
    return found
