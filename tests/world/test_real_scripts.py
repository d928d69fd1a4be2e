"""Scripts of every kind, unmodified: they print what they print under torchrun, and each fault is named."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import real_scripts
from tests.conftest import HOST, RankProcess, Start
from tests.real_scripts import ALL, SCRIPTS, Script, Starts, completed, printed, struck, under_torchrun

pytestmark = pytest.mark.soak
PEER_TIMEOUT = STALL_TIMEOUT = 3
# Seconds that a program has to end after SIGTERM, which it may handle to save something.
TERM_GRACE = 5
# Seconds until all have left, where torch itself waits for 30 minutes. A script's way out through Python and torch
# takes one core 0.7 s, beside busy cores 10 s.
LEFT_WITHIN = 20
# ``./scripts/soak`` tries each by hand and with launch, and compares what it prints with what it prints under torchrun.
BY_HAND = SCRIPTS if ALL else ()
LAUNCHED = SCRIPTS if ALL else ("lightning",)


@pytest.fixture
def starts(start: Start, script: Script, port: int, tmp_path: Path) -> Starts:
    (tmp_path / "here").mkdir()
    return Starts(start=start, script=script, port=port, folder=tmp_path / "here")


@pytest.mark.parametrize(
    ("how", "script"),
    [
        pytest.param(how, SCRIPTS[name], id=f"{how}-{name}")
        for how, names in (("by_hand", BY_HAND), ("launch", LAUNCHED))
        for name in names
    ],
)
def test_a_script_prints_what_it_prints_under_torchrun(
    starts: Starts, script: Script, how: str, shared_folder: Path
) -> None:
    lines = completed(getattr(starts, how), script)
    assert lines == under_torchrun(starts, shared_folder) if ALL else lines


@pytest.mark.soak(only=True)
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
    assert re.search(r"then start this rank again, on .*: the others wait for it\n", lost.err)
    first.wait_for("is gone: SIGKILL. Its seat is kept; all ranks' programs will start again, those that ")
    return [first, starts.rank(1, 2, *waits, arguments=arguments)]


# A pipeline adds what it was about to do.
TOLD_TO_FAIL = "(?:RuntimeError: Failed to run stage backward: )?ValueError: this rank was told to fail"
# Fault -> identifier, patterns of the first line and of what is below, the codes by hand, seconds until all have left.
FAULTS = {
    "kill": ("peer-lost", r"is gone: SIGKILL\n", "SIGKILL ended its worker", (14, 137), LEFT_WITHIN),
    "stop": (
        *("peer-lost", "has been stopped by SIGSTOP", "sees its worker stopped", (14, 14)),
        PEER_TIMEOUT + LEFT_WITHIN,
    ),
    "sleep": (
        *("peer-stalled", "is stuck while others wait: rank 0 waits for ", "{who}: running, on {line} in .*in strike"),
        *((14, 14), STALL_TIMEOUT + LEFT_WITHIN),
    ),
    "raise": (
        *("peer-failed", rf"left with error\[training-failed\]: {TOLD_TO_FAIL}\n"),
        "look at its terminal, which has the traceback\n",
        *((14, 1), LEFT_WITHIN),
    ),
}
# Of the ranks of launch, which share a terminal, only the one that raised has an error.
RAISED = ("training-failed", TOLD_TO_FAIL, "Traceback .* in strike\n", (14, 1), LEFT_WITHIN)
SOME_FAULTS = {"by_hand": {}, "launch": {"trainer": ("sleep",)}}


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
    identifier, what, why, codes, within = RAISED if (how, kind) == ("launch", "raise") else FAULTS[kind]
    times, arguments = ["--peer_timeout", PEER_TIMEOUT], [*script.runs[0], *script.until_then]
    if kind == "sleep":
        times += ["--stall_timeout", STALL_TIMEOUT]
    ranks = getattr(starts, how)(*times, fault=f"{kind}@1:{script.fault}", arguments=arguments)
    since = struck(ranks)
    assert [rank.wait() for rank in ranks] == (list(codes) if how == "by_hand" else [codes[1]]), ranks[0].err
    took = time.monotonic() - since
    said = re.sub(r"^\[rank \d\] ?", "", ranks[0].err, flags=re.MULTILINE)
    who = re.search(rf"error\[{identifier}\]: (rank 1 (?:\({HOST}, pid \d+\)|on {HOST}:)) {what}", said)
    assert who, said
    pattern = why.format(who=re.escape(who[1]), file=re.escape(script.file), line=script.line)
    assert re.search(pattern, said[who.start() :], re.DOTALL), said
    if kind == "kill" and script.until_then:
        assert f"it was running, on {script.file}:" in said[who.start() :], said
    assert took < within + (TERM_GRACE if script.handles_sigterm else 0)


@pytest.mark.parametrize(
    ("script", "stuck", "told"),
    [
        pytest.param(
            SCRIPTS["groups"],
            "3:4:torch.distributed.all_reduce",
            r"\n +rank 2 began last the 2nd of the group of ranks 2 and 3 \(mesh_tensor\), all_reduce float32\[16\] ",
            id="groups",
        ),
        pytest.param(
            *(SCRIPTS["pipeline"], "2:3", r": running, on pipeline.py:\d+ in main\n"),
            id="pipeline",
            marks=pytest.mark.soak(only=True),
        ),
    ],
)
def test_of_four_ranks_the_stuck_one_is_named_whichever_group_the_others_wait_in(
    starts: Starts, script: Script, stuck: str, told: str
) -> None:
    # On a busy machine a first step of four ranks takes longer than STALL_TIMEOUT.
    [launcher] = starts.launch("--stall_timeout", 3 * STALL_TIMEOUT, fault=f"sleep@{stuck}", arguments=(), nproc=4)
    assert launcher.wait() == 14
    said = re.sub(r"^\[rank \d\] ?", "", launcher.err, flags=re.MULTILINE)
    error = rf"error\[peer-stalled\]: rank {stuck[0]} \({HOST}, pid \d+\) is stuck while others wait: .*"
    assert re.search(error + told, said, re.DOTALL), said
