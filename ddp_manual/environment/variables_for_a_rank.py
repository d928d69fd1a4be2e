"""The variables by which a program and its libraries find out which rank they are, as torchrun sets them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_manual.environment import user_variables
from ddp_manual.environment.launcher_variables import TORCHRUN

if TYPE_CHECKING:
    from ddp_manual.messages import Placed

# Variables of one launcher that would mislead the ranks that another launcher starts below it.
LAUNCHER_VARIABLES = (
    *TORCHRUN.values(),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
)


@contextmanager
def changed(wanted: Mapping[str, str | None], **usual: str) -> Iterator[None]:
    """Set these variables while the body runs; a value of None unsets the variable.

    Args:
        usual: values for variables that are not set.
    """
    wanted = {**wanted, **{name: os.environ.get(name, value) for name, value in usual.items()}}
    before = {name: os.environ.get(name) for name in wanted}
    put(wanted)
    try:
        yield
    finally:
        put(before)


def put(values: Mapping[str, str | None]) -> None:
    """Set these variables; a value of None unsets the variable."""
    for name in values:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in values.items() if value is not None})


def set_rank_variables(placed: Placed, interfaces: Mapping[str, str]) -> AbstractContextManager[None]:
    """Set the variables that torchrun would set, for the user's code and libraries, while the body runs.

    Args:
        interfaces: the variables of gloo and NCCL, for those that the user has not set.
    """
    return changed(_variables_of(placed, interfaces))


def become_rank(placed: Placed, interfaces: Mapping[str, str], *, restarts: tuple[int, int], hosted: bool) -> None:
    """Set all the variables that torchrun sets, for good: the program of this process is a rank from now on.

    Args:
        placed: what rank 0 has said of the place: also where torch's store is, and which run this is.
        interfaces: the variables for gloo and NCCL that name the network interface.
        restarts: how often the ranks were started again, other than after the loss of a rank, and how often they may be
            started again.
        hosted: whether the store is there already, so that rank 0 joins it as a client too.
    """
    place = placed.place
    wanted: dict[str, str | None] = {
        **_variables_of(placed, interfaces),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "TORCHELASTIC_RUN_ID": placed.run.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts[0] + placed.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts[1]),
        "OMP_NUM_THREADS": user_variables.omp_num_threads(place.cores_shared_by),
    }
    if not hosted:
        wanted["TORCHELASTIC_USE_AGENT_STORE"] = None
    put(wanted)


def _variables_of(placed: Placed, interfaces: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables from which init_process_group() of any library learns its rank and torch's store, those of
    gloo and NCCL that the user has not set, and which of these are ours."""
    place, (address, port) = placed.place, placed.store
    chosen = user_variables.network_variables()
    told = {name: value for name, value in interfaces.items() if name not in chosen}
    named = " ".join(f"{name}={value}" for name, value in told.items()) or None
    return {
        "WORLD_SIZE": str(place.world_size),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **dict.fromkeys(user_variables.inherited_interfaces()),
        **told,
        user_variables.INTERFACES_VARIABLE: named,
    }


def clean_variables(cores_shared_by: int) -> AbstractContextManager[None]:
    """Start processes in the body without another launcher's variables and with a quiet torch."""
    # A rank sets its share of the cores once it knows its neighbours, but torch sizes its thread pools before that.
    threads = str(user_variables.cpu_threads(cores_shared_by))
    usual = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}
    return changed(dict.fromkeys(LAUNCHER_VARIABLES), **usual)


def cuda_is_only_looked_for() -> AbstractContextManager[None]:
    """Have ``torch.cuda.is_available`` ask the driver's library NVML in the body. By default it begins to use CUDA,
    which no fork of this process could use any more; ``import torch.utils.cpp_extension`` calls it where nvcc is."""
    return changed({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})


def wandb_files_below(folder: Path) -> AbstractContextManager[None]:
    """Keep wandb's files, such as images not uploaded yet, below ``folder`` instead of the user's home, unless the
    user's variables say where."""
    usual = {f"WANDB_{what.upper()}_DIR": str((folder / what).absolute()) for what in ("data", "cache")}
    return changed({}, **usual)
