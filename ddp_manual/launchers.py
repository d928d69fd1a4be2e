"""Who am I? The only reader and writer of ``os.environ``.

A value comes from a flag, else from the variables a launcher such as torchrun has set, else from the default,
and remembers which, so that every message can say "world_size 4 (from WORLD_SIZE)".
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from ddp_manual.errors import BadOption

if TYPE_CHECKING:
    from ddp_manual.messages import Place

T = TypeVar("T")

# The variables torchrun sets for each rank, by the option they stand for.
IDENTITY_VARIABLES = {
    "world_size": "WORLD_SIZE",
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
NUMBERS = {"world_size", "rank", "local_rank", "master_port"}

# What a launcher leaves behind that would mislead a rank started below it by another one.
LAUNCHER_VARIABLES = (
    *IDENTITY_VARIABLES.values(),
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
)


TOKEN_VARIABLE = "DDP_MANUAL_TOKEN"
LONGEST_TOKEN = 4096


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value and where it came from: ``flag``, ``default`` or ``from VARIABLE``."""

    value: T
    source: str


def identity(name: str, flag: object | None) -> Setting[object] | None:
    """The flag if given, else the launcher's variable, else None (the default applies).

    Raises:
        BadOption: the variable should hold a number and does not.
    """
    if flag is not None:
        return Setting(flag, "flag")
    variable = IDENTITY_VARIABLES.get(name)
    text = os.environ.get(variable, "") if variable else ""
    if not variable or not text:
        return None
    if name not in NUMBERS:
        return Setting(text, f"from {variable}")
    try:
        return Setting(int(text), f"from {variable}")
    except ValueError:
        raise BadOption(
            f"{variable}={text!r} is not a number",
            why=f"no --{name} was given, so the variable {variable} was read",
            next=f"give --{name}, or: unset {variable}",
        ) from None


def host_name() -> str:
    return os.uname().nodename


def host_id() -> str:
    """Tells hosts apart, also containers and network namespaces of one machine: each has its own GPUs or ports."""
    parts = [host_name()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts)


def agent_store_serves(master_addr: str, master_port: int) -> bool:
    """Whether torchrun's agent already hosts a TCPStore at that address, so that rank 0 is a client too.

    The promise holds only for the address the agent exported beside it, the same test torch makes.
    """
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("MASTER_ADDR") == master_addr
        and os.environ.get("MASTER_PORT") == str(master_port)
    )


def restart_count() -> int:
    """How often torchrun has restarted this group: an old roll call must not meet a new one in the agent's store."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdigit() else 0


def agent_identity() -> str | None:
    """Tells the torchrun that has started this rank, perhaps not for the first time, from every other; None without.

    Its own TORCHELASTIC_RUN_ID is "none" unless the user names one, and then it may come again another day.
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    agent = os.getppid()
    try:
        with open(f"/proc/{agent}/stat", encoding="ascii", errors="replace") as file:
            started = file.read().rpartition(")")[2].split()[19]  # in ticks since the machine was started: proc(5)
    except FileNotFoundError:  # no Linux
        import psutil

        started = str(psutil.Process(agent).create_time())
    return f"{host_id()}/{agent}/{started}"


def launcher_hosts(world_size: int) -> str | None:
    """What a launcher's variables say if they tell of more than one host, such as ``SLURM_STEP_NUM_NODES=2``.

    A batch system's variables for the whole job are not read: inside one, a run on a single host is still common. Nor
    are torchrun's: it is often tried out with two agents on one host.
    """
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    if nodes.isdigit() and int(nodes) > 1:
        return f"SLURM_STEP_NUM_NODES={nodes}"
    here, total = (os.environ.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("LOCAL_SIZE", "SIZE"))
    if here.isdigit() and total == str(world_size) and int(here) < world_size:
        return f"OMPI_COMM_WORLD_LOCAL_SIZE={here} of OMPI_COMM_WORLD_SIZE={total}"
    return None


def agent_variables() -> str:
    """The variables that make a rank believe in an agent's store, as they are set here."""
    names = ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def token(token_file: str | None) -> bytes | None:
    """The run's token: the content of ``token_file``, else of DDP_MANUAL_TOKEN, else None.

    Raises:
        BadOption: the file cannot be read, or the token is empty or longer than 4 KiB.
    """
    if token_file is not None:
        where = f"--token_file {token_file}"
        try:
            with open(token_file, "rb") as file:
                found = file.read(LONGEST_TOKEN + 1).strip()
        except OSError as error:
            raise BadOption(
                f"{where} cannot be read",
                why=f"{error.strerror}: {error.filename}",
                next="give a file that this user may read, with the same content on every host",
            ) from None
    elif TOKEN_VARIABLE in os.environ:
        where = TOKEN_VARIABLE
        found = os.environb[TOKEN_VARIABLE.encode()].strip()
    else:
        return None
    if not 0 < len(found) <= LONGEST_TOKEN:
        raise BadOption(
            f"{where} holds no token",
            why="it is empty" if not found else f"it is longer than {LONGEST_TOKEN} bytes",
            next="make one: openssl rand -hex 32",
        )
    return found


def network_variables() -> dict[str, str]:
    """What is set of the variables that steer gloo, NCCL and torch's store; for ``check`` to show."""
    prefixes = ("GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "TORCHELASTIC_", "TP_SOCKET_")
    names = ("MASTER_ADDR", "MASTER_PORT", "USE_LIBUV", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RES_OPTIONS")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes) or name in names}


def legacy_store_requested() -> bool:
    """torch hosts the store without libuv where USE_LIBUV=0; that backend has no queues."""
    return os.environ.get("USE_LIBUV") == "0"


@contextmanager
def _changed(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """While the body runs, these variables have these values; None: they are not set."""
    before = {name: os.environ.get(name) for name in wanted}
    _put(wanted)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_of_ours: dict[str, str] = {}
"""Variables that this process has set as a rank, and neither a launcher nor the user."""


@contextmanager
def of_a_rank(
    world_size: int, rank: int, place: Place, store_address: str, store_port: int, interface: str | None
) -> Iterator[None]:
    """While the body runs, the variables are what torchrun would have set, for the user's own code and the libraries
    that look there; and gloo and NCCL use ``interface``, unless the user has already chosen one.

    Args:
        store_address, store_port: of torch's store; "" where there is none.
    """
    wanted = {
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
    }
    if store_address:
        # init_process_group() of any library then joins that store as a client.
        wanted |= {
            "MASTER_ADDR": store_address,
            "MASTER_PORT": str(store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    if interface is not None:
        # NCCL takes its variable as a prefix (eth1 also means eth10) unless it begins with "=".
        for variable, value in (("GLOO_SOCKET_IFNAME", interface), ("NCCL_SOCKET_IFNAME", f"={interface}")):
            wanted[variable] = os.environ.get(variable, value)
    if launched_as() is None:
        _of_ours.update(wanted)
    with _changed(wanted):
        try:
            yield
        finally:
            _of_ours.clear()


def launched_as() -> str | None:
    """Which of several ranks a launcher has started this process as: ``RANK=0, WORLD_SIZE=2``; None: it has not."""
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    several = found["RANK"] and found["WORLD_SIZE"].isdigit() and int(found["WORLD_SIZE"]) > 1
    if not several or found.items() <= _of_ours.items():
        return None
    return ", ".join(f"{name}={value}" for name, value in found.items())


def chosen_interfaces(backend: str) -> tuple[list[str], str]:
    """The interfaces the user has chosen for a backend, and the variable that says so; NCCL's ``^`` excludes some."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    value = os.environ.get(variable, "")
    return (value.lstrip("=").split(",") if value and not value.startswith("^") else [], variable)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port on loopback, kept for rank 0: bound but not listening, so rank 0 may listen on it and nobody else is
    given it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            # Elsewhere a bound socket keeps others from listening there, SO_REUSEADDR or not.
            holder.close()
        yield port


@contextmanager
def brief_name_lookups() -> Iterator[None]:
    """While the body runs, the resolver of a thread that looks up its first name asks no name server; or, where torch
    would print a warning of that, one, once, for a second."""
    with _changed({"RES_OPTIONS": "attempts:0" if torch_is_quiet() else "timeout:1 attempts:1"}):
        yield


@contextmanager
def wandb_files_below(folder: Path) -> Iterator[None]:
    """While the body runs, what wandb would keep in the user's home goes below ``folder``, unless variables say where.

    Images of a table that is not uploaded yet are among them.
    """
    wanted = {f"WANDB_{what.upper()}_DIR": str((folder / what).absolute()) for what in ("data", "cache")}
    with _changed({name: os.environ.get(name, value) for name, value in wanted.items()}):
        yield


def torch_is_quiet() -> bool:
    """Whether torch's C++ log leaves warnings out: not in a script that imports torch before it calls us."""
    return os.environ.get("TORCH_CPP_LOG_LEVEL") in ("ERROR", "FATAL")


def cpu_threads(local_world_size: int) -> int:
    """Threads for one of ``local_world_size`` ranks on this host: OMP_NUM_THREADS, else its share of the cores."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    return max(1, usable_cores() // local_world_size)


def usable_cores() -> int:
    """Cores this process may run on, which a container or taskset may have narrowed."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def for_worker() -> dict[str, str]:
    """The environment of a worker: ours, with torch's C++ log quiet, since our own lines say what it would."""
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}


def likely_backend(device: str, backend: str) -> str:
    """What ``auto`` will most likely become, before torch can say so: the variables of which backend are looked at."""
    gpu = device == "cuda" or (device == "auto" and os.path.exists("/dev/nvidiactl"))
    return backend if backend != "auto" else "nccl" if gpu else "gloo"


@contextmanager
def of_children(threads_shared_by: int) -> Iterator[None]:
    """While the body runs, what this process starts has our environment without another launcher's variables, and
    torch is quiet in it."""
    # Each rank would set its own share once it knows its neighbours; torch's pools are sized before that.
    threads = str(cpu_threads(threads_shared_by))
    usual = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}
    there = {name: os.environ.get(name, value) for name, value in usual.items()}
    with _changed({**there, **dict.fromkeys(LAUNCHER_VARIABLES)}):
        yield


def colour_allowed() -> bool:
    """False where the user asks for plain text (https://no-color.org) or the terminal can do no better."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def program_file() -> Path | None:
    """The Python file that was started, if it is one: not a notebook, an interactive session or a console script."""
    path = Path(sys.argv[0])
    return path if path.suffix == ".py" and path.is_file() else None


def typed_command() -> tuple[list[str], list[str]]:
    """What was typed: the program, such as ``python run_multi_gpu_train.py``, and its arguments."""
    end = len(sys.orig_argv) - (len(sys.argv) - 1)
    program, arguments = list(sys.orig_argv[:end]), list(sys.orig_argv[end:])
    script = program[-1]
    if len(program) == 2 and os.path.isabs(script) and not script.endswith(".py"):
        # A console script: the kernel put the interpreter and the full path in place of what was typed.
        program = [os.path.basename(script)]
    return program, arguments
