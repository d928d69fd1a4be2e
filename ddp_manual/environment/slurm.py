"""Where the tasks of a step of Slurm meet, as far as their variables tell.

Rank 0 is on the first host of SLURM_STEP_NODELIST, except where the user has chosen another order: that list is sorted.
With --distribution=arbitrary, and in a heterogeneous job, no variable tells the order. This was seen with Slurm 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ddp_manual.environment.rank_0 import Search

Environment = Mapping[str, str]

NODES, NODE_COUNT = "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"
NODES_OF = "SLURM_JOB_NODELIST"


def is_task(environment: Environment) -> bool:
    """Return whether srun has started this process, which the shell of a batch job only resembles: more so where sbatch
    was typed in a task, whose variables it then has."""
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NODES} <= environment.keys():
        return False
    if "SLURM_HET_SIZE" in environment:  # the job's variables are those of one component
        return True
    tasks, all_tasks = environment["SLURM_STEP_NUM_TASKS"], environment.get("SLURM_NTASKS", "")
    if tasks.isdigit() and all_tasks.isdigit() and int(tasks) > int(all_tasks):
        return False
    of_job = list(hosts_of(environment.get(NODES_OF, "")))
    return not of_job or first_host(environment[NODES]) in of_job


def host_of_rank_0(environment: Environment) -> tuple[str, str] | None:
    """Return the host of a step's first task, and its variable; None if no variable tells."""
    ordered = environment.get("SLURM_DISTRIBUTION") != "arbitrary" and environment.get("SLURM_HET_SIZE", "1") == "1"
    if environment.get(NODE_COUNT, "1") != "1" and not ordered:
        return None
    return first_host(environment[NODES]), NODES


def search_for_rank_0(environment: Environment) -> Search | None:
    """Return how a step's tasks find the first one; None where they are on one host, or srun has started none."""
    if not is_task(environment) or environment.get(NODE_COUNT, "1") == "1":
        return None
    host, source = host_of_rank_0(environment) or (None, "")
    own_host = environment.get("SLURMD_NODENAME") or host or ""
    return Search(
        is_rank_0=environment["SLURM_PROCID"] == "0",
        own_host=own_host,
        spread=", ".join(
            f"{name}={environment[name]}"
            for name in (NODE_COUNT, "SLURM_DISTRIBUTION", "SLURM_HET_SIZE")
            if name in environment
        ),
        place="the first host of the step",
        host=host,
        source=source,
        is_here=own_host == host,
        told="MASTER_ADDR={} srun ...",
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it, such as ``n05`` of ``n[05-07,9],m[1-2]-ib``."""
    return next(hosts_of(hosts), "")


def hosts_of(hosts: str) -> Iterator[str]:
    """Return the hosts of a list as Slurm writes it."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        before, bracket, rest = part.partition("[")
        if not bracket:
            yield part
            continue
        numbers, _, after = rest.partition("]")
        for piece in numbers.split(","):
            first, _, last = piece.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield from hosts_of(f"{before}{number:0{len(first)}}{after}")
