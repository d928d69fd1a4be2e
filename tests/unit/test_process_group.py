"""The end of a process whose threads of gloo may still have something to do."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ddp_manual.worker import private_torch, process_group


def test_the_end_waits_for_a_thread_that_wakes_up_time_and_again_and_needs_the_gil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of Python in place of gloo's, which cannot be stopped between two steps."""
    monkeypatch.setattr(process_group, "RELEASE_WITHIN", 30.0)
    released: list[int] = []

    def release() -> None:
        for number in range(40):
            time.sleep(0.0005)  # needs the GIL when it wakes up
            released.append(number)

    thread = threading.Thread(target=release)
    thread.start()
    process_group.release_tensors_of_collectives()
    assert len(released) == 40
    thread.join()


def test_the_time_outs_of_process_groups_are_those_that_the_program_has_given_them() -> None:
    assert private_torch.open_groups().timeouts == {}
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(hours=4))
    try:
        short = dist.new_group([0], timeout=timedelta(seconds=10))
        default, short = (group.group_name for group in (dist.group.WORLD, short))
        assert private_torch.open_groups().timeouts == {default: 14400.0, short: 10.0}
        private_torch.set_timeout(timedelta(seconds=5))
        assert private_torch.open_groups().timeouts == {default: 5.0, short: 10.0}
    finally:
        dist.destroy_process_group()


def test_ranks_meet_in_the_same_part_of_the_store_although_one_begins_its_next_group_before_another_its_first() -> None:
    """As with NCCL, whose groups open without waiting for other ranks."""
    store, found = dist.HashStore(), []
    for rank, opening in enumerate([private_torch._Opening(), private_torch._Opening()]):
        for number in range(3):
            opening.begin(store, 4, is_whole=False)  # fails, and counts as none
            opening.is_done(2)
            part = opening.begin(store, 2, is_whole=True)
            opening.is_done(2)
            part.set(f"rank {rank}", str(number))
            found += [part.get("rank 0")] if rank else []
    assert found == [b"0", b"1", b"2"] and store.get("rank 1") == b"0"


@pytest.mark.parametrize(("gloo", "nccl", "at_once"), [(7, 0, False), (7, 1, True), (0, 7, True)])
def test_whether_collectives_return_at_once_follows_from_the_backend_that_has_begun_some(
    monkeypatch: pytest.MonkeyPatch, gloo: int, nccl: int, at_once: bool
) -> None:
    """Of a group as torch opens it on a host with GPUs, for want of one: with both backends, of which each numbers its
    own collectives."""

    class Hashable(SimpleNamespace):
        __hash__ = object.__hash__

    backends = {
        device: Hashable(name=lambda name=name: name, _get_sequence_number_for_group=lambda begun=begun: begun)
        for device, name, begun in (("cpu", "gloo", gloo), ("cuda", "nccl", nccl))
    }
    group = Hashable(_device_types=tuple(backends), _get_backend=backends.__getitem__)
    monkeypatch.setattr(private_torch.distributed_c10d, "_world", SimpleNamespace(pg_names={group: "0"}))
    assert private_torch.open_groups() == ({"0": gloo + nccl}, {}, gloo + nccl, at_once)


def test_the_end_does_not_wait_for_threads_that_sleep_and_not_for_ever_for_one_that_never_does() -> None:
    """In a process of its own, which no other thread wakes up."""
    script = """
import threading, time
from ddp_manual.worker import process_group
threading.Thread(target=threading.Event().wait, daemon=True).start()
began = time.monotonic()
process_group.release_tensors_of_collectives()
asleep = time.monotonic() - began
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
process_group.RELEASE_WITHIN = 0.3
began = time.monotonic()
process_group.release_tensors_of_collectives()
print(asleep, time.monotonic() - began)
"""
    asleep, busy = map(float, subprocess.check_output([sys.executable, "-c", script], text=True).split())
    assert asleep < 1 and 0.3 <= busy < 3
