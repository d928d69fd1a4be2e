"""What the pods of a Job see of Kubernetes, on hosts of a network: their variables, their names, their end.

Kubernetes itself cannot run in a test. Each pod is a host with an address of its own. It has the host name, the hosts
file and the resolv.conf that a kubelet writes, and the variables and arguments of the manifest. A real dnsmasq has the
names of the headless Service, from when a test says so, like CoreDNS, which learns of a pod only after its start.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import REPOSITORY, RankProcess
from tests.hosts.hosts import Host

MANIFESTS = REPOSITORY / "scripts" / "kubernetes"
DOMAIN = "default.svc.cluster.local"
TOKEN = "of the secret"


def why_not() -> str | None:
    """Return why there can be no name server, and what to do about it; None if there can."""
    return None if shutil.which("dnsmasq") else "no dnsmasq (on Debian and Ubuntu: apt-get install dnsmasq-base)"


def document(manifest: str, kind: str) -> dict[str, Any]:
    """The document of this kind in a manifest."""
    return next(one for one in yaml.safe_load_all((MANIFESTS / manifest).read_text()) if one["kind"] == kind)


class Pod:
    """One pod of a Job, which starts its only container once.

    Args:
        name: its host name.
        subdomain: the name of its headless Service.
        container: with the arguments and the variables that the manifest gives.
        also: the variables that its controller adds.
    """

    def __init__(
        self, host: Host, name: str, subdomain: str, name_server: str, container: Mapping[str, Any], **also: str
    ) -> None:
        self.host, self.container, self._also = host, container, also
        host.name = name
        self.full_name = f"{name}.{subdomain}.{DOMAIN}"
        (host.namespace.etc / "hosts").write_text(
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
            f"{host.address}\t{self.full_name}\t{host.name}\n"
        )
        parents = [DOMAIN.split(".", skipped)[-1] for skipped in range(3)]
        (host.namespace.etc / "resolv.conf").write_text(
            f"search {' '.join(parents)}\nnameserver {name_server}\noptions ndots:5\n"
        )

    @property
    def variables(self) -> dict[str, str]:
        """What is set in the container: by the manifest, from the Secret, and by Kubernetes."""
        named = {one["name"]: one["value"] for one in self.container["env"] if "value" in one}
        return {**named, "DDP_MANUAL_TOKEN": TOKEN, "HOSTNAME": self.host.name, **self._also}

    def start(self, *words: object, first_process: bool = False) -> RankProcess:
        """Start the container with these arguments.

        Args:
            first_process: in a process namespace of its own, as its first process, without tini in between. It is a
                new Python, the only child of the process that is returned.
        """
        command = [sys.executable, "-m", "ddp_manual", *words]
        if first_process:
            command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
        return self.host.start(*command, **self.variables)

    def arguments(self, *others: object, runs: Path, data: Path) -> list[object]:
        """The manifest's arguments, with these folders in the place of its volumes, and others after them."""
        given = [word.replace("/runs", str(runs)).replace("/data", str(data)) for word in self.container["args"]]
        return [*given, *others]

    def readiness(self) -> int:
        """Run the readiness probe's command in the pod; returns its exit code."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {**self.variables, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        return self.host.run(*words, *self.container["readinessProbe"]["exec"]["command"], check=False).returncode


class Cluster:
    """A name server, and the pods of the shipped manifests.

    Args:
        hosts: the first one is the name server's; each pod takes the next one, and so has another address than the pod
            that it replaces.
        folder: for the name server's files.
    """

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self._dns, *self._free = hosts
        self._names = folder / "names"
        self._names.write_text("")
        options = ["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root", "--log-facility=-"]
        options += ["--no-resolv", "--no-hosts", f"--addn-hosts={self._names}", "--local=/cluster.local/"]
        options += [f"--listen-address={self._dns.address}", "--bind-interfaces", "--no-negcache", "--log-queries"]
        self._server = self._dns.start("dnsmasq", *options)
        self._server.wait_for("started, version", 10)

    def create_pod(self, index: int) -> Pod:
        """A pod of the Indexed Job."""
        job = document("indexed-job.yaml", "Job")
        template = job["spec"]["template"]["spec"]
        name, of_job = job["metadata"]["name"], {"JOB_COMPLETION_INDEX": str(index)}
        place = (self._free.pop(0), f"{name}-{index}", template["subdomain"], self._dns.address)
        return Pod(*place, template["containers"][0], **of_job)

    def create_pod_of_trainjob(self, index: int) -> Pod:
        """A pod of the TrainJob, with what Kubeflow Trainer and JobSet add."""
        job = document("trainjob.yaml", "TrainJob")
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        counts = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        master = {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29400"}
        of_job = {"PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)}
        place = (self._free.pop(0), f"{name}-node-0-{index}", name, self._dns.address)
        return Pod(*place, trainer, **counts, **master, **of_job)

    def serve_names(self, *pods: Pod) -> None:
        """From now on have names for these pods only; all other names do not exist."""
        self._names.write_text("".join(f"{pod.host.address} {pod.full_name}\n" for pod in pods))
        self._server.process.send_signal(signal.SIGHUP)

    def denied(self, pod: Pod) -> bool:
        """Whether the name server has said of a pod's name that it does not exist."""
        return f"{pod.full_name} is NXDOMAIN" in self._server.err
