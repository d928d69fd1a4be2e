"""The training as a program, which ``train`` and ``launch`` start: ``python -m ddp_manual.training OPTIONS``.

It joins, trains and leaves as any script may. ``prepare`` says, before the ranks meet, what they must have in common.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ddp_manual
from ddp_manual import signal_handlers, terminal
from ddp_manual.errors import Stopped
from ddp_manual.ranks_and_runs import first_command_and
from ddp_manual.text_wrapping import whole
from ddp_manual.training.main import Shared, check_own_code, train_as_agreed
from ddp_manual.training.options import TrainConfig

logger = logging.getLogger(__name__)


def prepare(rank: int, arguments: Sequence[str]) -> Shared:
    """Return what the ranks must have in common of the user's own code: see ``check_own_code``."""
    return check_own_code(_config(json.loads(arguments[0])), rank)


def main() -> None:
    """Train as one of the ranks, with the options that they have compared."""
    terminal.escape_what_cannot_be_shown()
    told = json.loads(sys.argv[1])
    config = _config(told)
    with signal_handlers.ignore_save(), suppress(Stopped), ddp_manual.join(open_group=not config.no_ddp) as world:
        if told["status"] and not world.generation:
            logger.info("rank 0's terminal shows how far the training is, as does:\n%s", whole(told["status"]))
        how = f"\n{whole(told['launched'])}" if told["launched"] else f" {first_command_and(str(world.run_dir))}"
        world.result = train_as_agreed(world, config, f"go on:{how}", leaves=True)


def _config(told: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**told["config"], sources=told["sources"])
