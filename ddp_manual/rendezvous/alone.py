"""``with alone(spec, ...) as world:`` - a world of one without anything that only others would need.

No store and no port, no process group, no watchdog and none of its threads. What a run leaves behind is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_manual import console, environment, rundir, user_code
from ddp_manual.errors import DdpManualError
from ddp_manual.rendezvous import device as devices
from ddp_manual.rendezvous import lastwords
from ddp_manual.rendezvous.introduction import versions
from ddp_manual.rendezvous.progress import RUNNING, Progress
from ddp_manual.rendezvous.watchdog import leave_at_once
from ddp_manual.rendezvous.world import World
from ddp_manual.rundir import RunFolder
from ddp_manual.world_spec import WorldSpec


@dataclass(frozen=True, kw_only=True)
class AloneWorld(World):
    """The only rank."""

    def agree(self, options: Mapping[str, tuple[Any, str]], run_dir: str) -> None:
        self._folder.path = Path(run_dir)

    def roster(self) -> list[dict[str, Any]]:
        found = versions()
        return [
            {
                "rank": 0,
                "host": self.host,
                "pid": os.getpid(),
                "device": str(self.device),
                "versions": " ".join(f"{name} {version}" for name, version in found.items() if version),
            }
        ]

    def leave_at_once(self, error: DdpManualError) -> None:
        def report(error: DdpManualError) -> None:
            console.print_error(error)
            lastwords.write_failure(error, self.rank, self.run_dir)

        leave_at_once(report, error)

    def gather(self, report: Mapping[str, Any]) -> list[Any]:
        return [report]

    def once_per_host(self, job: str, action: Callable[[], None], *, timeout: float) -> None:
        action()


@contextmanager
def alone(spec: WorldSpec, *, run_dir: str | None = None) -> Iterator[World]:
    """Run the body as the only rank of a world of one.

    Args:
        run_dir: where files of this run go, with ``{run_id}`` for its name. None: no files.

    Raises:
        DdpManualError: there is no such device. Else what the body raises, after writing why to ``run_dir``.
    """
    user_code.refuse_while_importing("alone")
    assert spec.world_size == 1
    console.log_to_stderr(spec.rank)
    environment.quiet_torch_warnings()
    device_type, _, _ = devices.choose(spec)
    local_rank = spec.local_rank or 0
    run_id = spec.run_id or rundir.new_run_id()
    path = Path(run_dir.replace("{run_id}", run_id)) if run_dir else None
    afterwards = ExitStack()
    world = AloneWorld(
        spec=spec,
        rank=0,
        world_size=1,
        local_rank=local_rank,
        local_world_size=1,
        node=0,
        nodes=1,
        device=devices.pin(0, device_type, local_rank, 1),
        backend="none",
        host=environment.host_name(),
        run_id=run_id,
        rendezvous_seconds=0.0,
        host_leader=0,
        progress=Progress(phase=RUNNING),
        _folder=RunFolder(path, path),
        _afterwards=afterwards,
    )
    with afterwards:
        try:
            yield world
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):  # a script that ends so has done its work
                lastwords.write_failure(lastwords.as_ours(0, error), 0, world.run_dir)
            raise
