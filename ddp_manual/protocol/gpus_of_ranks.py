"""Whether each rank has a GPU, and one that no other rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_manual.errors import DdpManualError, DeviceMissing, DeviceTaken
from ddp_manual.ranks_and_runs import Place, RankInfo, Ready
from ddp_manual.wording import counted


def more_ranks_than_gpus(ranks: Sequence[tuple[RankInfo, Ready]]) -> str | None:
    """Return why all ranks train on the CPU although they have GPUs: they are on one host, which has fewer GPUs than
    ranks, and nobody has chosen the device of any rank; None if the ranks use what they have.

    With several hosts, a host that has lost a GPU would send all ranks to the CPU: that is for a person to decide.
    """
    if not all(ready.device == "cuda" and ready.may_use_cpu for _, ready in ranks):
        return None
    gpus = {uuid for _, ready in ranks for uuid in ready.gpus}
    if len({info.host_id for info, _ in ranks}) > 1 or len(gpus) >= len(ranks):
        return None
    return (
        f"all ranks train on the CPU, with gloo: {ranks[0][0].host} has {counted(len(ranks), 'rank')} and "
        f"{counted(len(gpus), 'GPU')}; to use GPUs, start at most a rank per GPU"
    )


def shared_gpu(ranks: Sequence[tuple[RankInfo, Ready]], places: Mapping[int, Place]) -> DdpManualError | None:
    """Return an error if two ranks have one GPU or a rank's GPU does not exist, because NCCL supports neither.

    Args:
        ranks: ranks with the same backend; the rank that came last is the last.
        places: says which GPU each rank gets.
    """
    holders: dict[str, RankInfo] = {}
    for info, ready in ranks if ranks[0][1].backend == "nccl" else ():
        if ready.chooses_device:
            continue
        local_rank = places[info.rank].local_rank
        if local_rank >= len(ready.gpus):
            return DeviceMissing(
                f"{info.who} wants cuda:{local_rank}, which does not exist",
                why=f"{info.host} has {counted(len(ready.gpus), 'usable GPU')}: {', '.join(ready.gpus) or 'none'}",
                next=f"start at most {counted(len(ready.gpus), 'rank')} on {info.host}, choose with --local_rank, "
                "or use --device cpu on every rank",
            )
        uuid = ready.gpus[local_rank]
        holder = holders.setdefault(uuid, info)
        if holder is not info:
            return DeviceTaken(
                f"{holder.who} and {info.who} would share one GPU",
                why=f"both have the GPU {uuid}; for rank {info.rank} it is cuda:{local_rank} of {info.host}",
                next="give each rank a GPU of its own: leave --local_rank out, or see CUDA_VISIBLE_DEVICES",
            )
    return None
