"""Who started this process (torchrun, Slurm, Open MPI, a person), and what it starts; only this uses ``os.environ``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual import signals
from ddp_manual.errors import BadOption

if TYPE_CHECKING:
    from ddp_manual.messages import Place

# Option -> the variable that torchrun sets for it in each rank.
IDENTITY_VARIABLES = {
    "world_size": "WORLD_SIZE",
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}

# Variables of one launcher that would mislead the ranks that another launcher starts below it.
LAUNCHER_VARIABLES = (
    *IDENTITY_VARIABLES.values(),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
)
TOKEN_VARIABLE = "DDP_MANUAL_TOKEN"
LONGEST_TOKEN = 4096


def identity(option: str) -> str | int | None:
    """Return an option's value from its launcher variable, or None if the variable is unset or empty.

    Raises:
        BadOption: the variable should hold a number and does not.
    """
    variable = IDENTITY_VARIABLES[option]
    text = os.environ.get(variable)
    if not text or option == "master_addr":
        return text or None
    try:
        return int(text)
    except ValueError:
        raise BadOption(
            f"{variable}={text!r} is not a number",
            why=f"no --{option} was given, so the variable {variable} was read",
            next=f"give --{option}, or: unset {variable}",
        ) from None


def _count(variable: str) -> int:
    """Return the whole number that a variable holds; 0 if it holds none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def _listed(*variables: str) -> str:
    """Return ``RANK=0, WORLD_SIZE=2``, without variables that are not set."""
    return ", ".join(f"{name}={os.environ[name]}" for name in variables if name in os.environ)


def host_name() -> str:
    return os.uname().nodename


def host_id() -> str:
    """Identify this host; containers and network namespaces of one machine differ, since GPUs or ports do."""
    parts = [host_name()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts)


def torchrun_store_at(master_addr: str, master_port: int) -> bool:
    """Return whether torchrun hosts a TCPStore at that address, so that rank 0 is a client too.

    Like torch, trust the variable only for the address that torchrun exported beside it.
    """
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("MASTER_ADDR") == master_addr
        and os.environ.get("MASTER_PORT") == str(master_port)
    )


def restart_count() -> int:
    """Return how often torchrun has restarted this group; keys of an earlier roll call may still be in its store."""
    return _count("TORCHELASTIC_RESTART_COUNT")


def torchrun_identity() -> str | None:
    """Identify the torchrun process that started this rank, across its restarts; None without torchrun.

    TORCHELASTIC_RUN_ID does not: it is "none" unless the user chooses one, and may be chosen again another day.
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    agent = os.getppid()
    try:
        with open(f"/proc/{agent}/stat", encoding="ascii", errors="replace") as file:
            started = file.read().rpartition(")")[2].split()[19]  # in ticks since boot: proc(5)
    except FileNotFoundError:  # not Linux
        import psutil

        started = str(psutil.Process(agent).create_time())
    return f"{host_id()}/{agent}/{started}"


def launcher_hosts(world_size: int) -> str | None:
    """Return the variables that show a run on several hosts, such as ``SLURM_STEP_NUM_NODES=2``; None if none do.

    Variables of a whole batch job are not read, since many runs in a job use a single host; nor are torchrun's, which
    is often tried with two agents on one host.
    """
    if _count("SLURM_STEP_NUM_NODES") > 1:
        return _listed("SLURM_STEP_NUM_NODES")
    here, total = "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"
    if 0 < _count(here) < _count(total) == world_size:
        return f"{_listed(here)} of {_listed(total)}"
    return None


def torchrun_variables() -> str:
    """Return the variables that point to torchrun's store, as they are set here."""
    return _listed("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")


def token(token_file: str | None) -> bytes | None:
    """Return the run's token from ``token_file``, otherwise from DDP_MANUAL_TOKEN, otherwise None.

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
    """Return the variables that are set for gloo, NCCL and torch's store; ``check`` shows them."""
    prefixes = ("GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "TORCHELASTIC_", "TP_SOCKET_")
    names = ("MASTER_ADDR", "MASTER_PORT", "USE_LIBUV", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RES_OPTIONS")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes) or name in names}


def legacy_store_requested() -> bool:
    """Return whether USE_LIBUV=0 asks for torch's store without libuv, which has no queues."""
    return os.environ.get("USE_LIBUV") == "0"


@contextmanager
def _changed(wanted: Mapping[str, str | None], **usual: str) -> Iterator[None]:
    """Set these variables while the body runs; a value of None unsets the variable.

    Args:
        usual: values for variables that are not set.
    """
    wanted = {**wanted, **{name: os.environ.get(name, value) for name, value in usual.items()}}
    before = {name: os.environ.get(name) for name in wanted}

    def put(values: Mapping[str, str | None]) -> None:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in values.items() if value is not None})

    put(wanted)
    try:
        yield
    finally:
        put(before)


_set_by_us: dict[str, str] = {}
"""Variables that this process has set as a rank, as opposed to a launcher or the user."""


@contextmanager
def set_rank_variables(
    world_size: int, rank: int, place: Place, store_address: str, store_port: int, interface: str | None
) -> Iterator[None]:
    """Set the variables that torchrun would set, for the user's code and libraries, and have gloo and NCCL use
    ``interface`` unless the user has chosen one.

    Args:
        store_address, store_port: where torch's store is; "" without a store.
    """
    wanted = {
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
    }
    if store_address:
        # With these, init_process_group() in any library joins the store as a client.
        wanted |= {
            "MASTER_ADDR": store_address,
            "MASTER_PORT": str(store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    # NCCL takes its variable as a prefix (eth1 also means eth10) unless it begins with "=".
    usual = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    if launched_as() is None:
        _set_by_us.update(wanted)
    with _changed(wanted, **usual):
        try:
            yield
        finally:
            _set_by_us.clear()


def launched_as() -> str | None:
    """Return ``RANK=0, WORLD_SIZE=2`` where a launcher started this process as one of several ranks, otherwise None."""
    names = ("RANK", "WORLD_SIZE")
    if not os.environ.get("RANK") or _count("WORLD_SIZE") < 2:
        return None
    set_here = all(_set_by_us.get(name) == os.environ[name] for name in names)
    return None if set_here else _listed(*names)


def chosen_interfaces(backend: str) -> tuple[list[str], str]:
    """Return the interfaces the user chose for a backend, and the variable's name; NCCL's ``^`` only excludes some."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    value = os.environ.get(variable, "")
    return (value.lstrip("=").split(",") if value and not value.startswith("^") else [], variable)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free loopback port for rank 0: bound but not listening, so that only rank 0 can listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            # On other systems a bound socket keeps rank 0 from listening there, even with SO_REUSEADDR.
            holder.close()
        yield port


@contextmanager
def brief_name_lookups() -> Iterator[None]:
    """Keep a thread that looks up its first name in the body from asking a name server; where torch would print a
    warning about that, allow one attempt of 1 s."""
    # A script may have imported torch, with warnings in torch's C++ log, before it calls us.
    quiet = os.environ.get("TORCH_CPP_LOG_LEVEL") in ("ERROR", "FATAL")
    with _changed({"RES_OPTIONS": "attempts:0" if quiet else "timeout:1 attempts:1"}):
        yield


@contextmanager
def wandb_files_below(folder: Path) -> Iterator[None]:
    """Keep wandb's files, such as images not uploaded yet, below ``folder`` instead of the user's home, unless the
    user's variables say where."""
    usual = {f"WANDB_{what.upper()}_DIR": str((folder / what).absolute()) for what in ("data", "cache")}
    with _changed({}, **usual):
        yield


def cpu_threads(local_world_size: int) -> int:
    """Return the threads for one of ``local_world_size`` ranks: OMP_NUM_THREADS, otherwise its share of the cores."""
    return _count("OMP_NUM_THREADS") or max(1, usable_cores() // local_world_size)


def malloc_is_tuned() -> bool:
    """Return whether the user has chosen how glibc's malloc keeps memory."""
    return not {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}.isdisjoint(os.environ)


def cache_folder() -> Path:
    """Return ``ddp_manual`` in the user's folder for caches, whether it exists or not; relative if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ddp_manual"


def usable_cores() -> int:
    """Return how many cores this process may use, which a container or taskset may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: ours, with torch's C++ log quiet, since our own log lines are clearer."""
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}


def likely_backend(device: str, backend: str) -> str:
    """Guess what ``auto`` will become before torch is loaded, to know which backend's variables apply."""
    gpu = device == "cuda" or (device == "auto" and os.path.exists("/dev/nvidiactl"))
    return backend if backend != "auto" else "nccl" if gpu else "gloo"


@contextmanager
def clean_variables(threads_shared_by: int) -> Iterator[None]:
    """Start processes in the body without another launcher's variables and with a quiet torch."""
    # A rank sets its share of the cores once it knows its neighbours, but torch sizes its thread pools before that.
    threads = str(cpu_threads(threads_shared_by))
    usual = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}
    with _changed(dict.fromkeys(LAUNCHER_VARIABLES), **usual):
        yield


def colour_allowed() -> bool:
    """Return False if the user asks for plain text (https://no-color.org) or the terminal shows no colour."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def program_file() -> Path | None:
    """Return the Python file that was started; None in a notebook, an interactive session or a console script."""
    path = Path(sys.argv[0])
    return path if path.suffix == ".py" and path.is_file() else None


def typed_command() -> tuple[list[str], list[str]]:
    """Return what was typed: the program, such as ``python run_multi_gpu_train.py``, and its arguments.

    Where a program runs another one, as a debugger does by way of runpy, it is the other one's part of what was typed.
    """
    end = len(sys.orig_argv) - (len(sys.argv) - 1)
    program, arguments = list(sys.orig_argv[:end]), list(sys.orig_argv[end:])
    if not program or arguments != sys.argv[1:]:
        program, arguments = [sys.orig_argv[0], sys.argv[0]], sys.argv[1:]
    script = program[-1]
    if len(program) == 2 and os.path.isabs(script) and not script.endswith(".py"):
        # A console script: the kernel replaced what was typed by the interpreter and the full path.
        program = [os.path.basename(script)]
    return program, arguments


def start_python(
    program: Path, descriptors: Sequence[int], who: Sequence[str] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a program of this package, which inherits ``descriptors``. Its arguments are their numbers, our pid and
    ``who``.

    It starts with signals blocked until it can handle them.
    """
    command = [sys.executable, str(program), *map(str, descriptors), str(os.getpid()), *who]
    with signals.block_in_children():
        return subprocess.Popen(command, pass_fds=descriptors, env=worker_environment(), **options)
