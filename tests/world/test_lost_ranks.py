"""A lost rank's seat is kept, whoever types its command gets it, and the run goes on from the step that it was at."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ddp_manual.training import checkpoint_files
from tests.conftest import DRAWN, LONGER, SHORT, RankProcess, Start
from tests.faulty import faulty
from tests.memory import MakeGroup, memory_groups
from tests.seats import Kept, differing, lose, steps_done, worker_of
from tests.world.test_rendezvous import last_error

HOST = os.uname().nodename
LOSSES = int(os.environ.get("DDP_MANUAL_SOAK_LOSSES", "5"))
# Of the training in which they are lost.
EPOCHS = -(-LOSSES // 10)
# How a rank may be lost; rank 0 also with its agent, whose place another process then takes.
WAYS = ("worker", "abort", "agent", "both", "stop")
StartKept = Callable[..., Kept]
RankCommand = Callable[..., list[object]]
# Bytes: a rank and its spare take less than half of it.
MEMORY = 1 << 30


@pytest.fixture
def start_kept(start: Start, port: int, digits: Path, tmp_path: Path) -> StartKept:
    """Start ranks that train ConvNet on the real MNIST, and keep their seats."""

    def start_kept(world_size: int, *options: object, epochs: int = EPOCHS) -> Kept:
        def start_rank(rank: int, world_size: int, *options: object) -> RankProcess:
            meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port]
            return start(sys.executable, "run_multi_gpu_train.py", *meeting, *training, *options)

        training = ["--data_dir", digits, "--run_dir", tmp_path / "run", "--epochs", epochs, "--peer_timeout", 2]
        training += ["--log_every", 10, "--batch_size", 20, "--hold_every", 1]
        return Kept(start_rank, world_size, *options)

    return start_kept


@pytest.fixture
def undisturbed(start: Start, port: int, digits: Path, tmp_path: Path) -> Path:
    """The folder of a run of three ranks with the same options, of which none was lost."""
    training = ["--data_dir", digits, "--run_dir", tmp_path / "undisturbed", "--epochs", EPOCHS, "--batch_size", 20]
    meeting = ["--world_size", 3, "--master_port", port]
    ranks = [start(sys.executable, "run_multi_gpu_train.py", *meeting, "--rank", rank, *training) for rank in range(3)]
    assert [rank.wait(600) for rank in ranks] == [0, 0, 0]
    return tmp_path / "undisturbed"


def test_who_types_a_lost_ranks_command_gets_its_seat_and_no_step_is_lost(
    start_kept: StartKept, undisturbed: Path, tmp_path: Path
) -> None:
    kept = start_kept(3)
    kept.until_trained()
    lost = worker_of(kept.ranks[2])
    os.kill(lost, signal.SIGKILL)
    assert kept.ranks[2].wait(10) == 137
    assert f"error[peer-lost]: rank 2 ({HOST}, pid {lost}) is gone: SIGKILL" in kept.ranks[2].err
    kept.ranks[0].wait_for("or go on without it: ")
    said = re.search(rf"rank 2 \({HOST}, pid {lost}\) is gone: SIGKILL. Its seat is kept; (.*)", kept.ranks[0].err)
    assert said is not None
    held = re.fullmatch(r"state of step (\d+) is held by ranks 0-1", said[1])
    assert held is not None
    assert f"to give it back, on any host:\n  {kept.ranks[2].typed.split(' --on_loss')[0][:40]}" in kept.ranks[0].err
    other = kept.type(2, "--lr", 0.5)
    assert other.wait(30) == 12 and "error[config-mismatch]" in other.err
    newcomer = kept.type_again(2)
    kept.wait_for_return(0, before=0)
    back = f"rank 2 is back, on {HOST}: all 3 go on after step {held[1]}; "
    assert back in kept.ranks[0].err
    newcomer.wait_for(back)
    second = kept.type(2)
    assert second.wait(30) == 13  # rank-taken
    assert kept.codes() == [0, 0, 0]
    assert differing(tmp_path / "run", undisturbed) == []
    (loss,) = map(json.loads, (tmp_path / "run" / "losses.jsonl").read_text().splitlines())
    assert (loss["after_step"], loss["steps_lost"], loss["ranks"]) == (int(held[1]), 0, [0, 1, 2])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["losses"] == 1 and summary["lost_seconds"] == loss["seconds"]


def test_where_nobody_takes_a_seat_in_time_what_is_held_is_saved_first(start_kept: StartKept, tmp_path: Path) -> None:
    kept = start_kept(2, "--rejoin_timeout", 2)
    kept.until_trained()
    lose(kept, 1, "agent")
    assert kept.ranks[0].wait(60) == 14
    nobody = "nobody has taken the seat of rank 1 within 2 s (--rejoin_timeout)"
    assert f"{nobody}: all that are here go on for a step, save a checkpoint, and stop\n" in kept.ranks[0].err
    held = re.search(r"1 of 2 ranks go on after step (\d+); ", kept.ranks[0].err)
    assert held is not None
    error = last_error(kept.ranks[0].err)
    assert "error[peer-lost]: rank 1 " in error and nobody in error and "saved a checkpoint in " in error
    (saved,) = checkpoint_files.find(tmp_path / "run" / "checkpoints")
    assert saved.step == int(held[1]) + 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ranks_lost_at_random_moments_in_every_way_end_with_the_parameters_of_an_undisturbed_run(
    start_kept: StartKept, undisturbed: Path, tmp_path: Path
) -> None:
    chosen, took = random.Random(LOSSES), []
    kept, losses = start_kept(3), 0
    kept.until_trained()
    ways = [*WAYS, *chosen.choices(WAYS, k=max(0, LOSSES - len(WAYS)))][:LOSSES]
    last = int(kept.ranks[0].err.rpartition("] step ")[2].split()[0].partition("/")[2])
    for way, step in zip(ways, sorted(chosen.randrange(last) for _ in ways), strict=True):
        rank = chosen.randrange(3)
        witness = (rank + 1) % 3
        kept.until_done(step)
        time.sleep(chosen.uniform(0, 0.1))
        before, since = kept.returns(witness), time.monotonic()
        if kept.ranks[0].process.poll() is not None:
            break  # the training was faster
        try:
            lose(kept, rank, way)
        except (AssertionError, psutil.NoSuchProcess):
            continue  # its worker has not come back yet
        losses += 1
        if rank != 0 or way in ("agent", "both"):
            kept.type_again(rank)
        if kept.ranks[witness].process.poll() == 0:
            break  # it was lost after its work was done
        kept.wait_for_return(witness, before)
        took.append(time.monotonic() - since)
    assert kept.codes(within=600) == [0, 0, 0], kept.ranks[0].err
    assert differing(tmp_path / "run", undisturbed) == []
    print(f"{losses} losses; from a loss until all went on: median {statistics.median(took):.1f} s")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MakeGroup]:
    with memory_groups(tmp_path / "cgroup") as make:
        yield make


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("raise@training:30", 1, "ValueError: no such digit"),
        ("eat@training:30", 137, "is gone: SIGKILL, since memory ran out"),
        ("abort@training:30", 134, "is gone: SIGABRT"),
    ],
)
def test_a_rank_that_its_own_code_or_the_kernel_has_ended_is_typed_again_without_the_fault(
    start: Start, rank_command: RankCommand, memory: MakeGroup, fault: str, code: int, said: str
) -> None:
    options = [*LONGER, 2, "--on_loss", "wait", "--on_loss_of_own_code", "--hold_every", 1]
    command = faulty(rank_command(1, 2, *options), fault)
    first = start(*rank_command(0, 2, *options))
    second = start(*(memory(MEMORY).command(command) if fault.startswith("eat") else command))
    assert second.wait(60) == code
    assert "then give this rank back, on any host: the others wait for it\n" in second.err
    first.wait_for("Its seat is kept; state of step ")
    # Rank 0 may have been about to hold the last step when it was ended.
    held = re.search(rf"{re.escape(said)}\. Its seat is kept; state of step (28|29) is held by rank 0\n", first.err)
    assert held is not None, first.err
    again = start(*rank_command(1, 2, *options))
    first.wait_for(f"all 2 go on after step {held[1]}; ")
    assert [first.wait(), again.wait()] == [0, 0]


def test_a_rank_may_be_lost_by_its_own_code_only_so_often(start: Start, rank_command: RankCommand) -> None:
    options = [*LONGER, 2, "--on_loss", "wait", "--on_loss_of_own_code", "--max_restarts", 2]
    # The fault counts the steps of each process.
    first = start(*faulty(rank_command(0, 2, *options), "raise@training:30"))
    second = start(*rank_command(1, 2, *options))
    assert [first.wait(), second.wait()] == [1, 14]
    assert first.err.count("It is started again; state of step ") == 2
    assert "ranks were lost by their own code more than 2 times" in second.err
    assert "ValueError: no such digit" in first.err


def test_rank_0s_seat_is_found_again_at_its_address_and_the_run_is_learnt_from_the_others(
    start_kept: StartKept,
) -> None:
    kept = start_kept(3)
    kept.until_trained()
    lose(kept, 0, "both")
    kept.ranks[1].wait_for("this rank keeps its state, and looks for rank 0 for 1800 s")
    kept.type_again(0)
    kept.wait_for_return(1, before=0)
    assert "rank 0 is back, on " in kept.ranks[1].err
    assert re.search(r"going on with run \w{8}, which rank [12] ", kept.ranks[0].err)
    assert kept.codes() == [0, 0, 0]


def test_a_world_shrinks_and_grows_in_the_middle_of_an_epoch_and_sees_each_sample_once(
    start: Start, port: int, small_data: Path, tmp_path: Path
) -> None:
    training = ["--dataset", "synthetic", "--model", "mlp", "--epochs", 1, "--data_dir", small_data]

    def start_rank(rank: int, world_size: int, *options: object) -> RankProcess:
        meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port, "--run_dir", tmp_path / "run"]
        record = {"RECORD": str(tmp_path / f"samples{rank}"), "RECORD_WHERE": "1"}
        words = ["tests/world/recording_rank.py", "train", *meeting, *training, *options]
        return start(sys.executable, *words, **record)

    kept = Kept(start_rank, 3, "--global_batch_size", 9, "--log_every", 10, "--hold_every", 1)
    kept.until_trained()
    status = [sys.executable, "-m", "ddp_manual", "status", "--master_port", port]
    early = start(*status, "--shrink")
    assert early.wait() == 2 and "--shrink has nothing to do" in early.err
    lose(kept, 2, "both")
    kept.ranks[0].wait_for("or go on without it: ")
    shrunk = start(*status, "--shrink", "--json")
    assert shrunk.wait() == 0 and json.loads(shrunk.out)["left_out"] == [[2, 2]]
    kept.wait_for_return(0, before=0)
    assert "2 of 3 ranks go on after step " in kept.ranks[0].err
    kept.ranks[0].wait_for("--global_batch_size 9 cannot be divided over 2 ranks: a step takes 8 samples")
    done = steps_done(kept.ranks[0])
    while steps_done(kept.ranks[0]) < done + 5:
        time.sleep(0.01)
    kept.type_again(2)
    kept.wait_for_return(0, before=1)
    assert f"rank 2 is back, on {HOST}: all 3 go on after step " in kept.ranks[0].err
    assert kept.codes() == [0, 0, 0]
    sizes, seen = samples_seen([tmp_path / f"samples{rank}" for rank in range(3)])
    assert sizes == [3, 2, 3]
    assert sorted(seen) == list(range(DRAWN["train"]))


def samples_seen(records: Sequence[Path]) -> tuple[list[int], list[int]]:
    """Return the numbers of ranks one after the other, and the samples of the epoch as they count.

    Of a step that was in flight when a rank was lost there are two records; the second one counts, in which the number
    of ranks may be another one.
    """
    found = [[[int(word) for word in line.split()] for line in record.read_text().splitlines()] for record in records]
    steps = {start: size for start, size, *_ in found[0]}
    last = {(rank, start): (size, rest) for rank, lines in enumerate(found) for start, size, *rest in lines}
    seen = [index for (_, start), (size, rest) in last.items() if steps[start] == size for index in rest]
    return [size for size, _ in itertools.groupby(steps[start] for start in sorted(steps))], seen


def test_several_lost_ranks_are_given_back_one_after_the_other(start_kept: StartKept) -> None:
    kept = start_kept(3)
    kept.until_trained()
    for rank in (1, 2):
        lose(kept, rank, "both")
    kept.ranks[0].wait_for("Their seats are kept; state of step ")
    kept.type_again(1)
    kept.ranks[0].wait_for("waiting for rank 2; 2 of 3 here")
    kept.type_again(2)
    kept.wait_for_return(0, before=0)
    assert f"ranks 1-2 are back, on {HOST}: all 3 go on after step " in kept.ranks[0].err
    assert kept.codes() == [0, 0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_a_seat_is_free_saves_what_is_held_and_ends_the_run(
    start_kept: StartKept, tmp_path: Path, rank: int
) -> None:
    kept = start_kept(3, epochs=5)
    kept.until_trained()
    lose(kept, 2, "both")
    kept.ranks[0].wait_for("or go on without it: ")
    kept.ranks[rank].process.send_signal(signal.SIGINT)
    assert [one.wait(30) for one in kept.ranks[:2]] == [130, 130]
    assert "all that are here go on for a step, save a checkpoint, and stop" in kept.ranks[rank].err
    assert "--resume auto" in kept.ranks[0].err and kept.ranks[1].err.count("error[") == 1
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))


def test_a_second_ctrl_c_while_a_seat_is_free_ends_a_rank_at_once(start_kept: StartKept) -> None:
    kept = start_kept(3, epochs=5)
    kept.until_trained()
    lose(kept, 2, "worker")
    kept.ranks[0].wait_for("or go on without it: ")
    os.kill(kept.ranks[1].process.pid, signal.SIGSTOP)  # so that nobody goes on
    kept.ranks[0].process.send_signal(signal.SIGINT)
    kept.ranks[0].wait_for("a second signal ends this rank at once")
    time.sleep(1.2)
    kept.ranks[0].process.send_signal(signal.SIGINT)
    assert kept.ranks[0].wait(30) == 130


def test_a_stop_that_was_asked_for_before_a_loss_is_still_done_in_order(start_kept: StartKept, tmp_path: Path) -> None:
    kept = start_kept(2, epochs=50)
    kept.until_trained()
    os.kill(worker_of(kept.ranks[1]), signal.SIGSTOP)  # so that the ranks do not agree on the stop
    kept.ranks[0].process.send_signal(signal.SIGTERM)
    assert kept.ranks[1].wait(30) == 14
    assert kept.ranks[0].wait(60) == 143
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))


def test_a_rank_0_whose_agent_was_stopped_for_longer_than_peer_timeout_goes_on_with_the_others(
    start_kept: StartKept,
) -> None:
    kept = start_kept(2, epochs=20)
    kept.until_trained()
    os.kill(kept.ranks[0].process.pid, signal.SIGSTOP)
    kept.ranks[1].wait_for("this rank keeps its state, and looks for rank 0 for 1800 s")
    kept.ranks[1].wait_for("is not rank 0: something accepts connections there but says nothing")
    os.kill(kept.ranks[0].process.pid, signal.SIGCONT)
    kept.wait_for_return(1, before=0)
    assert kept.codes() == [0, 0]


def test_a_newcomer_on_a_host_without_the_data_leaves_and_the_seat_is_kept(
    start_kept: StartKept, tmp_path: Path
) -> None:
    kept = start_kept(2)
    kept.until_trained()
    lose(kept, 1, "worker")
    kept.ranks[0].wait_for("Its seat is kept; state of step ")
    elsewhere = kept.type(1, "--data_dir", tmp_path / "nowhere")
    assert elsewhere.wait(60) == 16 and "error[data-missing]" in elsewhere.err
    assert "next: give the folder that has them as --data_dir, or use digits drawn in code" in elsewhere.err
    assert "then give this rank back, on any host: the others wait for it" in elsewhere.err
    kept.type_again(1)
    kept.wait_for_return(0, before=1)
    assert kept.codes() == [0, 0]


def test_a_newcomer_on_a_host_without_the_data_does_not_stop_a_world_that_has_shrunk(
    start_kept: StartKept, tmp_path: Path
) -> None:
    kept = start_kept(2, "--shrink_after", 0.5, epochs=20)
    kept.until_trained()
    lose(kept, 1, "both")
    kept.ranks[0].wait_for("1 of 2 ranks go on after step ")
    elsewhere = kept.type(1, "--data_dir", tmp_path / "nowhere")
    assert elsewhere.wait(60) == 16
    kept.ranks[0].wait_for(". The others go on without it; state of step ")
    ends_again = kept.ranks[0].err.rindex(". The others go on without it")
    deadline = time.monotonic() + 60
    while not re.search(r"step \d+/\d+ epoch", kept.ranks[0].err[ends_again:]):
        assert time.monotonic() < deadline and kept.ranks[0].process.poll() is None, kept.ranks[0].err
        time.sleep(0.05)
    kept.ranks[0].process.terminate()
    assert kept.ranks[0].wait(60) == 143, kept.ranks[0].err


def test_a_stop_that_only_a_lost_rank_was_asked_for_is_forgotten_with_it(start_kept: StartKept) -> None:
    kept = start_kept(2)
    kept.until_trained()
    first = worker_of(kept.ranks[0])
    os.kill(first, signal.SIGSTOP)  # so that the ranks do not agree on the stop
    kept.ranks[1].process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    lose(kept, 1, "both")
    os.kill(first, signal.SIGCONT)
    kept.ranks[0].wait_for("Its seat is kept; state of step ")
    kept.type_again(1)
    kept.wait_for_return(0, before=0)
    assert kept.codes() == [0, 0]


@pytest.fixture
def start_program(start: Start, port: int) -> Callable[..., RankProcess]:
    """Start one of three ranks of a program that works for some seconds: rank 1 for 2, the others for ``seconds``."""

    def start_program(rank: int, how: str, seconds: int) -> RankProcess:
        meeting = ["--world_size", 3, "--rank", rank, "--master_port", port, "--on_loss", how, "--peer_timeout", 2]
        program = ["--no_python", "sh", "-c", f"sleep $((RANK == 1 ? 2 : {seconds}))"]
        return start(sys.executable, "-m", "ddp_manual", "run", *meeting, *program)

    return start_program


def kill_program(rank: RankProcess) -> None:
    os.kill(psutil.Process(rank.process.pid).children()[0].pid, signal.SIGKILL)


def test_a_loss_after_another_rank_has_finished_and_left_ends_the_run(
    start_program: Callable[..., RankProcess],
) -> None:
    ranks = [start_program(rank, "wait", 60) for rank in range(3)]
    assert ranks[1].wait(30) == 0, ranks[1].err
    kill_program(ranks[2])
    assert ranks[2].wait(30) == 137
    assert ranks[0].wait(30) == 14 and "is gone: SIGKILL" in ranks[0].err


def test_whoever_comes_back_to_a_run_of_which_a_rank_has_finished_is_told_that_it_is_over(
    start_program: Callable[..., RankProcess],
) -> None:
    ranks = [start_program(rank, "shrink", 8) for rank in range(3)]
    ranks[0].wait_for("starting sh as rank 0 of 3")
    kill_program(ranks[2])
    assert ranks[2].wait(30) == 137
    assert "the others go on without it until then" in ranks[2].err
    ranks[0].wait_for("is gone: SIGKILL. The others go on without it; all ranks' programs will start again")
    assert ranks[1].wait(30) == 0
    late = start_program(2, "shrink", 8)
    assert late.wait(30) == 14 and "error[master-lost]: the run is over" in late.err
    assert ranks[0].wait(30) == 0, ranks[0].err


def test_under_launch_a_worker_is_started_again_by_itself(start: Start, port: int, small_data: Path) -> None:
    meeting = ["--nproc", 2, "--on_loss", "wait", "--master_port", port]
    training = [*SHORT, "--data_dir", small_data, "--epochs", 20]
    launch = start(sys.executable, "-m", "ddp_manual", "launch", *meeting, "--", *training)
    launch.wait_for("[rank 0] step 100/")
    lose_worker(launch)
    launch.wait_for("is gone: SIGKILL. It is started again; state of step ")
    launch.wait_for("all 2 go on after step ")
    assert launch.wait() == 0


def lose_worker(launch: RankProcess) -> None:
    """Kill a worker of ``launch``."""
    agents = psutil.Process(launch.process.pid)
    os.kill([worker.pid for forker in agents.children() for worker in forker.children()][-1], signal.SIGKILL)


def test_survivors_are_training_again_soon_and_nothing_grows(start_kept: StartKept) -> None:
    """Rank 0's worker is started again by its agent, so that what it takes is the survivors' own part."""
    kept = start_kept(2, epochs=20)
    kept.until_trained()
    took, grown = [], []
    for _ in range(4):
        before = kept.returns(1)
        lose(kept, 0, "worker")
        since, done = time.monotonic(), steps_done(kept.ranks[1])
        while steps_done(kept.ranks[1]) <= done + 1:
            assert time.monotonic() - since < 30, kept.ranks[1].err
            time.sleep(0.005)
        took.append(time.monotonic() - since)
        kept.wait_for_return(1, before)
        agent = psutil.Process(kept.ranks[1].process.pid)
        grown.append((agent.num_fds(), agent.num_threads(), len(agent.children(recursive=True))))
    assert statistics.median(took) < 5
    assert len(set(grown)) == 1, grown
    print(f"survivors train again after {', '.join(f'{seconds:.2f}' for seconds in took)} s")


def test_a_loss_is_not_waited_for_in_a_script_that_joins(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "joins.py"
    script.write_text("import ddp_manual\nwith ddp_manual.join(on_loss='wait') as world:\n    pass\n")
    joins = start(sys.executable, script)
    assert joins.wait() == 1
    assert "cannot work in a script that calls join()" in joins.err
