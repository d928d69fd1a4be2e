"""Which pod of an Indexed Job of Kubernetes has rank 0, as far as this pod can know.

Nothing in a pod says how many pods there are, so the manifest has to set WORLD_SIZE.
"""

from __future__ import annotations

from ddp_manual.environment.rank_0 import Sourced
from ddp_manual.errors import BadOption

KUBERNETES = {"world_size": "WORLD_SIZE", "rank": "JOB_COMPLETION_INDEX"}
# What stands for the variable that rank 0's address comes from, since no variable tells it.
OWN_NAME = "this pod's name"


def first_pod(index: Sourced, host: str, hosts: str) -> Sourced:
    """Return the full name of the first pod of an Indexed Job, ``<job>-0.<service>.<domain>``, which differs from this
    pod's own in the index only.

    Args:
        host: this pod's host name, ``<job>-<index>``.
        hosts: its /etc/hosts, where Kubernetes writes the full name of a pod whose ``subdomain`` names a Service.

    Raises:
        BadOption: this pod has another host name, or no full name.
    """
    names = next((names for line in hosts.splitlines() if host in (names := line.partition("#")[0].split()[1:])), [])
    full = next((name for name in [host, *names] if "." in name), host)
    short, _, domain = full.partition(".")
    job, _, number = short.rpartition("-")
    if number != str(index.value):
        why = f"its host name {host} does not end with -{index.value}, as where hostNetwork is true"
        add = "MASTER_ADDR to the variables: the address of the pod with index 0"
    elif not domain:
        why = f"{host} has no full name in /etc/hosts: the pod template has no subdomain"
        add = "to the pod template subdomain: the name of a headless Service for the pods of the Job"
    else:
        return Sourced(f"{job}-0.{domain}", OWN_NAME)
    raise BadOption(
        f"this pod cannot know rank 0's address ({index.assignment})",
        why=why,
        next=f"add in the manifest {add}",
    )
