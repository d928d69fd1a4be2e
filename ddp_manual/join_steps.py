"""The steps of joining, with the time that each took: ``check`` shows them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ddp_manual.errors import DdpManualError


@dataclass
class Step:
    """A step of joining."""

    name: str
    seconds: float = 0.0
    outcome: str = "ok"
    """``ok``, ``warning`` or ``failed``."""
    detail: str = ""

    def warn(self, detail: str) -> None:
        self.outcome, self.detail = "warning", detail


class Steps(list[Step]):
    """The steps of joining so far; the last one may have failed."""

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
        """Begin a step that ``end`` ends; until then it counts as failed."""
        step = Step(name, outcome="failed")
        self._began = time.monotonic()
        self.append(step)
        return step

    def end(self, step: Step, detail: str, outcome: str = "ok") -> None:
        """End ``step``, which was begun last."""
        step.outcome, step.detail = outcome, detail
        step.seconds = time.monotonic() - self._began

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(step) for step in self]
