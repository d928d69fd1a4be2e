"""The place of each rank among all ranks and on its host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ddp_manual.ranks_and_runs import Place, RankInfo, Ready


def assign_places(infos: Sequence[RankInfo], ready: Mapping[int, Ready] | None = None) -> dict[int, Place]:
    """Return rank -> its place. Its local_rank is the one that it was given, otherwise its position among its host's
    ranks; but 0, where each rank of the host sees one GPU of its own, as with ``srun --gpus-per-task=1``.

    Args:
        ready: rank -> which GPUs and cores it could use, as far as they are known.
    """
    seen = {rank: one.gpus for rank, one in (ready or {}).items()}
    cores = {rank: tuple(one.cores) for rank, one in (ready or {}).items()}
    numbers = {info.rank: number for number, info in enumerate(infos)}
    hosts: dict[str, dict[int, int]] = {}
    for info in infos:
        positions = hosts.setdefault(info.host_id, {})
        positions[info.rank] = len(positions)
    nodes = {host: node for node, host in enumerate(hosts)}
    one_each = {
        host
        for host, positions in hosts.items()
        if all(len(seen.get(rank, ())) == 1 for rank in positions)
        and len({seen[rank][0] for rank in positions}) == len(positions)
    }

    bound = {host: Counter(cores.get(rank, ()) for rank in positions) for host, positions in hosts.items()}

    def sharing(info: RankInfo) -> int:
        """Return how many ranks may use cores of this one; all of its host, where the cores are not known."""
        own = cores.get(info.rank, ())
        near = sum(count for others, count in bound[info.host_id].items() if own and _overlap(own, others))
        return near or len(hosts[info.host_id])

    def local_rank(info: RankInfo) -> int:
        if info.host_id in one_each:
            return 0
        return hosts[info.host_id][info.rank] if info.local_rank is None else info.local_rank

    return {
        info.rank: Place(
            rank=numbers[info.rank],
            world_size=len(numbers),
            local_rank=local_rank(info),
            local_world_size=len(hosts[info.host_id]),
            cores_shared_by=sharing(info),
            node=nodes[info.host_id],
            nodes=len(nodes),
            host_leader=numbers[next(iter(hosts[info.host_id]))],
        )
        for info in infos
    }


def _overlap(ranges: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(first <= end and start <= last for first, last in ranges for start, end in others)
