"""``with rendezvous(spec) as world:`` - from a rank's number to a process group that works, and out again.

address -> store -> roll call -> pin the device -> process group -> (the caller's code) -> leave, rank 0 last
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ddp_manual import console, environment, user_code
from ddp_manual.errors import (
    DdpManualError,
    PeerGone,
    RanksDoNotBelongTogether,
    RankTaken,
    Stopped,
    StopSignal,
)
from ddp_manual.rendezvous import device as devices
from ddp_manual.rendezvous import lastwords, preflight
from ddp_manual.rendezvous.answer import Answered
from ddp_manual.rendezvous.entries import Hello
from ddp_manual.rendezvous.group import check_none_open, close_process_group, open_process_group
from ddp_manual.rendezvous.keeper import Keeper
from ddp_manual.rendezvous.meeting import LEAVE_TIMEOUT, Meeting
from ddp_manual.rendezvous.met import MetWorld
from ddp_manual.rendezvous.progress import LEAVING, RUNNING, Progress
from ddp_manual.rendezvous.steps import Steps
from ddp_manual.rendezvous.watchdog import Follower, Watchdog, Watched, attempt
from ddp_manual.rendezvous.world import World
from ddp_manual.world_spec import WorldSpec

logger = logging.getLogger(__name__)

# Seconds to write why a rank leaves.
KEEP_WITHIN = 1.0


@contextmanager
def rendezvous(
    spec: WorldSpec,
    *,
    options: Mapping[str, tuple[Any, str]] | None = None,
    run_dir: str | None = None,
    command: str | None = None,
    steps: Steps | None = None,
    tell: Callable[[DdpManualError], None] = console.print_error,
) -> Iterator[World]:
    """Meet the other ranks, run the body as one of them, and leave in order.

    An exception in the body is told to all other ranks, which then leave too, before it goes on to the caller. Stopped,
    which ``train`` raises on all of them, is none: they leave in order, and then it goes on.

    Args:
        options: option -> (value, source), for what the ranks must have in common; rank 0 compares.
        run_dir: where files of this run go, with ``{run_id}`` for its name; rank 0's counts. None: no files.
        command: the command that starts a rank, with ``{rank}`` and ``{master_port}`` for the numbers; None if it is a
            script of the user's own, which then has to be the same on every rank.
        tell: told why this process ends, where a thread has to end it since the main one is blocked.
        steps: filled with what is done, and how long each step takes.

    Raises:
        DdpManualError: the ranks do not come together, or a peer has ended the run. Else what the body raises.
    """
    user_code.refuse_while_importing("rendezvous")
    started = time.monotonic()
    console.log_to_stderr(spec.rank)
    environment.bound_reverse_lookups()
    environment.quiet_torch_warnings()
    if spec.from_variables:
        logger.info("%s", ", ".join(spec.from_variables))
    steps = Steps() if steps is None else steps
    device, backend = preflight.before_joining(spec, steps)
    check_none_open()
    meeting = Meeting(
        spec,
        device=device,
        backend=backend,
        options={
            **(options or {}),
            "device": (device, spec.source("device")),
            "backend": (backend, spec.source("backend")),
        },
        run_dir=run_dir,
        command=command,
        steps=steps,
    )
    try:
        answered = meeting.meet()
    except (RankTaken, RanksDoNotBelongTogether):
        raise  # this process is not a rank of the run, so it leaves nothing in the run's folder
    except (DdpManualError, StopSignal, KeyboardInterrupt) as error:
        lastwords.write_failure(lastwords.as_ours(spec.rank, error), spec.rank, meeting.folder.path)
        raise

    def keep(error: DdpManualError) -> None:
        """On disk, unless that hangs."""
        attempt(partial(lastwords.write_failure, error, spec.rank, meeting.folder.path), KEEP_WITHIN)

    def report(error: DdpManualError) -> None:
        tell(error)
        keep(error)

    progress = Progress()
    watchdog = _watchdog(meeting, answered.hello, backend, progress, report)
    watchdog.start()
    with ExitStack() as afterwards:
        try:
            with steps.step("process group") as step:
                world = _open_world(spec, meeting, answered, device, backend, watchdog, progress, started, afterwards)
                step.detail = f"{world.backend} on {world.device}"
            ended: SystemExit | Stopped | None = None
            progress.phase = RUNNING  # a script of the user's own need not say more
            try:
                yield world
            except SystemExit as asked:
                if asked.code:
                    raise
                ended = asked  # a script that ends so has done its work
            except Stopped as agreed:  # by all ranks, after the same step: none of them has failed
                ended = agreed
            progress.phase = LEAVING
            _leave_in_order(meeting, watchdog)
        except BaseException as error:
            failure = lastwords.conclude(watchdog, meeting.store, spec, error)
            keep(failure)
            watchdog.stand_down()
            meeting.drop()
            if isinstance(failure, PeerGone) and failure is not error:
                raise failure from error
            raise
        if isinstance(ended, Stopped):
            keep(ended)
        if ended is not None:
            raise ended


def _leave_in_order(meeting: Meeting, watchdog: Watchdog) -> None:
    """Rank 0 last, since the others need its store."""
    if watchdog.over:  # it has not waited for this rank, which worked on alone
        close_process_group(all_finished=False)
        watchdog.stand_down()
        return
    close_process_group(all_finished=meeting.all_finish_soon())
    if meeting.spec.rank != 0:
        _stand_down(watchdog)
    meeting.leave(timeout=LEAVE_TIMEOUT)
    if meeting.spec.rank == 0:
        _stand_down(watchdog)
    meeting.store.close()


def _watchdog(
    meeting: Meeting, hello: Hello, backend: str, progress: Progress, report: Callable[[DdpManualError], None]
) -> Watchdog:
    assert meeting.answerer is not None
    watched = Watched(
        rank=meeting.spec.rank,
        nonce=meeting.nonce,
        hello=hello,
        seal=meeting.seal,
        backend=backend,
        progress=progress,
        thread=threading.get_ident(),
        report=report,
        welcomed=meeting.answerer.close,
    )
    if meeting.lifelines is None:
        return Follower(watched)
    return Keeper(watched, meeting.lifelines, meeting.members, meeting.store.clone())


def _stand_down(watchdog: Watchdog) -> None:
    seen = watchdog.stand_down()
    if seen is not None:
        raise seen


def _open_world(
    spec: WorldSpec,
    meeting: Meeting,
    answered: Answered,
    device_type: str,
    backend: str,
    watchdog: Watchdog,
    progress: Progress,
    started: float,
    afterwards: ExitStack,
) -> World:
    place, store, port = answered.place, meeting.store, meeting.spec.master_port
    if meeting.own.interface:
        environment.choose_interface(meeting.own.interface)
    environment.export_identity(spec.world_size, spec.rank, place.local_rank, spec.master_addr, port)
    device = devices.pin(spec.rank, device_type, place.local_rank, place.local_world_size)
    open_process_group(store, spec.rank, spec.world_size, backend, device)
    world = MetWorld(
        spec=spec,
        rank=spec.rank,
        world_size=spec.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node=place.node,
        nodes=place.nodes,
        device=device,
        backend=backend,
        host=environment.host_name(),
        run_id=answered.hello.run_id,
        rendezvous_seconds=time.monotonic() - started,
        host_leader=place.host_leader,
        progress=progress,
        _folder=meeting.folder,
        _afterwards=afterwards,
        _store=store,
        _watchdog=watchdog,
    )
    logger.info(
        "process group ready after %.1f s: rank %d of %d on %s, %s, %s",
        world.rendezvous_seconds,
        world.rank,
        world.world_size,
        world.host,
        world.device,
        world.backend,
    )
    return world
