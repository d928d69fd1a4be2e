"""Who started this process (torchrun, Slurm, Open MPI, a person), and what it starts; only this uses ``os.environ``."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddp_manual import identity, mpirun, orphans, signals
from ddp_manual.errors import BadOption

if TYPE_CHECKING:
    from ddp_manual.messages import Place, Placed

# Variables of one launcher that would mislead the ranks that another launcher starts below it.
LAUNCHER_VARIABLES = (
    *identity.TORCHRUN.values(),
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
)
TOKEN_VARIABLE = "DDP_MANUAL_TOKEN"
LONGEST_TOKEN = 4096
# NCCL's key for TLS, which every rank must have, and nobody is shown.
SECRET_VARIABLES = {"NCCL_PSK"}
LONGEST_SHEBANG = 4096
# Holds the variables that a rank has set for gloo and NCCL, such as GLOO_SOCKET_IFNAME=lo. A process that the rank
# starts may be of another run, and would take them for its user's choice.
INTERFACES_VARIABLE = "DDP_MANUAL_INTERFACES"


def variables() -> Mapping[str, str]:
    """Return the variables of this process, by which ``identity`` knows who has started it."""
    return os.environ


def first_pod() -> identity.Sourced | None:
    """Return the name of rank 0's pod in an Indexed Job of Kubernetes: see ``identity.first_pod``; None elsewhere."""
    index = identity.of_pod(os.environ).get("rank")
    if index is None:
        return None
    return identity.first_pod(index, host_name(), Path("/etc/hosts").read_text(errors="replace"))


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


def torchrun_restarts() -> tuple[int, int]:
    """Return how often torchrun has restarted this group, and how often it may."""
    return restart_count(), _count("TORCHELASTIC_MAX_RESTARTS")


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


# The processes of mpirun, of mpiexec and of their daemons, and torchrun's Python, as ``ps -o comm`` shows them.
_LAUNCHERS = re.compile(r"mpirun|mpiexec|orte|prte|hydra|torchrun|python")


def launcher_that_set(variable: str) -> int | None:
    """Return the process of a launcher, such as mpirun, that has set a variable for this one: its nearest ancestor that
    was started without it. A shell in between has it too. None if that ancestor is gone or no launcher, as where a
    shell has set the variable; or on other systems than Linux."""
    pid = os.getppid()
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        while pid > 1:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(entry.startswith(f"{variable}=".encode()) for entry in variables):
                return pid if _LAUNCHERS.match(Path(f"/proc/{pid}/comm").read_text(errors="replace")) else None
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return None


def in_container() -> bool:
    """Return whether Docker or Podman has started this process in a container."""
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")


def launcher_hosts(world_size: int) -> str | None:
    """Return the variables that show a run on several hosts, such as ``SLURM_STEP_NUM_NODES=2``; None if none do.

    Variables of a whole batch job are not read, since many runs in a job use a single host; nor are torchrun's, which
    is often tried with two agents on one host.
    """
    if _count("SLURM_STEP_NUM_NODES") > 1:
        return _listed("SLURM_STEP_NUM_NODES")
    return mpirun.several_hosts(os.environ, world_size)


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
    """Return the variables that the user has set for gloo, NCCL and torch's store; ``check`` shows them."""
    prefixes = ("GLOO_", "NCCL_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "TORCHELASTIC_", "TP_SOCKET_")
    names = ("MASTER_ADDR", "MASTER_PORT", "USE_LIBUV", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RES_OPTIONS")
    inherited = _inherited_interfaces()
    return {
        name: "set" if name in SECRET_VARIABLES else value
        for name, value in sorted(os.environ.items())
        if (name.startswith(prefixes) or name in names) and name not in inherited
    }


def _inherited_interfaces() -> list[str]:
    """Return the variables that were set by a rank which has started this process, and not changed since."""
    pairs = (pair.partition("=") for pair in os.environ.get(INTERFACES_VARIABLE, "").split())
    return [name for name, _, value in pairs if os.environ.get(name) == value]


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
    _put(wanted)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    """Set these variables; a value of None unsets the variable."""
    for name in values:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in values.items() if value is not None})


_set_by_us: dict[str, str] = {}
"""Variables that this process has set as a rank, as opposed to a launcher or the user."""


@contextmanager
def set_rank_variables(
    place: Place, store_address: str, store_port: int, interfaces: Mapping[str, str]
) -> Iterator[None]:
    """Set the variables that torchrun would set, for the user's code and libraries.

    Args:
        store_address, store_port: where torch's store is.
        interfaces: the variables of gloo and NCCL, for those that the user has not set.
    """
    # With these, init_process_group() in any library joins the store as a client.
    wanted = {**_identity_variables(place), **_store_variables(store_address, store_port)}
    if launched_as() is None:
        _set_by_us.update(wanted)
    with _changed({**wanted, **_interface_variables(interfaces)}):
        try:
            yield
        finally:
            _set_by_us.clear()


def become_rank(placed: Placed, interfaces: Mapping[str, str], *, restarts: tuple[int, int], hosted: bool) -> None:
    """Set all the variables that torchrun sets, for good: the program of this process is a rank from now on.

    Args:
        placed: what rank 0 has said of the place: also where torch's store is, and which run this is.
        interfaces: the variables for gloo and NCCL that name the network interface.
        restarts: how often the ranks were started again, without those after a rank was lost, and how often they may
            be.
        hosted: whether the store is there already, so that rank 0 joins it as a client too.
    """
    place = placed.place
    wanted: dict[str, str | None] = {
        **_identity_variables(place),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        **_store_variables(*placed.store),
        "TORCHELASTIC_RUN_ID": placed.run.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts[0] + placed.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts[1]),
        "OMP_NUM_THREADS": str(cpu_threads(place.local_world_size)),
        **_interface_variables(interfaces),
    }
    if not hosted:
        wanted["TORCHELASTIC_USE_AGENT_STORE"] = None
    _put(wanted)


def _identity_variables(place: Place) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(place.world_size),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
    }


def _store_variables(address: str, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _interface_variables(interfaces: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables of gloo and NCCL that the user has not set, and which of them are ours."""
    chosen = network_variables()
    told = {name: value for name, value in interfaces.items() if name not in chosen}
    named = " ".join(f"{name}={value}" for name, value in told.items()) or None
    return {**dict.fromkeys(_inherited_interfaces()), **told, INTERFACES_VARIABLE: named}


def launched_as() -> str | None:
    """Return ``RANK=0, WORLD_SIZE=2`` where a launcher started this process as one of several ranks, otherwise None."""
    if _set_by_us and all(os.environ.get(name) == _set_by_us.get(name) for name in ("RANK", "WORLD_SIZE")):
        return None
    with suppress(BadOption):
        found = identity.of_rank(os.environ)
        if "rank" in found and "world_size" in found and int(found["world_size"].value) > 1:
            return f"{found['rank'].assignment}, {found['world_size'].assignment}"
    return None


def chosen_interfaces(backend: str) -> tuple[list[str], str]:
    """Return the interfaces the user chose for a backend, and the variable's name; NCCL's ``^`` only excludes some."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    value = network_variables().get(variable, "")
    return (value.lstrip("=").split(",") if value and not value.startswith("^") else [], variable)


@contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Reserve a free port for rank 0: bound but not listening, so that only rank 0 can listen on it.

    Args:
        address: an IPv4 address; "": any address of this host, of either family.
    """
    either = not address and socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if either else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if either:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind((address, 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            # On other systems a bound socket keeps rank 0 from listening there, even with SO_REUSEADDR.
            holder.close()
        yield port


def reached_at() -> tuple[str, str]:
    """Return the addresses of this host and of the other one, as ssh has connected them."""
    client, _, server, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), *["127.0.0.1"] * 3]
    return server, client


def exported(entries: Sequence[str]) -> dict[str, str]:
    """Return the variables that ``--export NAME[=VALUE],...`` names, and the run's token if it is set.

    Raises:
        BadOption: a variable is not set here.
    """
    found = {TOKEN_VARIABLE: os.environ[TOKEN_VARIABLE]} if TOKEN_VARIABLE in os.environ else {}
    # A comma may be a part of a value, unless another NAME= follows it.
    for entry in (part for text in entries for part in re.split(r",(?=[A-Za-z_]\w*=)", text)):
        names, equals, value = entry.partition("=")
        *plain, last = names.split(",")
        for name in plain if equals else [*plain, last]:
            if name not in os.environ:
                raise BadOption(
                    f"--export {name} is not set here",
                    why="without a value it is passed on as it is here",
                    next=f"export it first, or give its value: --export {name}=VALUE",
                )
            found[name] = os.environ[name]
        if equals:
            found[last] = value
    return found


def set_exported(variables: Mapping[str, str]) -> None:
    """Set the variables that ``launch --hosts`` passes on to this host."""
    _put(variables)


def torch_log_is_quiet() -> bool:
    """Return whether torch's C++ code prints no warnings, as in a worker; a script may have chosen otherwise."""
    return os.environ.get("TORCH_CPP_LOG_LEVEL") in ("ERROR", "FATAL")


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


def ranks_per_host(text: str) -> int:
    """Return how many ranks ``--nproc`` asks for: a number, ``gpu``, ``cpu`` or ``auto``, as torchrun has them.

    Raises:
        BadOption: it is something else, or there is no GPU.
    """
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    gpus = _count_gpus()
    if text == "cpu" or (text == "auto" and not gpus):
        return usable_cores()
    if text in ("gpu", "auto") and gpus:
        return gpus
    raise BadOption(
        f"--nproc {text} is not a number of ranks",
        why=f"{host_name()} shows no GPU" if text == "gpu" else "it is neither 1 or more, nor gpu, cpu or auto",
        next="say how many ranks to start on this machine, such as --nproc 2",
    )


def _count_gpus() -> int:
    """Return how many GPUs of NVIDIA's a process may use here, without loading torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = Path("/proc/driver/nvidia/gpus")
    here = len(list(driver.iterdir())) if driver.is_dir() else 0
    return here if chosen is None else min(here, len([part for part in chosen.split(",") if part.strip()]))


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: ours, with torch's C++ log quiet, since our own log lines are clearer, and
    with the mark of what it starts."""
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, orphans.MARK: str(os.getpid())}


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


@contextmanager
def cuda_is_only_looked_for() -> Iterator[None]:
    """Have ``torch.cuda.is_available`` ask the driver's library NVML in the body. By default it begins to use CUDA,
    which no fork of this process could use any more; ``import torch.utils.cpp_extension`` calls it where nvcc is."""
    with _changed({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        yield


def colour_allowed() -> bool:
    """Return False if the user asks for plain text (https://no-color.org) or the terminal shows no colour."""
    return not os.environ.get("NO_COLOR") and not terminal_is_dumb()


def columns() -> int | None:
    """Return how wide lines are to be, if somebody has said so."""
    return _count("COLUMNS") or None


def terminal_is_dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


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
    if len(program) == 2 and _starts_itself_with(*program):
        del program[0]  # the kernel has put it there, since it is what the first line of a console script names
    return [as_typed(program[0]), *program[1:]], arguments


def _starts_itself_with(interpreter: str, script: str) -> bool:
    """Return whether typing the path of ``script`` alone starts it with that interpreter."""
    if not (os.path.isabs(interpreter) and os.sep in script and os.access(script, os.X_OK)):
        return False
    with suppress(OSError), open(script, "rb") as file:
        first, second = (os.fsdecode(file.readline(LONGEST_SHEBANG)) for _ in range(2))
        # A path that is long or has a space in it is on the second line, which a shell reads as a command.
        return first.startswith("#!") and (interpreter in first[2:].split() or second.startswith("'''exec' "))
    return False


def as_typed(program: str) -> str:
    """Return the name by which a shell finds this program; its path if it finds none, or another one."""
    name = os.path.basename(program)
    return name if shutil.which(name) == program else program


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


def become_new_python(descriptors: Sequence[int], parent: int, ignored: Iterable[int]) -> NoReturn:
    """Become what ``start_python`` has made of this program, with other descriptors; whoever watches this process sees
    the same one.

    Args:
        descriptors: those that are inherited.
        ignored: what ``signals.ignored_at_start`` has returned.
    """
    who = [word for word in sys.argv[1:] if "=" in word]
    with signals.block_in_children():
        signals.handle_as_any_program(ignored)
        os.execv(sys.executable, [sys.executable, sys.argv[0], *map(str, descriptors), str(parent), *who])
