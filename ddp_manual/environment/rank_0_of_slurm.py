"""Where the tasks of a step of Slurm meet, as far as their variables tell; ``launcher_variables`` reads their ranks.

Rank 0 is on the first host of SLURM_STEP_NODELIST, except where the user has chosen another order: that list is sorted.
With --distribution=arbitrary, and in a heterogeneous job, no variable tells the order. This was seen with Slurm 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_manual.environment.rank_0 import Environment, Identity, Sourced, check_is_found, job_port

NODES, NODE_COUNT = "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"
NODES_OF = "SLURM_JOB_NODELIST"
# The number of the step that salloc's shell is, with LaunchParameters=use_interactive_step in slurm.conf.
INTERACTIVE_STEP = "4294967290"


def is_task(environment: Environment) -> bool:
    """Return whether srun has started this process. The shell of a batch job has similar variables; if sbatch was typed
    in a task, the shell has that task's variables too."""
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NODES} <= environment.keys():
        return False
    if environment.get("SLURM_STEP_ID") == INTERACTIVE_STEP:
        return False
    if "SLURM_HET_SIZE" in environment:  # the job's variables are those of one component
        return True
    tasks, all_tasks = environment["SLURM_STEP_NUM_TASKS"], environment.get("SLURM_NTASKS", "")
    if tasks.isdigit() and all_tasks.isdigit() and int(tasks) > int(all_tasks):
        return False
    of_job = list(hosts_of(environment.get(NODES_OF, "")))
    return not of_job or first_host(environment[NODES]) in of_job


def meeting(environment: Environment) -> Identity:
    """Return where the tasks of a step meet: on the first task's host, if a variable tells it, and at a port that
    other jobs rarely have."""
    found: Identity = {}
    ordered = environment.get("SLURM_DISTRIBUTION") != "arbitrary" and environment.get("SLURM_HET_SIZE", "1") == "1"
    if ordered or environment.get(NODE_COUNT, "1") == "1":
        found["master_addr"] = Sourced(first_host(environment[NODES]), NODES)
    job, step = (environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if job.isdigit() and step.isdigit():
        found["master_port"] = Sourced(job_port(int(job), int(step)), "SLURM_JOB_ID")
    return found


def check_rank_0_is_found(environment: Environment) -> None:
    """Raise BadOption if the tasks of a step are on several hosts and could not find the first one."""
    if not is_task(environment) or environment.get(NODE_COUNT, "1") == "1":
        return
    host = meeting(environment).get("master_addr")
    first = host.value if host else ""
    own_host = environment.get("SLURMD_NODENAME") or str(first)
    shown = [name for name in (NODE_COUNT, "SLURM_DISTRIBUTION", "SLURM_HET_SIZE") if name in environment]
    check_is_found(
        host,
        host_of_rank_0=own_host if environment["SLURM_PROCID"] == "0" else None,
        is_here=own_host == first,
        spread=", ".join(f"{name}={environment[name]}" for name in shown),
        place="the first host of the step",
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
