"""What the user's variables ask for: the token, gloo, NCCL and torch, colours, and what --export passes on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ddp_manual.environment import machine
from ddp_manual.errors import BadOption

TOKEN_VARIABLE = "DDP_MANUAL_TOKEN"
LONGEST_TOKEN = 4096
# NCCL's key for TLS, which every rank must have, and nobody is shown.
SECRET_VARIABLES = {"NCCL_PSK"}
# Holds the variables that a rank has set for gloo and NCCL, such as GLOO_SOCKET_IFNAME=lo. A process that the rank
# starts may be of another run, and would take them for its user's choice.
INTERFACES_VARIABLE = "DDP_MANUAL_INTERFACES"


def variables() -> Mapping[str, str]:
    """Return the variables of this process, by which ``launcher_variables`` knows who has started it."""
    return os.environ


def count(variable: str) -> int:
    """Return the whole number that a variable holds, or that its list begins with; 0 if it holds none."""
    text = os.environ.get(variable, "").partition(",")[0]
    return int(text) if text.isdigit() else 0


def listed(*variables: str) -> str:
    """Return ``RANK=0, WORLD_SIZE=2``, without variables that are not set."""
    return ", ".join(f"{name}={os.environ[name]}" for name in variables if name in os.environ)


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
    inherited = inherited_interfaces()
    return {
        name: "set" if name in SECRET_VARIABLES else value
        for name, value in sorted(os.environ.items())
        if (name.startswith(prefixes) or name in names) and name not in inherited
    }


def inherited_interfaces() -> list[str]:
    """Return the variables that were set by a rank which has started this process, and not changed since."""
    pairs = (pair.partition("=") for pair in os.environ.get(INTERFACES_VARIABLE, "").split())
    return [name for name, _, value in pairs if os.environ.get(name) == value]


def chosen_interfaces(backend: str) -> tuple[list[str], str]:
    """Return the interfaces the user chose for a backend, and the variable's name; NCCL's ``^`` only excludes some."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    value = network_variables().get(variable, "")
    return (value.lstrip("=").split(",") if value and not value.startswith("^") else [], variable)


def legacy_store_requested() -> bool:
    """Return whether USE_LIBUV=0 asks for torch's store without libuv, which has no queues."""
    return os.environ.get("USE_LIBUV") == "0"


def torch_log_is_quiet() -> bool:
    """Return whether torch's C++ code prints no warnings, as in a worker; a script may have chosen otherwise."""
    return os.environ.get("TORCH_CPP_LOG_LEVEL") in ("ERROR", "FATAL")


def malloc_is_tuned() -> bool:
    """Return whether the user has chosen how glibc's malloc keeps memory."""
    return not {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}.isdisjoint(os.environ)


def cpu_threads(cores_shared_by: int) -> int:
    """Return the threads for one of the ranks that share these cores: OMP_NUM_THREADS, otherwise its share of them."""
    return count("OMP_NUM_THREADS") or max(1, machine.usable_cores() // cores_shared_by)


def omp_num_threads(cores_shared_by: int) -> str:
    """Return OMP_NUM_THREADS, which may be a list; if it is not set, the threads for one of these ranks."""
    return os.environ.get("OMP_NUM_THREADS") or str(cpu_threads(cores_shared_by))


def colour_allowed() -> bool:
    """Return False if the user asks for plain text (https://no-color.org) or the terminal shows no colour."""
    return not os.environ.get("NO_COLOR") and not terminal_is_dumb()


def columns() -> int | None:
    """Return the width of lines that COLUMNS asks for; None if it is not set."""
    return count("COLUMNS") or None


def terminal_is_dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


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
        for name in [*plain, last]:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise BadOption(
                    f"--export {name!r} is no name of a variable",
                    why=f"--export {entry} names it",
                    next="give --export NAME, NAME=VALUE, or several with commas between them",
                )
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
