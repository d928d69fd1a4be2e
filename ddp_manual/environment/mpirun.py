"""Where the ranks that mpirun has started meet, as far as their variables tell.

Open MPI never says where rank 0 is. But every rank knows the host of mpirun itself, and Open MPI puts its ranks there
before it uses any other host, in whatever order the hosts are given (seen with 4.1.4 and 5.0.11). So rank 0 is there,
unless mpirun's host runs no rank at all, as a login node, or a rankfile says otherwise. Rank 0 itself sees that, since
each rank knows whether mpirun or a daemon of it on another host has started it: ``Search.is_here``.
MPICH and Intel MPI tell a rank about its own host only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from ddp_manual.environment.rank_0 import Search

Environment = Mapping[str, str]

# Which rank a process is, how many ranks this host has, and how many there are; and how to tell them a variable.
KINDS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE", "mpirun -x MASTER_ADDR={} ..."),
    ("PMI_RANK", "MPI_LOCALNRANKS", "PMI_SIZE", "mpiexec -genv MASTER_ADDR {} ..."),
)
NAMESPACE = "PMIX_NAMESPACE"
# Such as 1850736640.0;tcp4://127.0.0.1:52673, where .0 is mpirun, and .1 the first of its daemons.
STARTED_BY = "PMIX_SERVER_URI2"
HNP_URI = "OMPI_MCA_orte_hnp_uri"
NODES = "OMPI_MCA_orte_node_regex"
# Of Open MPI 5, such as prterun-nodeA-9809@1: mpirun's host, its process id, and which of its jobs.
_NAMESPACE_5 = re.compile(r"prterun-(?P<host>.+)-(?P<pid>\d+)@(?P<job>\d+)")


class Meeting(NamedTuple):
    """Where ranks meet, and the number of their job; each with its variable."""

    host: str
    host_source: str
    job: int | None
    job_source: str


def meeting(environment: Environment) -> Meeting | None:
    """Return where the ranks of mpirun or mpiexec meet; None if no variable tells."""
    job = _job(environment)
    for _, of_host, of_run, _ in KINDS:
        here, total = environment.get(of_host, ""), environment.get(of_run, "")
        if here and here == total:
            return Meeting("127.0.0.1", of_host, *job)
        if here:
            host = _mpiruns_host(environment)
            return Meeting(*host, *job) if host else None
    return None


def several_hosts(environment: Environment, world_size: int) -> str | None:
    """Return the variables that show that the ranks of this world are on several hosts; None if none do."""
    for _, of_host, of_run, _ in KINDS:
        here, total = environment.get(of_host, ""), environment.get(of_run, "")
        if here.isdigit() and total == str(world_size) and int(here) < world_size:
            return f"{of_host}={here} of {of_run}={total}"
    return None


def search_for_rank_0(environment: Environment) -> Search | None:
    """Return how ranks on several hosts find rank 0; None where they are on one host, or mpirun has started none."""
    rank, _, of_run, told = next((kind for kind in KINDS if kind[0] in environment), ("", "", "", ""))
    world_size = environment.get(of_run, "")
    spread = several_hosts(environment, int(world_size)) if world_size.isdigit() else None
    if spread is None:
        return None
    own_host = os.uname().nodename
    found = meeting(environment)
    return Search(
        is_rank_0=environment[rank] == "0",
        own_host=own_host,
        spread=spread,
        place="mpirun's host",
        host=found.host if found else None,
        source=found.host_source if found else "",
        is_here=_started_by_mpirun_itself(environment),
        told=told,
        moved=f"start mpirun on {own_host}",
    )


def _job(environment: Environment) -> tuple[int | None, str]:
    """Return a number that other jobs of this host do not have, and its variable; None if there is no such variable."""
    text = environment.get(NAMESPACE, "")
    if match := _NAMESPACE_5.fullmatch(text):
        return int(match["pid"]), NAMESPACE
    if text.isdigit():  # of Open MPI 4: its upper half is a digest of mpirun's host, plus its process id
        return int(text) >> 16, NAMESPACE
    text = environment.get("I_MPI_HYDRA_UUID", "").replace("-", "")
    return (int(text, 16), "I_MPI_HYDRA_UUID") if re.fullmatch(r"[0-9a-fA-F]{1,64}", text) else (None, "")


def _mpiruns_host(environment: Environment) -> tuple[str, str] | None:
    """Return the name or address of mpirun's host, and its variable."""
    if match := _NAMESPACE_5.fullmatch(environment.get(NAMESPACE, "")):
        return match["host"], NAMESPACE
    uri = environment.get(HNP_URI, "")
    for protocol in (r"tcp://([^:;]+):", r"tcp6://\[([^\];]+)\]:"):
        match = re.search(protocol, uri)
        if match and "," not in match[1]:
            return match[1], HNP_URI
    # With several addresses, one of them may be that of a bridge for containers: the name is meant for others.
    if _started_by_mpirun_itself(environment) and (own := environment.get("PMIX_HOSTNAME")):
        return own, "PMIX_HOSTNAME"
    first = re.match(r"([^,\[@]*)(?:\[\d+:(\d+)[^\]]*\]([^,@]*))?", environment.get(NODES, ""))
    name = "".join(part or "" for part in first.groups()) if first else ""
    return (name, NODES) if name else None


def _started_by_mpirun_itself(environment: Environment) -> bool:
    return environment.get(STARTED_BY, "").partition(";")[0].endswith(".0")
