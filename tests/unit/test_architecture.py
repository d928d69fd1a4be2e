"""Which room a line lives in, held by reading the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_manual

PACKAGE = Path(ddp_manual.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
BOTTOM = {
    "checkpoint_file",
    "checkpoints",
    "commands",
    "config",
    "config_file",
    "console",
    "environment",
    "errors",
    "extras",
    "options",
    "rundir",
    "signals",
    "user_code",
    "world_spec",
}
MAY_IMPORT = {
    "rendezvous": {"rendezvous", *BOTTOM},
    "training": {"training", *BOTTOM},
    "launching": {"launching", *BOTTOM},
    "worker": {"rendezvous", "training", "outcome", "resuming", *BOTTOM},
    "outcome": {"rendezvous", "training", *BOTTOM},
    "resuming": {"training", *BOTTOM},
    "spawning": {"spawned", "launching", *BOTTOM},
    "spawned": {"rendezvous", *BOTTOM},
    "checkup": {"rendezvous", *BOTTOM},
    "recorded": BOTTOM,
    "comparison": {"recorded", "reports", *BOTTOM},
    "comparison_plot": {"comparison", "recorded", *BOTTOM},
    "saved_model": BOTTOM,
    "evaluating": {"saved_model", "training", *BOTTOM},
    "showing": {"training", *BOTTOM},
    "reports": set(),
    "flags": BOTTOM,
    "cli": {
        "worker",
        "outcome",
        "checkup",
        "comparison",
        "comparison_plot",
        "evaluating",
        "showing",
        "flags",
        "reports",
        "rendezvous",
        "launching",
        *BOTTOM,
    },
    "__init__": {"config", "errors", "spawning", "worker", "world_spec"},
    "__main__": {"cli"},
    **dict.fromkeys(BOTTOM, BOTTOM),
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "ddp_manual" else [module]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("ddp_manual.")}
    return rooms


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    assert imported_rooms(path) <= MAY_IMPORT[room(path)]


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"os\.environ|os\.getenv", {"environment.py"}),
        (r"sys\.exit", {"cli.py"}),
        (r"os\._exit\(", {"watchdog.py"}),
        (r"\bpickle\b|weights_only=False", set()),
    ],
)
def test_what_has_one_home_stays_there(pattern: str, home: set[str]) -> None:
    code = {path.name: re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL) for path in MODULES}
    assert {name for name, text in code.items() if re.search(pattern, text)} == home


def test_the_command_line_needs_no_torch() -> None:
    script = "import sys, ddp_manual.cli, ddp_manual.launching.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, check=False).returncode == 0


def test_the_public_names_are_these() -> None:
    import ddp_manual.rendezvous

    assert ddp_manual.__all__ == ["DdpManualError", "TrainConfig", "WorldSpec", "__version__", "spawn", "train"]
    for name in ddp_manual.__all__:
        assert getattr(ddp_manual, name)
    assert ddp_manual.rendezvous.__all__ == ["World", "alone", "rendezvous"]
