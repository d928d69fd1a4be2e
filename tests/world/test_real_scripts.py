"""Scripts of every kind, unmodified: they print what they print under torchrun, and each fault is named."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import real_scripts
from tests.clock import left
from tests.conftest import RankProcess, Start
from tests.real_scripts import ALL, FOLDER, SCRIPTS, Script, Starts, completed, printed, under_torchrun
from tests.world.deaths import HOST, PEER_TIMEOUT, STALL_TIMEOUT
from tests.world.test_rendezvous import last_error

pytestmark = pytest.mark.soak
TIMES = ("--peer_timeout", PEER_TIMEOUT, "--stall_timeout", STALL_TIMEOUT)
# Seconds that a program has to end after SIGTERM, which it may handle to save something.
TERM_GRACE = 5
# Seconds until all have left. A script's way out through Python and torch takes one core 0.7 s, beside busy cores 2 s.
LEFT_WITHIN = 5


@pytest.fixture
def starts(start: Start, script: Script, port: int, tmp_path: Path) -> Starts:
    (tmp_path / "here").mkdir()
    return Starts(start=start, script=script, port=port, folder=tmp_path / "here")


@pytest.mark.parametrize("how", ["by_hand", "launch"])
@real_scripts.of()
def test_a_script_prints_what_it_prints_under_torchrun(
    starts: Starts, script: Script, how: str, shared_folder: Path
) -> None:
    assert completed(getattr(starts, how), script) == under_torchrun(starts, shared_folder)


@real_scripts.of(("plain", "lightning", "trainer"))
def test_after_a_rank_was_killed_only_its_command_is_typed_again(
    starts: Starts, script: Script, shared_folder: Path
) -> None:
    ranks = begin_lost(starts, script.runs[0])
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    assert "rank 1 is back, on " in ranks[0].err and "all 2 start again; " in ranks[0].err
    assert printed(ranks) == under_torchrun(starts, shared_folder)


def begin_lost(starts: Starts, arguments: Sequence[str]) -> list[RankProcess]:
    """Start two ranks of which one is killed, and type its command again."""
    waits = ("--on_loss", "wait")
    first = starts.rank(0, 2, *waits, arguments=arguments)
    lost = starts.rank(1, 2, *waits, fault="kill@1:3", arguments=arguments)
    assert lost.wait() == 137
    assert "then give this rank back, on any host: the others wait for it\n" in lost.err
    first.wait_for("is gone: SIGKILL. Its seat is kept; all ranks' programs will start again\n")
    return [first, starts.rank(1, 2, *waits, arguments=arguments)]


@pytest.mark.parametrize("script", [Script(words=(str(FOLDER / "plain_held.py"),), at="")], ids=["held"])
def test_a_script_that_holds_its_state_goes_on_from_the_step_it_was_at(starts: Starts) -> None:
    undisturbed = starts.by_hand(arguments=())
    assert [rank.wait() for rank in undisturbed] == [0, 0]
    ranks = begin_lost(starts, ())
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    assert "all 2 go on after step 2; " in ranks[0].err
    assert "rank 0 begins at step 2\n" in ranks[0].out and "rank 1 begins at step 2\n" in ranks[1].out
    assert [rank.out.splitlines()[-1] for rank in ranks] == [rank.out.splitlines()[-1] for rank in undisturbed]


@real_scripts.of(SCRIPTS if ALL else ("plain", "lightning", "sync"))
def test_a_second_rank_1_and_a_missing_rank_2_are_named_with_the_command_of_the_script(
    starts: Starts, script: Script
) -> None:
    arguments = script.runs[0]
    ranks = [starts.rank(rank, 3, "--join_timeout", 6, arguments=arguments) for rank in (0, 1)]
    ranks[0].wait_for("waiting for rank 2; 2 of 3 here")
    second = starts.rank(1, 3, arguments=arguments)
    left(second, 13)
    error = last_error(second.err)
    assert error.startswith(f"error[rank-taken]: rank 1 is taken by {HOST} (pid {ranks[1].worker})\n")
    assert "--rank 2" in error
    for rank in ranks:
        left(rank, 10)
        assert f"rank 1 ({HOST}, pid {second.worker}) was refused: rank-taken" in rank.err
        error = last_error(rank.err)
        assert error.startswith("error[rank-missing]: 1 of 3 ranks never joined within 6 s: rank 2\n")
        first, command = error.partition("next: ")[2].splitlines()[:2]
        assert first == "mend what the refused rank was told in its own terminal, then:"
        assert "run --world_size 3 --rank 2 " in command and command.endswith(" ".join([*script.words, *arguments]))


def struck(ranks: list[RankProcess]) -> float:
    """Wait until the fault has struck; return when."""
    deadline = time.monotonic() + 60
    while True:
        for rank in ranks:
            if found := re.search(r"fault: \w+ in \S+, at ([\d.]+)\n", rank.err):
                return float(found[1])
        running = any(rank.process.poll() is None for rank in ranks)
        assert time.monotonic() < deadline and running, "\n".join(rank.err for rank in ranks)
        time.sleep(0.02)


class Fault(NamedTuple):
    """What has to be told of rank 1: patterns of the first line and of what is below."""

    identifier: str
    what: str
    why: str
    codes: tuple[int, int]
    within: float
    """Seconds until rank 0 has left; a program that handles SIGTERM is given more."""


FAULTS = {
    "kill": Fault("peer-lost", r"is gone: SIGKILL\n", "SIGKILL ended its worker", (14, 137), LEFT_WITHIN),
    "stop": Fault("peer-lost", "has been stopped by SIGSTOP", "sees its worker stopped", (14, 14), PEER_TIMEOUT + 3),
    "sleep": Fault(
        "peer-stalled",
        "is stuck while others wait: rank 0 waits for ",
        "{who}: running, on {line} in .*in strike",
        (14, 14),
        STALL_TIMEOUT + 4,
    ),
    "raise": Fault(
        "peer-failed",
        r"left with error\[training-failed\]\n",
        r'(?=.*{file}", line \d+, in )(?=.*ValueError: this rank was told to fail\n)',
        (14, 1),
        LEFT_WITHIN,
    ),
}
SOME_FAULTS = {
    "by_hand": {
        "plain": FAULTS,
        "checkpoints": ("raise",),
        "lightning": ("kill", "sleep", "raise"),
        "trainer": ("stop", "raise"),
        "script": ("sleep", "raise"),
        "fsdp2": ("sleep",),
        "groups": ("sleep",),
        "pipeline": ("kill", "sleep"),
    },
    "launch": {"plain": ("kill", "stop"), "trainer": ("sleep",), "lightning": ("raise",)},
}


def faults() -> list[object]:
    """Return who is started how with which fault: a few of them, in a soak all."""
    everything = {how: dict.fromkeys(SCRIPTS, FAULTS) for how in SOME_FAULTS}
    return [
        pytest.param(SCRIPTS[name], how, kind, id=f"{name}-{how}-{kind}")
        for how, scripts in (everything if ALL else SOME_FAULTS).items()
        for name, kinds in scripts.items()
        for kind in kinds
    ]


@pytest.mark.parametrize(("script", "how", "kind"), faults())
def test_a_rank_that_is_killed_frozen_stuck_or_raises_is_named(
    starts: Starts, script: Script, how: str, kind: str
) -> None:
    identifier, what, why, codes, within = FAULTS[kind]
    times, arguments = ["--peer_timeout", PEER_TIMEOUT], [*script.runs[0], *script.until_then]
    if kind == "sleep":
        times += ["--stall_timeout", STALL_TIMEOUT]
    ranks = getattr(starts, how)(*times, fault=f"{kind}@1:{script.fault}", arguments=arguments)
    since = struck(ranks)
    ended = left(ranks[0], codes[0] if how == "by_hand" else codes[1])
    said = re.sub(r"^\[rank \d\] ?", "", ranks[0].err, flags=re.MULTILINE)
    who = re.search(rf"error\[{identifier}\]: (rank 1 \({HOST}, pid \d+\)) {what}", said)
    assert who, said
    if how == "by_hand":
        assert who[1] == f"rank 1 ({HOST}, pid {ranks[1].worker})"
        left(ranks[1], codes[1])
        identifier_of_its_own = "training-failed" if kind == "raise" else identifier
        assert last_error(ranks[1].err).startswith(f"error[{identifier_of_its_own}]: rank 1 ")
    pattern = why.format(who=re.escape(who[1]), file=re.escape(script.file), line=script.line)
    assert re.search(pattern, said[who.start() :], re.DOTALL), said
    if kind == "kill" and script.until_then:
        assert f"it was running, on {script.file}:" in said[who.start() :], said
    print(f"{kind} after {ended - since:.1f} s")
    assert ended - since < within + (TERM_GRACE if script.handles_sigterm else 0)


@pytest.mark.parametrize(
    ("script", "stuck", "told"),
    [
        pytest.param(
            SCRIPTS["groups"],
            "3:4:torch.distributed.all_reduce",
            r"\n +rank 2 began last the 2nd of the group of ranks 2 and 3 \(mesh_tensor\), all_reduce float32\[16\] ",
            id="groups",
        ),
        pytest.param(SCRIPTS["pipeline"], "2:3", r": running, on pipeline.py:\d+ in main\n", id="pipeline"),
    ],
)
def test_of_four_ranks_the_stuck_one_is_named_whichever_group_the_others_wait_in(
    starts: Starts, script: Script, stuck: str, told: str
) -> None:
    [launcher] = starts.launch("--stall_timeout", STALL_TIMEOUT, fault=f"sleep@{stuck}", arguments=(), nproc=4)
    left(launcher, 14)
    said = re.sub(r"^\[rank \d\] ?", "", launcher.err, flags=re.MULTILINE)
    error = rf"error\[peer-stalled\]: rank {stuck[0]} \({HOST}, pid \d+\) is stuck while others wait: .*"
    assert re.search(error + told, said, re.DOTALL), said
