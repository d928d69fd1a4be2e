"""What torch's errors about collectives become. The texts are those of real reports, named beside each; the errors are
raised here, since no GPU is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp_manual import errors
from ddp_manual.worker import private_torch, process_group
from ddp_manual.worker.explain_errors import as_ours, first_line, is_broken_collective

SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
INTERNAL = "ncclInternalError: Internal check failed."
CUDA = "ncclUnhandledCudaError: Call to CUDA function failed."


def of_nccl(kind: str, named: str, last: str, at: str = "NCCLUtils.hpp:268", version: str = "2.21.5") -> Exception:
    """As ProcessGroupNCCL raises it, which is "nccl" up to torch 2.14."""
    head = f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/{at}, {kind}, NCCL version {version}"
    return dist.DistBackendError(f"{head}\n{named}\nLast error:\n{last}")


def of_nccl2(call: str, kind: str, last: str) -> Exception:
    """As ProcessGroupNCCL2 raises it, which is "nccl" since torch 2.15."""
    return RuntimeError(f"{call} failed: {kind} \nNCCL Last Error: {last}")


UNHANDLED = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
GONE = "remote process exited or there was a network error"
OWN_FAULT = "internal error - please report this issue to the NCCL developers"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:232] "
NO_SHARED_MEMORY = "Error while creating shared memory segment /dev/shm/nccl-WU88OE, error: No space left (28)"
NO_ROUTE = "socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host) errno 115"
LATE = "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
# Report, error, identifier while joining, identifier later, whether another rank may be the reason, what it quotes.
TABLE: list[tuple[str, Exception, str, str, bool, str]] = [
    (
        "torch 2.15",
        RuntimeError("nccl2 requires at least one CUDA device"),
        *("device-missing", "device-missing", False, "at least one CUDA device"),
    ),
    (
        "pytorch/ci-infra#490",
        of_nccl2("NCCL AllReduce", UNHANDLED, NO_SHARED_MEMORY),
        *("out-of-memory", "out-of-memory", False, "No space left"),
    ),
    (
        "verl-project/verl#161",
        of_nccl("invalid usage", USAGE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"),
        *("device-taken", "device-taken", False, "invalid usage, NCCL version 2.21.5; Duplicate GPU detected : rank 1"),
    ),
    (
        "NVIDIA/nccl#1235",
        of_nccl("unhandled cuda error", CUDA, "Failed to CUDA calloc 6291456 bytes"),
        *("out-of-memory", "out-of-memory", False, "; Failed to CUDA calloc 6291456 bytes"),
    ),
    (
        "NVIDIA/nccl#2076",
        of_nccl(GONE, REMOTE, "socketProgressOpt: Call to recv from 172....<33759> failed : Connection reset by peer"),
        *("peer-lost", "peer-lost", True, "; socketProgressOpt: Call to recv from 172....<33759> failed"),
    ),
    (
        "tatsu-lab/stanford_alpaca#207",
        of_nccl(GONE, REMOTE, "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0"),
        *("peer-lost", "peer-lost", True, "NCCL_IB_DISABLE=1"),
    ),
    (
        "EvolvingLMMs-Lab/open-r1-multimodal#7",
        of_nccl(OWN_FAULT, INTERNAL, "Bootstrap : no socket interface found"),
        *("peer-unreachable", "peer-unreachable", False, "let NCCL_SOCKET_IFNAME"),
    ),
    (
        "sgl-project/sglang#3820",
        of_nccl(UNHANDLED, SYSTEM, NO_ROUTE),
        *("peer-unreachable", "peer-unreachable", True, "open all TCP ports between the hosts"),
    ),
    (
        "hiyouga/LlamaFactory#7396",
        dist.DistBackendError(f"[Rank 0] Watchdog caught collective operation timeout: {LATE}"),
        *("peer-unreachable", "peer-stalled", True, "SeqNum=1580, OpType=ALLREDUCE"),
    ),
    (
        "gloo, a rank that is killed",
        RuntimeError(f"{GLOO}Connection closed by peer [::1]:3123"),
        *("peer-lost", "peer-lost", True, "RuntimeError: Connection closed by peer"),
    ),
    (
        "gloo, a rank that does not come",
        RuntimeError(f"{GLOO}Timed out waiting 1800000ms for recv operation to complete"),
        *("peer-unreachable", "peer-stalled", True, "Timed out waiting 1800000ms"),
    ),
    (
        "gloo, only rank 0's port open between hosts",
        RuntimeError(f"Gloo connectFullMesh failed with {GLOO}connect [127.0.0.1]:4321: Connection refused"),
        *("peer-unreachable", "training-failed", False, "Connection refused"),
    ),
    (
        "gloo, GLOO_SOCKET_IFNAME=eth9",
        RuntimeError(f"{GLOO}ifa != nullptr. Unable to find address for: eth9"),
        *("peer-unreachable", "training-failed", False, "GLOO_SOCKET_IFNAME"),
    ),
    (
        "an error that no report has",
        of_nccl(OWN_FAULT, INTERNAL, ""),
        *("peer-unreachable", "peer-lost", True, "NCCL_DEBUG=INFO"),
    ),
]


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as again:
        return again


@pytest.mark.parametrize(
    ("report", "error", "joining", "later", "of_another", "quoted"), TABLE, ids=[row[0] for row in TABLE]
)
def test_each_of_torchs_words_about_a_collective_has_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
    report: str,
    error: Exception,
    joining: str,
    later: str,
    of_another: bool,
    quoted: str,
) -> None:
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(side_effect=error))
    with pytest.raises(errors.DdpManualError) as caught:
        process_group.open_process_group(dist.HashStore(), 1, 2, "nccl", torch.device("cpu"))  # type: ignore[arg-type]
    assert caught.value.identifier == joining, report
    found = as_ours(1, raised(error))
    assert found.identifier == later, report
    if later != "training-failed" or "NCCL" in str(error):
        assert quoted in found.render(), report
    assert is_broken_collective(error) == of_another, report
    assert "killed, out of memory?" not in found.next or of_another


def test_what_nccl_said_last_is_kept_and_what_helps_nobody_is_left_out() -> None:
    assert first_line(of_nccl(UNHANDLED, SYSTEM, "Call to bind failed\nException raised from getNCCLComm")) == (
        "DistBackendError: unhandled system error, NCCL version 2.21.5; Call to bind failed"
    )
    assert first_line(of_nccl2("NCCL AllReduce", GONE, "")) == f"RuntimeError: NCCL AllReduce failed: {GONE}"
    assert first_line(ValueError("\n  one\ntwo")) == "ValueError: one"
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("Failed to run stage backward:\nStage output: ...") from ValueError("bad sample")
    assert first_line(raised.value) == "RuntimeError: Failed to run stage backward: ValueError: bad sample"
    loading = RuntimeError("Error(s) in loading state_dict for Net:\n\tsize mismatch for weight")
    assert first_line(loading) == "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for weight"


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader timed out after 5 seconds",
        "Connection refused",
        "CUDA out of memory",
        "Data processing error: Reqwest Error: Connection reset by peer (os error 104)",  # huggingface_hub's, with Xet
    ],
)
def test_an_error_of_the_users_own_code_is_not_taken_for_one_of_a_collective(text: str) -> None:
    assert as_ours(1, RuntimeError(text)).identifier == "training-failed"
    assert not is_broken_collective(RuntimeError(text))


def test_the_line_on_which_the_memory_of_a_gpu_was_not_enough_is_shown() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    found = as_ours(1, raised.value)
    assert found.identifier == "out-of-memory" and "test_explain_errors.py" in found.why and "2.00 GiB" in found.why


def test_an_error_that_was_raised_while_that_of_a_collective_was_handled_may_have_another_rank_for_its_reason() -> None:
    error = ValueError("my step failed")
    error.__cause__ = error  # as after ``raise error from error``
    error.__context__ = dist.DistNetworkError("Connection closed by peer")
    assert is_broken_collective(error)
    assert as_ours(1, error).what.endswith(": ValueError: my step failed")


def test_an_error_that_the_users_code_has_made_of_that_of_a_collective_is_explained_too() -> None:
    made = ValueError("my step failed")
    made.__cause__ = of_nccl(UNHANDLED, SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-EoOvZr")
    found = as_ours(1, made)
    assert found.identifier == "out-of-memory" and "/dev/shm has " in found.why and "MB free" in found.why


def test_the_time_out_of_the_first_all_reduce_is_that_of_its_wait_and_not_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the group's time-out NCCL's watchdog aborts the process; gloo has the same time-outs, and no watchdog."""
    never_done, first = mock.Mock(), timedelta(seconds=0.2)
    never_done.wait.side_effect = dist.DistBackendError("NCCL operation timed out")
    of_groups: list[Mapping[str, float]] = []

    def all_reduce(total: torch.Tensor, *, async_op: bool) -> object:
        of_groups.append(private_torch.open_groups().timeouts)
        return never_done

    monkeypatch.setattr(process_group, "FIRST_COLLECTIVE_TIMEOUT", first)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    place: Any = (dist.HashStore(), 0, 1, "gloo", torch.device("cpu"), timedelta(minutes=45))
    try:
        with pytest.raises(errors.PeerUnreachable, match="got no answer from another rank"):
            process_group.open_process_group(*place)
    finally:
        dist.destroy_process_group()
    assert [[*timeouts.values()] for timeouts in of_groups] == [[45 * 60.0]]
    never_done.wait.assert_called_once_with(first)


STATUS = '{"pg_status":{"0":{"last_completed_collective":"%d","last_enqueued_collective":"9"}}}'


@pytest.mark.parametrize(
    ("completed", "nccl2", "open_groups", "unfinished"),
    [(7, None, 1, 2), (9, None, 1, 0), (-1, None, 1, None), (7, 8, 1, 3), (-1, 8, 2, 1), (7, None, 0, None)],
)
def test_the_collectives_that_a_gpu_has_not_completed_are_read_from_torchs_recorders(
    monkeypatch: pytest.MonkeyPatch, completed: int, nccl2: int | None, open_groups: int, unfinished: int | None
) -> None:
    """The recorders of NCCL are fakes, for want of a GPU: what the real ones said, with other numbers."""
    said, empty = STATUS % completed, '{"pg_status":{}}'
    other = {"nccl2": STATUS % nccl2} if nccl2 else {}
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda *options: said.encode(), raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *options: other.get(options[-1], empty), raising=False)
    world = SimpleNamespace(pg_names=dict.fromkeys(range(open_groups), "0"))  # without groups that were destroyed
    monkeypatch.setattr(private_torch.distributed_c10d, "_world", world)
    assert private_torch.collectives_unfinished() == unfinished


@pytest.mark.parametrize("said", [b"{}", b"", b'{"pg_status":{"0":{}}}', b'{"pg_status":[]}', b'{"pg_status":{"0":4}}'])
def test_a_recorder_in_another_format_says_nothing(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda *options: said, raising=False)
    assert private_torch.collectives_unfinished() is None


def test_the_recorder_of_gloo_has_the_format_that_is_read_from_those_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: torch has a single format, and no recorder says anything of NCCL on a host without a GPU."""
    c10d = torch._C._distributed_c10d

    def groups(*options: object) -> dict[str, object]:
        recorded: dict[str, object] = json.loads(c10d._dump_fr_trace_json(*options))["pg_status"]
        return recorded

    of_other_tests = groups(False, False)  # a recorder keeps the groups that were destroyed

    def record(*options: object) -> str:
        own = {name: group for name, group in groups(*options).items() if name not in of_other_tests}
        return json.dumps({"pg_status": own})

    assert private_torch.collectives_unfinished() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(c10d, "_dump_nccl_trace_json", record, raising=False)
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
            # gloo's threads note the end after the rank has gone on, and those of several collectives in any order.
            wait_until_unfinished(0)
    finally:
        dist.destroy_process_group()


def wait_until_unfinished(count: int) -> None:
    deadline = time.monotonic() + 10
    while private_torch.collectives_unfinished() != count:
        assert time.monotonic() < deadline, private_torch.collectives_unfinished()
        time.sleep(0.05)


@pytest.mark.gpu
def test_a_collective_is_unfinished_until_the_gpu_has_completed_it() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    process_group.open_process_group(dist.HashStore(), 0, 1, "nccl", device)  # type: ignore[arg-type]
    try:
        wait_until_unfinished(0)
        torch.cuda._sleep(6_000_000_000)  # about 3 s
        work = dist.all_reduce(torch.ones(1, device=device), async_op=True)
        wait_until_unfinished(1)
        assert work is not None
        work.wait()
        torch.cuda.synchronize()
        wait_until_unfinished(0)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_a_first_all_reduce_without_a_result_is_an_error_and_no_watchdog_aborts_the_process() -> None:
    """The GPU is busy for longer than the first all-reduce may take."""
    program = """
import time, torch, torch.distributed as dist
from datetime import timedelta
from ddp_manual.errors import PeerUnreachable
from ddp_manual.worker import process_group
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
process_group.FIRST_COLLECTIVE_TIMEOUT = timedelta(seconds=2)
set_timeout = process_group.set_timeout

def set_timeout_and_be_busy(timeout):
    set_timeout(timeout)
    torch.ones(1, device=device)  # its kernel is loaded once the GPU is idle
    torch.cuda._sleep(20_000_000_000)  # about 10 s

process_group.set_timeout = set_timeout_and_be_busy
try:
    process_group.open_process_group(dist.HashStore(), 0, 1, "nccl", device)
except PeerUnreachable as error:
    print(error.render(), flush=True)
time.sleep(5)
print("alive", flush=True)
import os
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "got no answer from another rank" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0 and done.stdout.endswith("alive\n"), done.stderr
