"""What rank 0 makes of lost ranks, and what is held of a training in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ddp_manual import held_state_memory
from ddp_manual.errors import BadOption
from ddp_manual.from_worker import Progress
from ddp_manual.held_state_memory import HeldMemory
from ddp_manual.memory_cgroup import memory_left
from ddp_manual.messages import Losses, Placed
from ddp_manual.on_rank_loss import WAIT
from ddp_manual.protocol.end_or_begin_anew import GONE, OWN_CODE, Loss
from ddp_manual.protocol.wait_or_shrink import MOST_WITHOUT_A_STEP, WaitOrShrink
from ddp_manual.ranks_and_runs import Moment, Place, RankInfo, Verdict
from ddp_manual.run_folder import holds_another_run
from ddp_manual.training import held_state
from ddp_manual.training.held_state import Holder, describe, read, rebuild
from ddp_manual.worker import holding
from tests.conftest import log_to_root
from tests.runs import RUN, info

KEEPS = replace(RUN, world_size=3, on_loss=WAIT, rejoin_timeout=60.0)
VERDICT = Verdict("peer-lost", "rank 2 (b, pid 7) is gone: SIGKILL", "why", "next", 14, rank=2, host="b", pid=7)
KILLED, RAISED = {2: Loss(VERDICT, GONE)}, {2: Loss(VERDICT, OWN_CODE)}


def here(*ranks: int) -> dict[int, RankInfo]:
    return {rank: info(rank, "a", world_size=3) for rank in ranks}


def placed(rank: int) -> Placed:
    place = Place(
        rank=rank, world_size=3, local_rank=rank, local_world_size=3, cores_shared_by=3, node=0, nodes=1, host_leader=0
    )
    return Placed(place, ("10.0.0.1", 1), 0, holds=True, state_from=None, losses=Losses(0, 0.0), run=KEEPS)


def begun() -> WaitOrShrink:
    policy = WaitOrShrink(max_restarts=2, shrink="ddp-manual status --shrink")
    assert policy.complete(KEEPS, here(0, 1, 2), 0.0) is None
    return policy


@pytest.mark.parametrize(
    ("resumes", "said"),
    [(False, "all 3 start again"), (True, "all 3 go on from the newest checkpoint, or from the beginning")],
)
def test_where_nothing_is_held_the_line_says_how_much_work_is_repeated(resumes: bool, said: str) -> None:
    policy, run = begun(), replace(KEEPS, resumes=resumes)
    for lost_at, back_at, took, work in ((340.2, 348.1, "7.9 s", "340 s"), (352.5, 452.5, "100 s", "4 s")):
        policy.begin(KILLED, lost_at)
        gone_on = policy.complete(run, here(0, 1, 2), back_at)
        cost = f"the break took {took}, and the ranks repeat about {work} of work, unless a checkpoint has it"
        assert gone_on is not None and gone_on[0] == f"rank 2 is back, on a: {said}; {cost}"


@pytest.mark.parametrize("own_code", [True, False])
def test_a_rank_that_is_lost_again_and_again_without_a_step_in_between_ends_the_run(own_code: bool) -> None:
    policy = begun()
    for time in range(1 if own_code else MOST_WITHOUT_A_STEP):
        policy.begin(RAISED if own_code else KILLED, 10.0 * time)
        policy.take_held(0, Moment(time, 5), 5)
        policy.take_held(2, None, 0)
        assert policy.refusal([0, 2]) is None
        policy.complete(KEEPS, here(0, 1, 2), 10.0 * time)
    policy.begin(RAISED if own_code else KILLED, 100.0)
    policy.take_held(0, Moment(0, 5), 5)
    policy.take_held(2, None, 0)
    refusal = policy.refusal([0, 2])
    assert refusal is not None and "after step 5: no step was done in between" in refusal.why


def test_a_rank_that_comes_further_each_time_may_be_lost_for_ever_unless_its_own_code_raises() -> None:
    policy, refused = begun(), []
    for step in range(10):
        policy.begin(RAISED if step > 4 else KILLED, 0.0)
        policy.take_held(0, Moment(step, step), step)
        policy.take_held(2, None, 0)
        refused.append(policy.refusal([0, 2]) is not None)
        policy.complete(KEEPS, here(0, 1, 2), 0.0)
    assert refused[:7] == [False] * 7 and refused[7]


def test_the_newest_whole_state_counts_and_one_that_is_being_written_does_not() -> None:
    memory = HeldMemory.create()
    holder = Holder(memory, 0, 1, placed(0).place)
    state: dict[Any, Any] = {"a": torch.arange(5.0), "scalar": torch.tensor(7)}
    state[3] = (1, 2.5, None, True, "x", [math.inf])
    state["model"] = torch.nn.Linear(2, 1).state_dict()
    state["order"] = [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(4, 5).T,
        torch.rand(9)[::2],
    ]
    assert memory.newest() is None
    for step in (1, 2, 3):
        state["a"][0] = step
        holder.hold(step, state)
    memory.begin(tensors=64, text=10)  # and the process is killed
    newest = HeldMemory(os.dup(memory.descriptor)).newest()
    assert newest is not None and newest.moment == Moment(0, 3)
    found = rebuild(read(memory))
    assert found["a"].tolist() == [3, 1, 2, 3, 4] and found[3] == state[3] and found["scalar"] == 7
    for one, was in zip(found["order"], state["order"], strict=True):
        assert torch.equal(one, was) and one.stride() == torch.empty_like(was).stride(), "as a fused optimizer needs it"
    assert vars(found["model"]) == vars(state["model"])  # the versions of its modules
    holder.hold(4, state | {"b": torch.zeros(100_000)})  # a state that grows, as with an optimizer's first step
    assert len(rebuild(read(memory))["b"]) == 100_000


@pytest.mark.parametrize("cannot", [{"a": object()}, [{1, 2}], {"t": torch.zeros(2, device="meta")}])
def test_what_cannot_be_held_is_named(cannot: Any) -> None:
    with pytest.raises(BadOption, match="which cannot be held"):
        describe(cannot, [])


def test_another_runs_files_are_told_from_those_of_the_run_that_goes_on(tmp_path: Path) -> None:
    assert not holds_another_run(str(tmp_path), "20261122")
    (tmp_path / "config.json").write_text(json.dumps({"run": {"run_id": "20261122"}}))
    assert not holds_another_run(str(tmp_path), "20261122")
    assert holds_another_run(str(tmp_path), "20261123")


def test_a_state_for_which_there_is_no_memory_is_an_error_before_the_kernel_ends_anybody() -> None:
    left = memory_left()
    assert left is not None and left > 0
    with pytest.raises(OSError, match="Cannot allocate memory"):
        HeldMemory.create().begin(tensors=left, text=10)


@pytest.fixture
def begin() -> Iterator[Callable[..., None]]:
    """Begin to hold a script's state; the end of the test ends that."""

    def begin(memory: HeldMemory, rank: int = 0, source: int | None = None, told: Any = None) -> None:
        place = replace(placed(rank), state_from=source)
        holding.here = holding.Holding(memory, place, lambda message: None, told or Progress())

    yield begin
    holding.here = None


def test_each_rank_gets_its_own_random_numbers_back_and_a_newcomer_keeps_those_it_began_with(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[..., None]
) -> None:
    """What rank 0 holds reaches the others through a process group; here each reads rank 0's memory itself."""
    memories, model = [HeldMemory.create() for _ in range(3)], torch.nn.Linear(2, 1)
    monkeypatch.setattr(held_state, "share", lambda memory, source, device: rebuild(read(memories[source])))
    drawn, back = {}, {}
    for rank in (0, 1):
        begin(memories[rank], rank)
        torch.manual_seed(rank)
        assert holding.held(model, per_rank=torch.set_rng_state) is None
        for step in range(3):
            torch.rand(7)
            holding.hold(model, None, {"step": step}, per_rank=torch.get_rng_state())
        drawn[rank] = torch.rand(7).tolist()
    drawn[2] = torch.rand(7, generator=torch.Generator().manual_seed(2)).tolist()
    for _ in range(2):  # a second loss, before another step, costs nothing more
        for rank in range(3):
            begin(memories[rank], rank, 0)
            torch.manual_seed(rank)
            assert holding.held(model, per_rank=torch.set_rng_state) == {"step": 2}
            back[rank] = torch.rand(7).tolist()
        assert back == drawn


@pytest.mark.parametrize(("fit", "hold"), [(1, []), (2, [0]), (5, [0]), (6, [0, 1, 2]), (100, [0, 1, 2])])
def test_a_host_holds_as_many_states_as_there_is_memory_for_all_its_ranks_or_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fit: int, hold: list[int]
) -> None:
    """Each rank takes two slots, at once, and looks at what is left before any other has taken one."""
    log_to_root(monkeypatch)
    memories = [HeldMemory.create() for _ in range(3)]
    monkeypatch.setattr(
        held_state_memory, "memory_left", lambda: 1.01 * fit * held_state_memory.PAGE / held_state_memory.SHARE
    )
    for rank, memory in enumerate(memories):
        holder = Holder(memory, 0, 1, placed(rank).place)
        for step in (1, 2, 3):
            if holder.is_due(step):
                holder.hold(step, {"step": step})
    moments = [newest.moment if (newest := memory.newest()) else None for memory in memories]
    assert moments == [Moment(0, 3) if rank in hold else None for rank in range(3)]
    pages = [os.fstat(memory.descriptor).st_size // held_state_memory.PAGE for memory in memories]
    assert pages == [3 if rank in hold else 1 for rank in range(3)]
    assert len(caplog.messages) == (1 if len(hold) == 1 else 2 * (not hold))


def test_a_script_goes_on_where_there_is_no_memory_for_its_state_and_a_line_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begin: Callable[..., None]
) -> None:
    memory, model = HeldMemory.create(), torch.nn.Linear(2, 1)
    log_to_root(monkeypatch)
    begin(memory)
    assert holding.held(model) is None
    with pytest.raises(BadOption, match="every=0"):
        holding.hold(model, every=0)
    holding.hold(model)
    assert memory.newest() is not None
    monkeypatch.setattr(held_state_memory, "memory_left", lambda: 0)
    for _ in range(3):
        holding.hold(model, extra=torch.zeros(10_000))  # more than before
    assert memory.newest() is None
    (said,) = caplog.messages
    assert said.startswith("the state is not held any more, since there is no memory for it: ")


@pytest.mark.parametrize(
    ("told", "named", "repeated"),
    [([], "after call 4 of hold()", "no call"), ([601, 602, 603, 604], "after step 604", "1 step")],
)
def test_the_state_of_a_script_has_the_number_of_its_own_step_or_says_that_it_counts_the_calls_of_hold(
    told: list[int], named: str, repeated: str, begin: Callable[..., None]
) -> None:
    memory, progress = HeldMemory.create(), Progress()
    begin(memory, told=progress)
    for call in range(4):
        if told:
            progress(step=told[call])
        holding.hold(torch.nn.Linear(2, 1), every=2)
    newest = memory.newest()
    assert newest is not None and newest.moment.named == named
    policy = begun()
    policy.begin(KILLED, 10.0)
    policy.take_held(0, newest.moment, newest.moment.step + bool(told))
    line, _ = policy.complete(KEEPS, here(0, 1, 2), 11.0) or ("", {})
    assert f"all 3 go on {named}; the break took 1.0 s, and the ranks repeat {repeated}" in line
