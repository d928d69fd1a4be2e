"""What a rank does on its way into the process group, step by step, with the time each took; ``check`` shows it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ddp_manual.errors import DdpManualError


@dataclass
class Step:
    """One thing that was done; ``detail`` is what came of it."""

    name: str
    seconds: float = 0.0
    outcome: str = "ok"
    """``ok``, ``warning`` or ``failed``."""
    detail: str = ""

    def warn(self, detail: str) -> None:
        self.outcome, self.detail = "warning", detail


class Steps(list[Step]):
    """The steps so far; the last one may have failed."""

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        step = Step(name)
        self.append(step)
        started = time.monotonic()
        try:
            yield step
        except BaseException as error:
            step.outcome = "failed"
            step.detail = error.what if isinstance(error, DdpManualError) else f"{type(error).__name__}: {error}"
            raise
        finally:
            step.seconds = time.monotonic() - started

    def begin(self, name: str) -> Step:
        """A step that ends elsewhere: see ``end``."""
        step = Step(name, outcome="failed")
        self._began = time.monotonic()
        self.append(step)
        return step

    def end(self, step: Step, detail: str, outcome: str = "ok") -> None:
        """Of the step that was begun last."""
        step.outcome, step.detail = outcome, detail
        step.seconds = time.monotonic() - self._began

    def extend_from(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Those of the worker, as dictionaries."""
        self.extend(Step(**step) for step in steps)

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(step) for step in self]
