"""Whether a process belongs with rank 0: pure comparisons of what each says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    DeviceMissing,
    DeviceTaken,
    LoopbackMaster,
    VersionMismatch,
    WorldSizeMismatch,
)
from ddp_manual.rendezvous.entries import Entry, Hello, Place

Options = Mapping[str, Sequence[Any]]
"""Option -> [value, source]."""

# Seconds. Nothing here depends on clocks that agree, but logs of two hosts are then hard to read side by side.
CLOCKS_AGREE_WITHIN = 30.0


def unlike(entry: Entry, rank_0: Entry, run: Hello, now: float) -> tuple[DdpManualError | None, list[str]]:
    """Why a process cannot be a rank of this run (None if it can), and what is odd about it but no obstacle.

    Args:
        now: rank 0's clock when the request came, in seconds since the epoch.
    """
    warnings = [*_clock_warnings(entry, rank_0, now)]
    if entry.world_size != run.world_size:
        return _other_world_size(entry, run), warnings
    if entry.host_id != rank_0.host_id and run.only_on_its_host:
        return _loopback(entry, run), warnings
    if all(getattr(entry, name) == getattr(rank_0, name) for name in ("versions", "code", "device", "options")):
        return None, warnings  # as nearly all are, and part by part below it takes ten times as long
    for difference in (_other_versions(entry, rank_0), _other_code(entry, rank_0)):
        if difference is not None and (entry.allow_mismatch or rank_0.allow_mismatch):
            warnings.append(f"{difference.what} (allowed)")
        elif difference is not None:
            return difference, warnings
    return _other_device(entry, rank_0) or _other_options(entry, rank_0, run), warnings


def _clock_warnings(entry: Entry, rank_0: Entry, now: float) -> Iterable[str]:
    ahead = entry.since - now
    if abs(ahead) > CLOCKS_AGREE_WITHIN and entry.host_id != rank_0.host_id:
        yield f"the clock of {entry.host} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} {rank_0.host}'s"


def _other_world_size(entry: Entry, run: Hello) -> WorldSizeMismatch:
    command = run.command_for(entry.rank if entry.rank < run.world_size else run.world_size - 1)
    return WorldSizeMismatch(
        f"{entry.who()} expects {entry.world_size} ranks, rank 0 expects {run.world_size}",
        why=f"rank 0 runs on {run.host} (pid {run.pid}) with world_size {run.world_size}; "
        f"rank {entry.rank} has world_size {entry.world_size} ({entry.world_size_source})",
        next=command,
    )


def _loopback(entry: Entry, run: Hello) -> LoopbackMaster:
    return LoopbackMaster(
        f"rank 0 listens on {run.address}, which is not for other hosts, and rank {entry.rank} is on {entry.host}",
        why=f"{entry.who()} came through a tunnel to {run.host}; the ranks could not connect to one another",
        next=f"give every rank an address of {run.host} that {entry.host} can reach as --master_addr",
    )


def _other_versions(entry: Entry, rank_0: Entry) -> VersionMismatch | None:
    names = ["python", "torch"]
    if _backend(rank_0) == "nccl":
        names += ["cuda", "nccl"]

    def compared(versions: Mapping[str, str | None], name: str) -> str | None:
        version = versions.get(name)
        # gloo speaks the same whatever CUDA a torch was built for.
        return version.split("+")[0] if version and name == "torch" and "cuda" not in names else version

    differing = [name for name in names if compared(entry.versions, name) != compared(rank_0.versions, name)]
    if not differing:
        return None
    mend = {
        "python": f"use Python {rank_0.versions.get('python')} on {entry.host}",
        "torch": f"on {entry.host}: pip install torch=={compared(rank_0.versions, 'torch')}",
    }
    return VersionMismatch(
        f"{entry.who()} has other versions than rank 0: {', '.join(differing)}",
        why="\n".join(
            f"{name}: rank 0 ({rank_0.host}) has {rank_0.versions.get(name) or 'none'}, "
            f"rank {entry.rank} has {entry.versions.get(name) or 'none'}"
            for name in differing
        ),
        next=f"{mend.get(differing[0], 'install the same torch on every host')}\n"
        "or go on with a warning: --allow_mismatch (in a script: allow_mismatch=True)",
    )


def _other_code(entry: Entry, rank_0: Entry) -> ConfigMismatch | None:
    differing = [part for part in sorted({*rank_0.code, *entry.code}) if rank_0.code.get(part) != entry.code.get(part)]
    if not differing:
        return None
    return ConfigMismatch(
        f"{entry.who()} runs other code than rank 0: {', '.join(differing)}",
        why="\n".join(
            f"{part}: rank 0 ({rank_0.host}) has digest {rank_0.code.get(part, 'none')}, "
            f"rank {entry.rank} has {entry.code.get(part, 'none')}"
            for part in differing
        ),
        next=f"bring the code on {entry.host} to what {rank_0.host} has (git pull, pip install)\n"
        "or go on with a warning: --allow_mismatch (in a script: allow_mismatch=True)",
    )


def _other_device(entry: Entry, rank_0: Entry) -> DeviceMissing | None:
    """Left to themselves one host found a GPU and the other did not: that one has a fault, not other options."""
    chosen = {one.options.get("device", (None, "flag"))[1] for one in (entry, rank_0)}
    if entry.device == rank_0.device or chosen != {"default"}:
        return None
    without, having = (entry, rank_0) if entry.device == "cpu" else (rank_0, entry)
    return DeviceMissing(
        f"{without.who()} has no GPU, {having.who()} has",
        why=f"--device auto chose {without.device} on {without.host} and {having.device} on {having.host}",
        next=f"look at nvidia-smi on {without.host}, or start every rank with --device cpu",
    )


def _other_options(entry: Entry, rank_0: Entry, run: Hello) -> ConfigMismatch | None:
    differing = _differing(rank_0.options, entry.options)
    if not differing:
        return None
    if "command" in differing:
        differing = ["command"]  # of which all the other differences follow
    next = run.command_for(entry.rank)
    if {"device", "backend"} & set(differing):
        # Left to themselves the two hosts chose differently, and would again.
        next = "start every rank with the same --device and --backend, such as: --device cpu --backend gloo"
    if "address_family" in differing:
        next = "name interfaces of one address family on both: GLOO_SOCKET_IFNAME=<interface>"
    if all(name.endswith(" source") for name in differing):
        next = f"the same options name other code: bring that on {entry.host} to what {run.host} has"
    return ConfigMismatch(
        f"{entry.who()} was started with other options than rank 0: {', '.join(differing)}",
        why=_side_by_side(differing, rank_0.options, entry.options, f"rank {entry.rank}"),
        next=next,
    )


def other_training(rank_0: Options, who: str, options: Options) -> ConfigMismatch | None:
    """Whether ranks that have met in a script of the user's own are about to train alike.

    Args:
        who: the rank that has these ``options``, with its host and process.
    """
    differing = _differing(rank_0, options)
    if not differing:
        return None
    return ConfigMismatch(
        f"{who} is to train with other options than rank 0: {', '.join(differing)}",
        why=_side_by_side(differing, rank_0, options, " ".join(who.split()[:2])),
        next="give train() the same TrainConfig on every rank; only paths and what rank 0 alone does may differ",
    )


def _differing(rank_0: Options, options: Options) -> list[str]:
    """The options whose values are not the same, whatever their sources."""
    return [
        name
        for name in sorted({*rank_0, *options})
        if list(rank_0.get(name, ()))[:1] != list(options.get(name, ()))[:1]
    ]


def _side_by_side(names: Iterable[str], rank_0: Options, options: Options, rank: str) -> str:
    return "\n".join(
        f"{name}: rank 0 has {_shown(rank_0.get(name))}, {rank} has {_shown(options.get(name))}" for name in names
    )


def _shown(option: Sequence[Any] | None) -> str:
    return f"{option[0]} ({option[1]})" if option else "no such option"


def _backend(rank_0: Entry) -> Any:
    return rank_0.options.get("backend", ("gloo",))[0]


def named_gpu(entry: Entry) -> str | None:
    """The UUID of the GPU that a process was told to take; None if it is given one when all are here."""
    if entry.device != "cuda" or entry.local_rank is None or entry.local_rank >= len(entry.gpus):
        return None
    return entry.gpus[entry.local_rank]


def shared_gpu(entries: Sequence[Entry], places: Mapping[int, Place] | None = None) -> DdpManualError | None:
    """Two ranks on one GPU, or a rank on one that does not exist; NCCL can do with neither.

    Args:
        entries: of ranks that have the same backend.
        places: what GPU each rank gets; None while not all are here, when only a --local_rank that was given counts.
    """
    if not entries or _backend(entries[0]) != "nccl":
        return None
    holders: dict[str, Entry] = {}
    for entry in entries:
        local_rank = places[entry.rank].local_rank if places else entry.local_rank
        if local_rank is None or entry.device != "cuda":
            continue
        if local_rank >= len(entry.gpus):
            return DeviceMissing(
                f"{entry.who()} wants cuda:{local_rank}, which does not exist",
                why=f"{entry.host} has {len(entry.gpus)} usable GPU(s): {', '.join(entry.gpus) or 'none'}",
                next=f"start at most {len(entry.gpus)} rank(s) on {entry.host}, or choose with --local_rank",
            )
        uuid = entry.gpus[local_rank]
        holder = holders.setdefault(uuid, entry)
        if holder is not entry:
            return DeviceTaken(
                f"{holder.who()} and {entry.who()} would share one GPU",
                why=f"both have the GPU {uuid}; for rank {entry.rank} it is cuda:{local_rank} of {entry.host}",
                next="give each rank a GPU of its own: leave --local_rank out, or see CUDA_VISIBLE_DEVICES",
            )
    return None
