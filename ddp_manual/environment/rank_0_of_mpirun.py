"""Where the ranks that mpirun has started meet, as far as their variables tell.

Open MPI never says where rank 0 is. But every rank knows the host of mpirun itself, and Open MPI puts its ranks there
before it uses any other host, in whatever order the hosts are given (seen with 4.1.4 and 5.0.11). So rank 0 is there,
unless mpirun's host runs no rank at all, as a login node, or a rankfile says otherwise. Rank 0 itself sees that, since
each rank knows whether mpirun or a daemon of it on another host has started it.
MPICH and Intel MPI tell a rank about its own host only.
"""

from __future__ import annotations

import os
import re

from ddp_manual.environment.rank_0 import Environment, Identity, Sourced, check_is_found, job_port

# Variables: a process's rank, the number of ranks on its host, and in all; then the command that sets MASTER_ADDR.
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


def meeting(environment: Environment) -> Identity:
    """Return where the ranks of mpirun or mpiexec meet, as far as variables tell."""
    for _, of_host, of_run, _ in KINDS:
        if here := environment.get(of_host, ""):
            is_alone = here == environment.get(of_run, "")
            host = Sourced("127.0.0.1", of_host) if is_alone else _mpiruns_host(environment)
            return {"master_addr": host, **_port(environment)} if host else {}
    return {}


def several_hosts(environment: Environment, world_size: int) -> str | None:
    """Return the variables that show that the ranks of this world are on several hosts; None if none do."""
    for _, of_host, of_run, _ in KINDS:
        here, total = environment.get(of_host, ""), environment.get(of_run, "")
        if here.isdigit() and total == str(world_size) and int(here) < world_size:
            return f"{of_host}={here} of {of_run}={total}"
    return None


def check_rank_0_is_found(environment: Environment) -> None:
    """Raise BadOption if mpirun has started ranks on several hosts that could not find rank 0."""
    rank, _, of_run, told = next((kind for kind in KINDS if kind[0] in environment), ("", "", "", ""))
    world_size = environment.get(of_run, "")
    spread = several_hosts(environment, int(world_size)) if world_size.isdigit() else None
    if spread is None:
        return
    check_is_found(
        meeting(environment).get("master_addr"),
        host_of_rank_0=os.uname().nodename if environment[rank] == "0" else None,
        is_here=_started_by_mpirun_itself(environment),
        spread=spread,
        place="mpirun's host",
        told=told,
        moved="start mpirun on {}",
    )


def _port(environment: Environment) -> Identity:
    """Return a port made of a number that no other job of this host has, if a variable tells such a number."""
    text = environment.get(NAMESPACE, "")
    if match := _NAMESPACE_5.fullmatch(text):
        return {"master_port": Sourced(job_port(int(match["pid"])), NAMESPACE)}
    if text.isdigit():  # of Open MPI 4: its upper half is a digest of mpirun's host, plus its process id
        return {"master_port": Sourced(job_port(int(text) >> 16), NAMESPACE)}
    text = environment.get("I_MPI_HYDRA_UUID", "").replace("-", "")
    if re.fullmatch(r"[0-9a-fA-F]{1,64}", text):
        return {"master_port": Sourced(job_port(int(text, 16)), "I_MPI_HYDRA_UUID")}
    return {}


def _mpiruns_host(environment: Environment) -> Sourced | None:
    """Return the name or address of mpirun's host."""
    if match := _NAMESPACE_5.fullmatch(environment.get(NAMESPACE, "")):
        return Sourced(match["host"], NAMESPACE)
    uri = environment.get(HNP_URI, "")
    for protocol in (r"tcp://([^:;]+):", r"tcp6://\[([^\];]+)\]:"):
        match = re.search(protocol, uri)
        if match and "," not in match[1]:
            return Sourced(match[1], HNP_URI)
    # With several addresses, one of them may be that of a bridge for containers: the name is meant for others.
    if _started_by_mpirun_itself(environment) and (own := environment.get("PMIX_HOSTNAME")):
        return Sourced(own, "PMIX_HOSTNAME")
    first = re.match(r"([^,\[@]*)(?:\[\d+:(\d+)[^\]]*\]([^,@]*))?", environment.get(NODES, ""))
    name = "".join(part or "" for part in first.groups()) if first else ""
    return Sourced(name, NODES) if name else None


def _started_by_mpirun_itself(environment: Environment) -> bool:
    return environment.get(STARTED_BY, "").partition(";")[0].endswith(".0")
