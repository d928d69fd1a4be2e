"""Whether a process belongs with rank 0: comparisons of world size, options, code, versions, variables and GPUs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    DeviceMissing,
    LoopbackMaster,
    VersionMismatch,
    WorldSizeMismatch,
)
from ddp_manual.option_fields import differing_options, side_by_side
from ddp_manual.protocol.collective_variables import differing_variables
from ddp_manual.protocol.program_arguments import differing_arguments, may_differ_option, shown
from ddp_manual.ranks_and_runs import Option, RankInfo, Ready, RunInfo
from ddp_manual.secret_arguments import HIDDEN

Options = Mapping[str, Option]
Versions = Mapping[str, str | None]
"""Part of the program -> its version or digest."""

OR_GO_ON = "or go on with a warning: --allow_mismatch (in a script: allow_mismatch=True)"
# Seconds. Nothing here needs clocks that agree, but logs of hosts whose clocks differ are hard to read side by side.
CLOCKS_AGREE_WITHIN = 30.0
# How many differences of a kind an error names: two different programs may differ in hundreds of files.
MOST_NAMED = 8
# The fields of RankInfo that are equal on nearly all ranks of a run.
SAID_ALIKE = ("versions", "code", "variables", "arguments", "may_differ", "options")
# The packages that are built for one CUDA, or for none.
BUILT_FOR_CUDA = ("torch", "torchvision", "torchaudio")


def mismatch(info: RankInfo, rank_0: RankInfo, run: RunInfo, now: float) -> tuple[DdpManualError | None, list[str]]:
    """Return why a process cannot be a rank of this run (None if it can), and warnings about it.

    Args:
        now: rank 0's clock when the hello came, in seconds since the epoch.
    """
    warnings: list[str] = []
    ahead = info.since - now
    if abs(ahead) > CLOCKS_AGREE_WITHIN and info.host_id != rank_0.host_id:
        differs = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} {rank_0.host}'s"
        warnings.append(f"the clock of {info.host} is {differs}")
    if info.world_size != run.world_size:
        mismatch = WorldSizeMismatch(
            f"{info.who} expects {info.world_size} ranks, rank 0 expects {run.world_size}",
            why=f"rank 0 runs on {run.host} (pid {run.pid}) with world_size {run.world_size}; "
            f"rank {info.rank} has world_size {info.world_size} ({info.world_size_source})",
            next=run.command_for(min(info.rank, run.world_size - 1)),
        )
        return mismatch, warnings
    if info.host_id != rank_0.host_id and run.only_on_its_host:
        loopback = LoopbackMaster(
            f"rank 0 listens on {run.address}, which is not for other hosts, and rank {info.rank} is on {info.host}",
            why=f"{info.who} came through a tunnel to {run.host}; the ranks could not connect to one another",
            next=f"give every rank an address of {run.host} that {info.host} can reach as --master_addr",
        )
        return loopback, warnings
    if all(getattr(info, name) == getattr(rank_0, name) for name in SAID_ALIKE):
        return None, warnings  # nearly all ranks; the comparison part by part below takes ten times as long
    if "command" in differing_options(rank_0.options, info.options):
        return _other_options(info, rank_0.options, info.options, run), warnings  # other differences follow from it
    allowed = info.allow_mismatch or rank_0.allow_mismatch
    packages = sorted({*rank_0.versions, *info.versions} - {"python", "torch"})
    for difference in (
        _other_versions(info, rank_0, rank_0.versions, info.versions, ("python", "torch", *packages)),
        _other_code(info, rank_0, run),
        _other_variables(info, rank_0),
    ):
        if difference is not None and not allowed:
            return difference, warnings
        if difference is not None:
            warnings.append(f"{difference.what} (allowed)")
    return _other_arguments(info, rank_0, run) or _other_options(info, rank_0.options, info.options, run), warnings


def mismatch_when_ready(
    info: RankInfo, ready: Ready, rank_0: RankInfo, of_rank_0: Ready, run: RunInfo
) -> DdpManualError | None:
    """Return why a rank cannot stay, now that it and rank 0 know their devices; None if it can."""
    allowed = info.allow_mismatch or rank_0.allow_mismatch
    if of_rank_0.backend == "nccl" and not allowed:
        names = ("torch", "cuda", "nccl")
        if (difference := _other_versions(info, rank_0, of_rank_0.versions, ready.versions, names)) is not None:
            return difference
    if ready.chooses_device and allowed:
        return None
    return _other_device(info, ready, rank_0, of_rank_0) or _other_options(info, of_rank_0.options, ready.options, run)


def _other_versions(
    info: RankInfo, rank_0: RankInfo, theirs: Versions, own: Versions, names: Sequence[str]
) -> VersionMismatch | None:
    # gloo's protocol is the same for every CUDA that a torch was built for.
    for_any_cuda = BUILT_FOR_CUDA if "cuda" not in names else ()

    def compared(versions: Versions, name: str) -> str | None:
        version = versions.get(name)
        return version.split("+")[0] if version and name in for_any_cuda else version

    differing = [name for name in names if compared(own, name) != compared(theirs, name)]
    if not differing:
        return None
    missing = [f"{name}=={compared(theirs, name)}" for name in differing if theirs.get(name)]
    here_only = [f"{name}=={compared(own, name)}" for name in differing if not theirs.get(name)]
    if differing[0] == "python":
        next = f"use Python {theirs.get('python')} on {info.host}"
    elif {"cuda", "nccl"} & set(differing):
        next = "install the same torch on every host"
    elif missing:
        next = f"on {info.host}: pip install {' '.join(missing[:MOST_NAMED])}"
    else:
        next = f"on {rank_0.host}: pip install {' '.join(here_only[:MOST_NAMED])}"
    return VersionMismatch(
        f"{info.who} has other versions than rank 0: {_listed(differing)}",
        why=_both(info, rank_0, own, theirs, differing),
        next=f"{next}\n{OR_GO_ON}",
    )


def _other_code(info: RankInfo, rank_0: RankInfo, run: RunInfo) -> ConfigMismatch | None:
    differing = [part for part in sorted({*rank_0.code, *info.code}) if rank_0.code.get(part) != info.code.get(part)]
    if not differing:
        return None
    only_theirs, only_own = rank_0.code.keys() - info.code.keys(), info.code.keys() - rank_0.code.keys()
    if len(only_theirs) == len(only_own) == 1:  # such as the wrong script
        return ConfigMismatch(
            f"{info.who} runs another program than rank 0",
            why=f"rank 0 runs {only_theirs.pop()}, rank {info.rank} runs {only_own.pop()}",
            next=run.command_for(info.rank),
        )
    same_code = f"bring the code on {info.host} to what {rank_0.host} has (git pull, pip install)"
    if info.host_id == rank_0.host_id:
        same_code = "start every rank from the same files; if they were changed after rank 0 had begun, all ranks again"
    own, theirs = ({part: f"digest {digest}" for part, digest in one.code.items()} for one in (info, rank_0))
    return ConfigMismatch(
        f"{info.who} runs other code than rank 0: {_listed(differing)}",
        why=_both(info, rank_0, own, theirs, differing),
        next=f"{same_code}\n{OR_GO_ON}",
    )


def _other_variables(info: RankInfo, rank_0: RankInfo) -> ConfigMismatch | None:
    same_host = info.host_id == rank_0.host_id
    differing = differing_variables(rank_0.variables, info.variables, same_host=same_host)
    if not differing:
        return None
    named = differing[:MOST_NAMED]
    commands = [f"export {name}={shlex.quote(rank_0.variables[name])}" for name in named if name in rank_0.variables]
    unset = [name for name in named if name not in rank_0.variables]
    fix = "; ".join([*commands, *([f"unset {' '.join(unset)}"] if unset else [])])
    return ConfigMismatch(
        f"{info.who} has other variables than rank 0: {_listed(differing)}",
        why=_both(info, rank_0, info.variables, rank_0.variables, differing, none="it unset")
        + "\nranks that are told to communicate in other ways can wait for each other for ever",
        next=f"for rank {info.rank} as for rank 0: {fix}\n{OR_GO_ON}",
    )


def _other_arguments(info: RankInfo, rank_0: RankInfo, run: RunInfo) -> ConfigMismatch | None:
    may_differ = [*rank_0.may_differ, *info.may_differ]
    differing = differing_arguments(rank_0.arguments, info.arguments, may_differ)
    if not differing:
        return None
    # Rank 0's words are this rank's too, unless they hide a secret, or some differ on purpose.
    is_whole = "--rank {rank}" in run.command and HIDDEN not in run.command
    same = "give the program the same arguments on every rank"
    if is_whole and not may_differ:
        same = run.command_for(info.rank)
    return ConfigMismatch(
        f"{info.who} was started with other arguments than rank 0: {_listed(differing)}",
        why=_both(info, rank_0, shown(info.arguments), shown(rank_0.arguments), differing),
        next=f"{same}\nor, where they differ on purpose, before its name: {may_differ_option(differing[:MOST_NAMED])}",
    )


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return ", ".join([*names[:MOST_NAMED], *more])


def _both(
    info: RankInfo, rank_0: RankInfo, own: Versions, theirs: Versions, names: Sequence[str], none: str = "none"
) -> str:
    def value(versions: Versions, name: str) -> str:
        return none if (version := versions.get(name)) is None else version

    return "\n".join(
        f"{name}: rank 0 ({rank_0.host}) has {value(theirs, name)}, rank {info.rank} has {value(own, name)}"
        for name in names[:MOST_NAMED]
    )


def _other_device(info: RankInfo, ready: Ready, rank_0: RankInfo, of_rank_0: Ready) -> DeviceMissing | None:
    """Return an error if one host found a GPU by itself and the other did not: the other host has a fault, not other
    options."""
    chosen = {one.options.get("device", (None, "flag"))[1] for one in (ready, of_rank_0)}
    if ready.device == of_rank_0.device or chosen != {"default"}:
        return None
    chooses = ready.chooses_device
    without, having = (info, rank_0) if ready.device == "cpu" else (rank_0, info)
    return DeviceMissing(
        f"{without.who} has no GPU, {having.who} has",
        why=f"--device auto chose cpu on {without.host} and cuda on {having.host}",
        next=f"look at nvidia-smi on {without.host}, or {'hide the GPUs from' if chooses else 'start'} every rank "
        f"{'too: CUDA_VISIBLE_DEVICES=' if chooses else 'with --device cpu'}",
    )


def _other_options(info: RankInfo, theirs: Options, own: Options, run: RunInfo) -> ConfigMismatch | None:
    differing = differing_options(theirs, own)
    if not differing:
        return None
    next = run.command_for(info.rank)
    if "command" in differing:  # all other differences follow from this one
        own_way, way_of_rank_0 = (
            f"ddp-manual {options['command'][0]}" if "command" in options else "a script that calls join()"
            for options in (own, theirs)
        )
        why = f"rank 0 runs {way_of_rank_0}, rank {info.rank} runs {own_way}"
        return ConfigMismatch(f"{info.who} was started in another way than rank 0", why=why, next=next)
    if {"device", "backend"} & set(differing):
        # If nobody named them, the two hosts chose differently, and would choose so again.
        next = "start every rank with the same --device and --backend, such as: --device cpu --backend gloo"
    if "address_family" in differing:
        next = "name interfaces of one address family on both: GLOO_SOCKET_IFNAME=<interface>"
    if all(name.endswith(" source") for name in differing):
        next = f"the same options name other code: bring that on {info.host} to what {run.host} has"
    return ConfigMismatch(
        f"{info.who} was started with other options than rank 0: {', '.join(differing)}",
        why=side_by_side(differing, theirs, own, f"rank {info.rank}"),
        next=next,
    )


def other_version(who: str, than: str, why: str) -> VersionMismatch:
    """Return the error for a process whose message cannot be read."""
    what = f"{who} was started with another version of ddp_manual than {than}"
    return VersionMismatch(what, why=why, next="install the same version on every host")
