"""Read from the variables which launcher has started this process, and as which rank or node; with each source.

A launcher starts one process per rank (torchrun, srun, mpirun, an Indexed Job), or one per node (SkyPilot, dstack,
Kubeflow's TrainJob, and srun with one task per node), which then starts the ranks of that node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_manual.environment import machine, rank_0_of_kubernetes, rank_0_of_mpirun, rank_0_of_slurm, user_variables
from ddp_manual.environment.rank_0 import Environment, Identity, Sourced
from ddp_manual.environment.rank_0_of_kubernetes import KUBERNETES
from ddp_manual.errors import BadOption

OF_RANK = ("world_size", "rank", "local_rank", "master_addr", "master_port")
# What to type in front of a rank's own command -> option -> the variable that tells it in each rank. People and other
# launchers set torchrun's too.
STARTERS = {
    typed: dict(zip(OF_RANK, variables.split(), strict=False))
    for typed, variables in (
        ("torchrun", "WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT"),
        ("mpirun", "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
        ("srun", "SLURM_STEP_NUM_TASKS SLURM_PROCID SLURM_LOCALID"),
        ("mpiexec", "PMI_SIZE PMI_RANK MPI_LOCALRANKID"),  # MPICH, Intel MPI, MVAPICH, and srun --mpi=pmi2
    )
}
TORCHRUN, PMI = STARTERS["torchrun"], STARTERS["mpiexec"]
# A rank that torchrun or this package has started has this variable, whatever has started torchrun.
STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
# prterun, and srun --mpi=pmix, start ranks over PMIx, which tells each rank only its number.
PMIX = {"rank": "PMIX_RANK"}

OF_NODE = ("nnodes", "node_rank", "nproc", "master_addr", "master_port")
# The variables of launchers that start a process per node: how many nodes, which node, how many ranks or GPUs per node,
# and the first node's address and port. A variable that holds several addresses has the first node's first.
NODE_LAUNCHERS = [
    dict(zip(OF_NODE, variables.split(), strict=False))
    for variables in (
        "PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE PET_MASTER_ADDR PET_MASTER_PORT",
        "SKYPILOT_NUM_NODES SKYPILOT_NODE_RANK SKYPILOT_NUM_GPUS_PER_NODE SKYPILOT_NODE_IPS",
        "DSTACK_NODES_NUM DSTACK_NODE_RANK DSTACK_GPUS_PER_NODE DSTACK_MASTER_NODE_IP",
    )
]
NUMBERS = ("world_size", "rank", "local_rank", "master_port", "nnodes", "node_rank")

# The processes of mpirun, of mpiexec and of their daemons, and torchrun's, which a newer torch names pt_elastic, as
# ``ps -o comm`` shows them.
_PROCESSES = re.compile(r"mpirun|mpiexec|orte|prte|hydra|torchrun|pt_elastic|python")


def of_rank(environment: Environment) -> Identity:
    """Return what the variables say of the rank that this process is; empty if no launcher has started it.

    Raises:
        BadOption: a variable should hold a number and does not, two launchers disagree, or the launcher has started
            one process for several ranks.
    """
    plain = read(TORCHRUN, environment)
    if STARTED_BY_TORCHRUN in environment and "rank" in plain:
        return plain
    # mpirun may itself run in a task of Slurm, which sets PMI's variables, or in a pod.
    by_mpirun = _of_mpirun(environment)
    inner = by_mpirun or _of_slurm_task(environment)
    others = [read(PMIX, environment)]
    if not (by_mpirun and rank_0_of_slurm.NODES in environment):
        others.insert(0, read(PMI, environment))
    if not by_mpirun:
        others.append(of_pod(environment))
    launched = [found for found in (inner, *others) if "rank" in found]
    if not launched and (found := _of_only_rank_of_node(environment, is_told=plain.keys() >= {"world_size", "rank"})):
        launched = [found]
    _check_agreement([*launched, plain])
    return {**(launched[0] if launched else {}), **plain}


def of_node(environment: Environment) -> Identity:
    """Return nnodes, node_rank, nproc, master_addr and master_port, as far as variables tell them; empty if no launcher
    has started this process for a whole node.

    Raises:
        BadOption: a variable should hold a number and does not, or Slurm or mpirun runs several such processes.
    """
    if STARTED_BY_TORCHRUN in environment:
        return {}
    by_mpirun = _of_mpirun(environment)
    if "world_size" in by_mpirun and by_mpirun["world_size"].value != 1:
        raise BadOption(
            f"mpirun runs launch {by_mpirun['world_size'].value} times",
            why=f"{by_mpirun['world_size'].assignment}: each of these processes would start a run of its own",
            next="have mpirun start each rank by itself: mpirun ... ddp-manual run ..., without launch\n"
            "or say which node this is: --nnodes, --node_rank and --master_addr",
        )
    found = _of_node_launcher(environment) or _of_slurm_node(environment)
    if found:
        plain = read(TORCHRUN, environment)
        found |= {name: plain[name] for name in ("master_addr", "master_port") if name in plain}
    return found


def of_started_rank(environment: Environment) -> Identity:
    """Return what ``of_rank`` does, for a process that is to be a rank.

    Raises:
        BadOption: as there, or this is the shell of a Slurm job of several tasks, which only srun starts.
    """
    found = of_rank(environment)
    # A job that asks for nodes only, as many arrays do, has no SLURM_NTASKS: srun then starts a task on each of them.
    variable = "SLURM_NTASKS" if "SLURM_NTASKS" in environment else "SLURM_JOB_NUM_NODES"
    tasks = environment.get(variable, "")
    is_shell = "SLURM_JOB_ID" in environment and not rank_0_of_slurm.is_task(environment)
    if "rank" not in found and is_shell and tasks.isdigit() and int(tasks) > 1:
        raise BadOption(
            f"this is the shell of Slurm's job {environment['SLURM_JOB_ID']}, and none of its {tasks} tasks",
            why=f"{variable}={tasks}, but srun has not started this process: it would be a run of one rank",
            next="put srun in front of the command, without --world_size and --rank\n"
            "or, for one rank only: --world_size 1 --rank 0",
        )
    return found


def check_rank_0_is_found(environment: Environment) -> None:
    """Raise BadOption if the ranks are on several hosts and, without --master_addr, could not find rank 0."""
    if not environment.get("MASTER_ADDR"):
        (rank_0_of_mpirun if _of_mpirun(environment) else rank_0_of_slurm).check_rank_0_is_found(environment)


def with_flags(found: Identity, flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of options, and where each comes from: a flag counts before a variable."""
    told = {name: sourced for name, sourced in found.items() if name not in flags}
    values = {**flags, **{name: value for name, (value, _) in told.items()}}
    return values, {**dict.fromkeys(flags, "flag"), **{name: f"from {source}" for name, (_, source) in told.items()}}


def nobody_says_of_how_many(rank: Sourced) -> BadOption:
    """Return the error for a rank to which neither its launcher nor anyone else has told the world size."""
    pod = rank.source == KUBERNETES["rank"]
    size = STARTERS.get(starter_of(rank.source) or "", {}).get("world_size")
    return BadOption(
        f"{rank.assignment} says which rank this is, and nothing says of how many",
        why="this pod belongs to an Indexed Job of Kubernetes, which tells a pod its index only"
        if pod
        else f"no --world_size was given, and {size} is not set"
        if size
        else f"no --world_size was given, and what sets {rank.source} sets no variable for it",
        next=("set WORLD_SIZE in the manifest to the Job's completions" if pod else "give --world_size")
        + "\nor, if each process trains by itself: --world_size 1 --rank 0",
    )


def starter_of(variable: str) -> str | None:
    """Return what to type in front of a rank's own command, such as srun, if its rank came from this variable."""
    return next((typed for typed, names in STARTERS.items() if names["rank"] == variable), None)


def launched_as() -> str | None:
    """Return ``RANK=0, WORLD_SIZE=2`` where a launcher started this process as one of several ranks, otherwise None."""
    with suppress(BadOption):
        found = of_rank(user_variables.variables())
        if "rank" in found and "world_size" in found and int(found["world_size"].value) > 1:
            return f"{found['rank'].assignment}, {found['world_size'].assignment}"
    return None


def several_hosts(world_size: int) -> str | None:
    """Return the variables that show a run on several hosts, such as ``SLURM_STEP_NUM_NODES=2``; None if none do.

    Variables of a whole batch job are not read, since many runs in a job use a single host; nor are torchrun's, which
    is often tried with two agents on one host.
    """
    if user_variables.count("SLURM_STEP_NUM_NODES") > 1:
        return user_variables.listed("SLURM_STEP_NUM_NODES")
    return rank_0_of_mpirun.several_hosts(user_variables.variables(), world_size)


def first_pod() -> Sourced | None:
    """Return the name of rank 0's pod in an Indexed Job of Kubernetes; None elsewhere."""
    index = of_pod(user_variables.variables()).get("rank")
    hosts = Path("/etc/hosts").read_text(errors="replace") if index is not None else ""
    return rank_0_of_kubernetes.first_pod(index, machine.host_name(), hosts) if index is not None else None


def process_that_set(variable: str) -> int | None:
    """Return the process of a launcher, such as mpirun, that has set a variable for this one: its nearest ancestor that
    was started without it. A shell in between has it too. None if that ancestor is gone, another user's or no launcher,
    as where a shell has set the variable."""
    import psutil  # takes 0.02 s, which --help does without

    with suppress(psutil.Error, OSError):
        ancestor = psutil.Process().parent()  # step by step: processes above the launcher may be hidden
        while ancestor is not None and variable in ancestor.environ():
            ancestor = ancestor.parent()
        return ancestor.pid if ancestor is not None and _PROCESSES.match(ancestor.name()) else None
    return None


def read(names: Mapping[str, str], environment: Environment) -> Identity:
    """Return the options whose variables are set and not empty."""
    found: Identity = {}
    for option, variable in names.items():
        if text := environment.get(variable, "").strip():
            value = _number(option, variable, text) if option in NUMBERS else text.split()[0]
            found[option] = Sourced(value, variable)
    return found


def _number(option: str, variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadOption(
            f"{variable}={text!r} is not a number",
            why=f"no --{option} was given, so the variable {variable} was read",
            next=f"give --{option}, or: unset {variable}",
        ) from None


def _of_mpirun(environment: Environment) -> Identity:
    """Return the rank of a process that mpirun or mpiexec has started, and where its ranks meet."""
    found = read(STARTERS["mpirun"], environment)
    if not found and PMI["local_rank"] in environment:  # which srun --mpi=pmi2 does not set
        found = read(PMI, environment)
    return {**found, **rank_0_of_mpirun.meeting(environment)} if "rank" in found else found


def _of_slurm_task(environment: Environment) -> Identity:
    """Return the rank of a task that srun has started; empty in the shell of a batch job."""
    if not rank_0_of_slurm.is_task(environment):
        return {}
    return {**read(STARTERS["srun"], environment), **rank_0_of_slurm.meeting(environment)}


def _of_slurm_node(environment: Environment) -> Identity:
    """Return the node of a task that srun has started as the only one on its node, in a step of several nodes."""
    if not rank_0_of_slurm.is_task(environment):
        return {}
    names = {"nnodes": "SLURM_STEP_NUM_NODES", "node_rank": "SLURM_PROCID"}
    tasks = read({"world_size": "SLURM_STEP_NUM_TASKS"}, environment)["world_size"]
    found = read(names, environment)
    nodes = int(found["nnodes"].value) if "nnodes" in found else 1
    if tasks.value == nodes:
        return {**found, **rank_0_of_slurm.meeting(environment)} if nodes > 1 else {}
    if nodes == 1 and "SLURM_PTY_PORT" in environment:  # a person's shell, from srun --pty
        return {}
    raise BadOption(
        f"Slurm runs launch {tasks.value} times on {nodes} node{'s' if nodes > 1 else ''}",
        why=f"{tasks.assignment}: each of these tasks would start all ranks of its node",
        next="start it once on each node: srun --ntasks-per-node=1 ...\n"
        "or have srun start each rank by itself: srun ddp-manual run ..., without launch\n"
        "or, on this node only: --nnodes 1",
    )


def _of_node_launcher(environment: Environment, *also: str) -> Identity:
    """Return what the variables of the first of ``NODE_LAUNCHERS`` tell of this process's node; a launcher counts only
    if they tell node_rank and the options in ``also``."""
    nodes = (read(names, environment) for names in NODE_LAUNCHERS)
    return next((found for found in nodes if found.keys() >= {"node_rank", *also}), {})


def of_pod(environment: Environment) -> Identity:
    """Return the rank of a pod of an Indexed Job, unless it was told that it is a node."""
    is_node = any(environment.get(names["node_rank"], "").strip() for names in NODE_LAUNCHERS)
    return {} if is_node else read(KUBERNETES, environment)


def _of_only_rank_of_node(environment: Environment, *, is_told: bool) -> Identity:
    """Return the rank of a process that was started as the only one of its node.

    Args:
        is_told: whether RANK and WORLD_SIZE say which rank it is, as in Kubeflow's PyTorchJob. It sets
            PET_NPROC_PER_NODE=auto too and, where the job is elastic, PET_NNODES=1:3.

    Raises:
        BadOption: each node is to have several ranks.
    """
    if is_told:
        environment = {name: text for name, text in environment.items() if not re.fullmatch(r"\d+:\d+", text)}
    found = _of_node_launcher(environment, *(() if is_told else ("nnodes",)))
    if not found.keys() & {"nnodes", "nproc"}:
        return {}
    nproc = found.pop("nproc", Sourced("1", ""))
    if nproc.value in ("0", "1"):
        names = {"nnodes": "world_size", "node_rank": "rank"}
        return {names.get(name, name): sourced for name, sourced in found.items()}
    is_alone = "nnodes" in found and found["nnodes"].value == 1  # the only process of the run, as without a launcher
    if is_alone or (is_told and not str(nproc.value).isdigit()):
        return {}
    raise BadOption(
        f"one process was started on this node for {nproc.value} ranks",
        why=", ".join(one.assignment for one in (nproc, found.get("nnodes"), found["node_rank"]) if one is not None),
        next="start all ranks of the node: ddp-manual launch ... in place of train or run\n"
        "or say which rank this is: --world_size, --rank and --master_addr",
    )


def _check_agreement(identities: Iterable[Identity]) -> None:
    """Raise BadOption if two launchers have set variables for different ranks or worlds."""
    seen: Identity = {}
    for found in identities:
        for option in ("world_size", "rank"):
            if option not in found:
                continue
            first = seen.setdefault(option, found[option])
            if first.value != found[option].value:
                raise BadOption(
                    f"{first.assignment} and {found[option].assignment} are two values for {option}",
                    why="two launchers have set variables here, or one is left of an earlier run",
                    next=f"give --{option}, or: unset {found[option].source}",
                )
