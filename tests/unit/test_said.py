"""Which lines of torchrun, accelerate and ours the table of faults quotes; the lines are what they printed."""

from __future__ import annotations

from benchmarks.said import Said, of_ours, of_torch, rows

KILLED = """\
[W1123 06:45:48.635546868 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
[rank1]: Traceback (most recent call last):
[rank1]:   File "/srv/benchmarks/plain_faults.py", line 54, in main
[rank1]:     dist.all_reduce(mean)
[rank1]: RuntimeError: [/__w/gloo/transport/tcp/pair.cc:545] Read error [10.77.1.3]:61110: Connection reset by peer.
E1123 06:46:30.316000 15212 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_06:46:30
  host      : hostB
  rank      : 1 (local_rank: 0)
  exitcode  : 1 (pid: 15282)
"""
TAKEN = """\
error[rank-taken]: rank 1 is taken by hostB (pid 20834)
  why:  that process has held it since 06:56:31; this one is hostC (pid 20840)
  next: ddp-manual run --world_size 3 --rank 2 train.py
"""
WAITING = """\
[rank 2] nothing listens at 10.77.1.1:29501: is rank 0 started? (1 s of 1800 s)
[rank 2] to start what is missing:
  ddp-manual run --world_size 3 --rank 0 train.py
  (if it runs: 10.77.1.1:29501 may not be its address; or open TCP port 29501 there, which a firewall may close)
[rank 2] nothing listens at 10.77.1.1:29501: is rank 0 started? (11 s of 1800 s)
[rank 2] waiting for rank 1; 2 of 3 here: 0 (hostA), 2 (hostC) (12 s of 1800 s)
"""


def said(text: str) -> list[Said]:
    return [(float(number), line) for number, line in enumerate(text.splitlines())]


def test_of_torch_its_exception_and_its_root_cause_are_quoted() -> None:
    assert of_torch(said(KILLED)) == [
        (4.0, "RuntimeError: Read error [10.77.1.3]:61110: Connection reset by peer."),
        (12.0, "Root Cause (first observed failure): rank 1, exitcode 1 (pid: 15282)"),
    ]
    assert of_torch(said("[E1123 06:46:30.31 TCPStore.cpp:1] [c10d] timed out\ntrained 3 steps\n")) == [
        (0.0, "[c10d] timed out"),
        (1.0, "trained 3 steps"),
    ]


def test_of_ours_the_error_is_quoted_or_every_state_that_a_rank_waits_in() -> None:
    why = "why:  that process has held it since 06:56:31; this one is hostC (pid 20840)"
    next = "next: ddp-manual run --world_size 3 --rank 2 train.py"
    assert of_ours(said(TAKEN)) == [(0.0, f"error[rank-taken]: rank 1 is taken by hostB (pid 20834) / {why} / {next}")]
    advice = (
        "(if it runs: 10.77.1.1:29501 may not be its address; or open TCP port 29501 there, which a firewall may close)"
    )
    command = "to start what is missing: ddp-manual run --world_size 3 --rank 0 train.py"
    assert of_ours(said(WAITING)) == [
        (0.0, f"nothing listens at 10.77.1.1:29501: is rank 0 started? / {command} / {advice}"),
        (5.0, "waiting for rank 1; 2 of 3 here: 0 (hostA), 2 (hostC)"),
    ]


def test_ranks_that_said_the_same_share_a_line_of_the_table() -> None:
    commands = [
        {"typed": f"torchrun --node_rank {rank}", "lines": [(rank, f"RuntimeError: by peer [10.0.0.{rank}]:{rank}")]}
        for rank in range(2)
    ]
    ends = [{"gone": 4.2, "exit code": 1}, {"gone": None, "exit code": None}]
    ended = [{**command, **end} for command, end in zip(commands, ends, strict=True)]
    told = "rank 0 after 0.0 s, rank 1 after 1.0 s: `RuntimeError: by peer [10.0.0.0]:0`"
    assert rows("a fault", "torchrun", ended) == f"| a fault | torchrun | {told} | 4, - | 1, - |"
