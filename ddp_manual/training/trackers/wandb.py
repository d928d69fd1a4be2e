"""Weights & Biases: https://docs.wandb.ai. Its files, and what it would keep in the user's home, are below the run's.

Without a login it works offline, and says what uploads the run. It never asks for a key: the thread has no terminal.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddp_manual import launchers, run_folder
from ddp_manual.run_folder import RunPaths
from ddp_manual.training.trackers.sink import About, PredictionTable, Sink

if TYPE_CHECKING:
    import psutil
    import wandb
    from wandb.sdk.wandb_setup import _WandbSetup as Session

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled", "shared"]

PROJECT = "ddp_manual"
# Seconds for the server to answer, and to take what is left at the end: below what the sinks are given to finish.
ANSWER_WITHIN = 15.0
UPLOAD_WITHIN = 25.0
# Seconds for its processes to write what they have.
END_WITHIN = 1.0


class _Service:
    """What wandb has behind all runs of this process, the user's own among them: when a sink may end it.

    ``turn`` is held while a sink opens, while one ends it, and while variables say where the files of one go.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._sinks: set[WeightsAndBiases] = set()
        self._was_there = False

    def joined_by(self, sink: WeightsAndBiases) -> None:
        if not self._sinks:
            self._was_there = bool(_processes())  # started by the user's own code
        self._sinks.add(sink)

    def left_by(self, sink: WeightsAndBiases) -> None:
        self._sinks.discard(sink)

    def is_only_for(self, sink: WeightsAndBiases) -> bool:
        latest = sink.session.most_recent_active_run if sink.session is not None else None
        return self._sinks == {sink} and not self._was_there and (latest is None or latest is sink.run)


_service = _Service()


def _processes() -> list[psutil.Process]:
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if process.name().startswith("wandb-"):
                found.append(process)
    return found


class WeightsAndBiases(Sink):
    """Variables such as WANDB_MODE, WANDB_PROJECT and WANDB_API_KEY count as everywhere."""

    name = "wandb"

    def __init__(self, paths: RunPaths) -> None:
        self.session: Session | None = None
        self.run: wandb.Run | None = None
        self._folder = paths.wandb
        self._online = False

    def open(self, about: About) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with _service.turn, launchers.wandb_files_below(self._folder):
            _service.joined_by(self)
            self._open(about)

    def _open(self, about: About) -> None:
        import wandb

        self.session = wandb.setup(wandb.Settings(silent=True))
        mode, why_offline = _mode()
        try:
            self.run = _init(about, mode)
        except wandb.Error as error:
            if mode != "online":
                raise
            if _service.is_only_for(self):
                wandb.teardown()  # else the id counts as in use
                self.session = wandb.setup(wandb.Settings(silent=True))
            why_offline = str(error).splitlines()[0]
            self.run = _init(about, "offline")
        self._online = mode == "online" and why_offline is None
        if why_offline is not None:
            logger.info("wandb: offline (%s); %s", why_offline, self.still_to_do())
        else:
            logger.info("wandb: %s", self._opened.url if self._online else f"{mode}, as WANDB_MODE asks")

    @property
    def _opened(self) -> wandb.Run:
        assert self.run is not None
        return self.run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._opened.log(dict(values), step=step)

    def image(self, step: int, name: str, file: Path) -> None:
        import wandb

        self._opened.log({name: wandb.Image(str(file))}, step=step)

    def table(self, step: int, name: str, table: PredictionTable) -> None:
        import wandb

        columns: list[str | int] = ["id", "image", "guess", "truth", *(f"score {name}" for name in table.classes)]
        rows = [
            [sample.number, wandb.Image(sample.image), sample.guess, sample.truth, *sample.scores]
            for sample in table.samples
        ]
        with _service.turn, launchers.wandb_files_below(self._folder):
            self._opened.log({name: wandb.Table(columns=columns, data=rows)}, step=step)

    def result(self, summary: Mapping[str, Any]) -> None:
        self._opened.summary.update({name: value for name, value in summary.items() if isinstance(value, (int, float))})

    def close(self, *, complete: bool) -> None:
        import wandb

        self._opened.finish(exit_code=0 if complete else 1)
        with _service.turn:
            if _service.is_only_for(self):
                wandb.teardown()
            _service.left_by(self)

    def abandon(self) -> None:
        """End the processes that wandb has started, and nobody else needs; asked first, they write what they have."""
        import psutil

        # Not in turn: its own thread may hang in there.
        ours = _processes() if _service.is_only_for(self) else []
        _service.left_by(self)
        for process in ours:
            process.terminate()
        _, alive = psutil.wait_procs(ours, timeout=END_WITHIN)
        for process in alive:
            process.kill()

    def still_to_do(self) -> str:
        # One that was meant to be uploaded at once is otherwise passed over.
        every = "--include-online " if self._online else ""
        return f"to upload it: wandb sync {every}{shlex.quote(str(self._folder))}"


def _mode() -> tuple[Mode, str | None]:
    """What WANDB_MODE or a settings file asks for, or "offline" where there is no login; and why it is offline."""
    import wandb

    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    if mode in ("offline", "dryrun"):
        return "offline", "as WANDB_MODE or a settings file asks"
    if mode in ("disabled", "shared"):
        return mode, None
    try:
        logged_in = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        return "offline", str(error).splitlines()[0]
    return ("online", None) if logged_in else ("offline", "no login and no WANDB_API_KEY")


def _init(about: About, mode: Mode) -> wandb.Run:
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    earlier = _earlier_id(about)
    run = wandb.init(
        project=settings.project or PROJECT,
        # One that goes on keeps the name it has there: somebody may have changed it.
        name=None if earlier else settings.run_name or about.name,
        id=earlier,
        resume="allow" if earlier else None,
        dir=str(about.paths.run_dir),
        config=dict(about.hyperparameters),
        allow_val_change=True,
        mode=mode,
        # Another run, of the user's own script, is left alone.
        reinit="create_new",
        settings=wandb.Settings(**_of_the_run()),
    )
    if mode != "disabled":
        run_folder.write_json(about.paths.wandb_id, {"id": run.id})
    return run


def _of_the_run() -> dict[str, Any]:
    import wandb

    wanted = {
        "console": "off",  # it would put itself in place of stdout and stderr
        "silent": True,
        "init_timeout": ANSWER_WITHIN,
        "finish_timeout": UPLOAD_WITHIN,
        # Of a rank that is killed, wandb otherwise keeps nothing of its last 15 s.
        "x_transaction_log_flush_interval": 1.0,
    }
    return {name: value for name, value in wanted.items() if name in wandb.Settings.model_fields}


def _earlier_id(about: About) -> str | None:
    """That of the run that goes on; one that begins anew is another."""
    if not about.goes_on_after:
        return None
    try:
        found = json.loads(about.paths.wandb_id.read_bytes())["id"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None
