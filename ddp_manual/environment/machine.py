"""This machine: its name, its cores and GPUs, a free port, how ssh has reached it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_manual import gpus
from ddp_manual.errors import BadOption


def host_name() -> str:
    return os.uname().nodename


def host_id() -> str:
    """Identify this host. Containers and network namespaces of one machine differ: they have other GPUs or ports."""
    parts = [host_name()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts)


def own_pid() -> int:
    """Return the pid of this process."""
    return os.getpid()


def in_container() -> bool:
    """Return whether Docker or Podman has started this process in a container."""
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")


def reached_at() -> tuple[str, str]:
    """Return the addresses of this host and of the client of its ssh session; without ssh, 127.0.0.1."""
    client, _, server, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), *["127.0.0.1"] * 3]
    return server, client


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


def cores() -> list[int]:
    """Return the numbers of the cores that this process may use, which a container or taskset may limit."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(cores())


def ranks_per_host(text: str) -> int:
    """Return how many ranks ``--nproc`` asks for: a number, ``gpu``, ``cpu`` or ``auto``, as torchrun has them.

    Raises:
        BadOption: it is something else, or there is no GPU.
    """
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    found = gpus.count(chosen_gpus()) if text in ("gpu", "auto") else 0
    if text == "cpu" or (text == "auto" and not found):
        return usable_cores()
    if found:
        return found
    raise BadOption(
        f"--nproc {text} is not a number of ranks",
        why=f"{host_name()} shows no GPU" if text == "gpu" else "it is neither 1 or more, nor gpu, cpu or auto",
        next="say how many ranks to start on this machine, such as --nproc 2",
    )


def chosen_gpus() -> str | None:
    """Return CUDA_VISIBLE_DEVICES; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def likely_backend(device: str, backend: str) -> str:
    """Return the backend whose variables apply; for ``auto`` guess it, since torch is not loaded yet."""
    gpu = device == "cuda" or (device == "auto" and gpus.are_here())
    return backend if backend != "auto" else "nccl" if gpu else "gloo"


def cache_folder() -> Path:
    """Return ``ddp_manual`` in the user's folder for caches, whether it exists or not; relative if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ddp_manual"


def runtime_folder() -> Path:
    """Return the folder of this user's notes about processes of this host."""
    from tempfile import gettempdir  # here, since most commands need no such folder

    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    own = os.path.isdir(runtime) and os.access(runtime, os.W_OK | os.X_OK)
    return Path(runtime) / "ddp_manual" if own else Path(gettempdir()) / f"ddp_manual-{os.geteuid()}"
