"""What is said of ranks that are missing: which, what to type for them, and the error that ends a wait in vain."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_manual.errors import RankMissing
from ddp_manual.messages import News
from ddp_manual.ranks_and_runs import RunInfo
from ddp_manual.wording import in_words

MOST_COMMANDS = 8
MOST_ADDRESSES = 3


def situation(news: News, world_size: int) -> str:
    """Say in one line which ranks are here, which are missing, and which still load torch."""
    without = news.left_out if news.here < world_size else ()
    who = f"going on without {in_words(without)}" if without else all_here(world_size)
    if not news.missing and news.loading:
        return f"{who}; loading torch: {in_words(news.loading)}"
    state = f"waiting for {in_words(news.missing)}" if news.missing else who
    named = ", ".join(news.named) + (", ..." if news.here > len(news.named) else "")
    return f"{state}; {news.here} of {world_size} here: {named}"


def all_here(world_size: int) -> str:
    return "the only rank is here" if world_size == 1 else f"all {world_size} ranks are here"


def advice_for(ranges: Sequence[Sequence[int]], run: RunInfo, own_addresses: Sequence[str]) -> list[str]:
    """Return a command for each missing rank, as many as a person would type, and what else may keep ranks away.

    Args:
        own_addresses: the addresses of this host, to name if rank 0 listens where only its own host reaches it.
    """
    missing = [rank for first, last in ranges for rank in range(first, last + 1)]
    # A launcher starts all its ranks with the same command.
    commands = list(dict.fromkeys(run.command_for(rank) for rank in missing[:MOST_COMMANDS]))
    if run.only_on_its_host and missing:  # then this process is on that host too
        addresses = own_addresses[:MOST_ADDRESSES] or ["an address of its network"]
        spelled = "master_addr=" if run.command.startswith(("WORLD_SIZE=", "ddp_manual.join(")) else "--master_addr "
        commands.append(
            f"(only {run.host} itself reaches {run.address}: for ranks on other hosts, start rank 0 again with "
            f"{spelled}{f' or {spelled}'.join(addresses)})"
        )
    elif missing and run.command:
        commands.append(f"(ranks that run, and get no answer: does a firewall close a TCP port of {run.host}?)")
    return commands


def missing_ranks_error(news: News, run: RunInfo, waited: float, own_addresses: Sequence[str] = ()) -> RankMissing:
    one = news.here == 1
    here = f"{'rank' if one else 'ranks'} {', '.join(news.named)} {'is' if one else 'are'} here"
    tried = [*news.refused, *news.gone]
    if not news.missing:
        slow = in_words(news.loading)
        return RankMissing(
            f"all {run.world_size} ranks joined, but within {waited:.0f} s not all could load torch: {slow}",
            why="\n".join([here, f"still loading torch: {slow}", *tried]),
            next="look at what they say, and whether their disk or file server is slow; then start all ranks again, "
            "with a larger --join_timeout",
        )
    missing = run.world_size - news.here
    return RankMissing(
        f"{missing} of {run.world_size} ranks never joined within {waited:.0f} s: {in_words(news.missing)}",
        why="\n".join([here, *tried] if tried else [f"{here}; nothing has tried to join as {in_words(news.missing)}"]),
        next="\n".join(
            [
                *(["mend what the refused rank was told in its own terminal, then:"] if news.refused else []),
                *advice_for(news.missing, run, own_addresses),
                "and start the others again: they have left too",
            ]
        ),
    )
