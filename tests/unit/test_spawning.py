"""What ``spawn`` refuses before it starts a process, and how errors come back from a process."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from ddp_manual import TrainConfig, WorldSpec, join, spawn
from ddp_manual import train as train_here
from ddp_manual.environment import launcher_variables
from ddp_manual.errors import EVERY_ERROR, BadOption, Stopped
from ddp_manual.worker.explain_errors import as_ours
from tests.conftest import Start


def train(world: object, *args: object) -> None:
    """Never called: nothing here starts a process."""


def local() -> Any:
    def train_here(world: object) -> None: ...

    return train_here


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: spawn(lambda world: None, 2), r"spawn cannot start .*<lambda>"),
        (lambda: spawn(local(), 2), "spawn cannot start local.<locals>.train_here"),
        (lambda: spawn(train(None), 2), "train_fn is NoneType, which cannot be called"),
        (lambda: spawn(train, 0), "nprocs 0 is not a number of ranks"),
        (lambda: spawn(train, 2, 5), "args is int, not a sequence of arguments"),
        (lambda: spawn(train, 2, (threading.Lock(),)), "train and its args cannot be copied to the ranks"),
        (lambda: spawn(train, 2, rank=1), "spawn takes no rank"),
        (lambda: spawn(train, 2, token_file="nowhere"), "--token_file nowhere cannot be read"),
        (lambda: spawn(train, 2, join_timeout=0), "--join_timeout 0 is not above 0"),
        (lambda: WorldSpec(world_size=True), "--world_size True is not a whole number"),
    ],
)
def test_spawn_refuses_what_it_cannot_call_before_it_starts_a_process(call: Any, named: str) -> None:
    before = psutil.Process().children()  # such as the daemons of tests/hosts
    with pytest.raises(BadOption, match=named):
        call()
    assert psutil.Process().children() == before


def test_a_function_typed_at_a_prompt_is_refused_with_advice_where_to_put_it(start: Start) -> None:
    typed = "import ddp_manual\ndef train(world): pass\nddp_manual.spawn(train, 2)\n"
    script = start(sys.executable, "-c", typed)
    assert script.wait() == 1
    said = script.err
    assert "spawn cannot start train, which was typed into a notebook or at a prompt" in said
    assert "then: from training import train" in said


def test_an_error_keeps_its_text_and_exit_code_when_it_is_copied_to_another_process() -> None:
    errors = [kind("a", why="b", next="c") for kind in EVERY_ERROR.values() if kind is not Stopped]
    for error in (*errors, Stopped(15, "after step 3", next="d")):
        copied = ForkingPickler.loads(ForkingPickler.dumps(error))
        assert type(copied) is type(error)
        assert (copied.render(), copied.exit_code, copied.args) == (error.render(), error.exit_code, error.args)


def test_ranks_of_a_launcher_may_not_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launcher_variables.TORCHRUN.values():
        monkeypatch.setenv(name, "")  # put back at the end of the test
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launcher_variables.launched_as() is None
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(BadOption, match="as one of several ranks: RANK=1, WORLD_SIZE=2"):
        spawn(train, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launcher_variables.launched_as() is None


def test_a_process_group_opened_twice_is_refused_with_advice_to_leave_it_to_join(process_group: None) -> None:
    with pytest.raises(ValueError, match="twice") as caught:  # as in a function that spawn calls
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert as_ours(0, caught.value).next.startswith("leave init_process_group out")
    with pytest.raises(BadOption, match="has a process group already"), join(device="cpu", backend="gloo"):
        pass


@pytest.mark.parametrize(("is_child", "match"), [(False, "has a process group already"), (True, "a child of rank 0")])
def test_a_rank_that_an_agent_has_started_joins_once_and_in_its_own_process(
    process_group: None, monkeypatch: pytest.MonkeyPatch, is_child: bool, match: str
) -> None:
    rank = SimpleNamespace(pid=os.getppid() if is_child else os.getpid(), spec=WorldSpec(world_size=2, rank=0))
    monkeypatch.setattr("ddp_manual.worker.join.here", rank)
    with pytest.raises(BadOption, match=match):
        join()


def test_a_script_that_joins_by_itself_cannot_wait_for_lost_ranks() -> None:
    with pytest.raises(BadOption, match="--on_loss wait cannot work in a script that calls join") as caught:
        join(on_loss="wait").__enter__()
    assert "start the script with ddp-manual run --on_loss wait" in caught.value.next


def test_train_is_refused_after_the_rank_has_left() -> None:
    with join(world_size=1, rank=0, device="cpu") as world:
        world.check_open("train")
    with pytest.raises(BadOption, match="train was called after this rank had left"):
        train_here(world, TrainConfig())
