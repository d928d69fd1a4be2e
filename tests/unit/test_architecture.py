"""Which room a line lives in, held by reading the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import ddp_manual
from tests.conftest import REPOSITORY

PACKAGE = Path(ddp_manual.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# Each of these may import those before it and, if it is a folder, what is in it, and nothing else of the package.
BOTTOM_ROW = (
    "text_wrapping",
    "wording",
    "errors",
    "process_status",
    "orphans",
    "signal_handlers",
    "atomic_files",
    "wire",
    "memory_cgroup",
    "on_rank_loss",
    "secret_arguments",
    "program",
    "collective_memory",
    "join_steps",
    "ranks_and_runs",
    "held_state_memory",
    "longest_wait",
    "messages",
    "from_worker",
    "from_agent",
    "gpus",
    "environment",
    "run_folder",
    "option_fields",
    "rank_options",
    "unread",
    "terminal",
    "progress_bar",
    "rank_output",
    "deadline",
)
BOTTOM = set(BOTTOM_ROW)
# The modules of training/ that know nothing of torch: what is said of a training before it begins.
TRAINING_WITHOUT_TORCH = {
    "training.checkpoint_files",
    "training.options",
    "training.own_factory",
}
# The commands that neither compute nor look at images know of a training what is said of it, too.
TOOLS_WITHOUT_TORCH = {
    f"tools.{name}" for name in ("check", "checkpoints", "compare", "recorded_run", "runs", "status")
}
MAY_IMPORT = {
    "protocol": {"protocol", *BOTTOM},
    "agent": {"agent", "protocol", *TRAINING_WITHOUT_TORCH, *BOTTOM},
    "worker": {"worker", "training", *BOTTOM},
    "training": {"training", *BOTTOM},
    "tools": {"tools", "agent", "protocol", "training", *BOTTOM},
    "tools without torch": {"agent", "protocol", *TOOLS_WITHOUT_TORCH, *TRAINING_WITHOUT_TORCH, *BOTTOM},
    "launch": {"launch", "agent", "protocol", *TRAINING_WITHOUT_TORCH, *BOTTOM},
    "cli": {"cli", "agent", "launch", "tools", *TRAINING_WITHOUT_TORCH, *BOTTOM},
    "__init__": {"training.options", "errors", "rank_options"},
    "__main__": {"cli"},
    **{name: set(BOTTOM_ROW[: place + 1]) for place, name in enumerate(BOTTOM_ROW)},
}
# What only annotations name.
MAY_NAME = {
    "__init__": {"launch", "training", "worker"},
    "environment": {"messages"},
    "training": {"worker"},
}
WITHOUT_TORCH = {"protocol", "agent", "launch", "cli", "__init__", "__main__", *BOTTOM}
# Of code, without docstrings, comments and blank lines. Each message, each state and each seam is a type of its own.
MOST_LINES_OF_AGENT_AND_WORKER = 9069
# With everything: a test is read as often as what it holds. Whoever adds one pays in the same room, or raises this.
MOST_LINES_OF_TESTS = 21_649
MOST_LINES_OF_PACKAGE = 29_068


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(path: Path, *, for_types: bool) -> set[str]:
    """The modules that a file imports: below ``if TYPE_CHECKING``, or anywhere else."""
    tree = ast.parse(path.read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    guarded = {id(below) for guard in guards for node in guard.body for below in ast.walk(node)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if (id(node) in guarded) is not for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module.startswith("ddp_manual") else {module}
    return names


def modules(names: set[str]) -> set[str]:
    """The package's modules among imported names: ``wire`` of ``ddp_manual.wire.LineReader``."""
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "ddp_manual" and len(parts) > 1:
            inner = len(parts) > 2 and (PACKAGE / parts[1] / f"{parts[2]}.py").exists()
            found.add(".".join(parts[1:3]) if inner else parts[1])
    return found


def not_allowed(names: set[str], allowed: set[str]) -> set[str]:
    """The modules that are imported, and neither they nor their rooms are allowed."""
    return {name for name in modules(names) if name not in allowed and name.split(".")[0] not in allowed}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    may_import = MAY_IMPORT["tools without torch" if module(path) in TOOLS_WITHOUT_TORCH else room(path)]
    assert not_allowed(imported(path, for_types=False), may_import) == set()
    assert not_allowed(imported(path, for_types=True), may_import | MAY_NAME.get(room(path), set())) == set()


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"os\.environ|os\.getenv", "environment"),
        (r"sys\.exit\(", "cli/main.py"),
        (r"os\._exit\(", "worker/reporter.py"),
        (r"distributed_c10d\._|sys\._|torch\._[a-zA-Z]|\b_C\b", "worker/private_torch.py"),
        (r"\bpickle\b|weights_only=False", "nowhere"),
    ],
)
def test_what_has_one_home_stays_there(pattern: str, home: str) -> None:
    code = {path: re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL) for path in MODULES}
    found = [path.relative_to(PACKAGE) for path, text in code.items() if re.search(pattern, text)]
    assert [str(path) for path in found if PACKAGE / home not in (PACKAGE / path, *(PACKAGE / path).parents)] == []


def test_no_torch_is_imported_below_agent_and_in_the_bottom_row() -> None:
    heavy = {"torch", "torchvision", "numpy"}
    of_other_rooms = TRAINING_WITHOUT_TORCH | TOOLS_WITHOUT_TORCH
    without = [path for path in MODULES if room(path) in WITHOUT_TORCH or module(path) in of_other_rooms]
    names = {path: imported(path, for_types=False) for path in without}
    assert [str(path) for path in names if heavy & {name.split(".")[0] for name in names[path]}] == []


def test_what_decides_does_no_io_starts_no_task_and_is_told_the_time() -> None:
    of_the_system = {"asyncio", "logging", "mmap", "os", "pathlib", "random", "secrets", "select", "shutil", "socket"}
    of_the_system |= {"ssl", "subprocess", "sys", "tempfile", "threading", "time"}
    names = {path.stem: imported(path, for_types=False) for path in MODULES if room(path) == "protocol"}
    assert {name for name in names if of_the_system & {one.split(".")[0] for one in names[name]}} == set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())) if room(path) == "protocol" else ():
            assert not isinstance(node, (ast.AsyncFunctionDef, ast.Await)), f"{path.name}:{node.lineno}"
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called not in ("open", "print", "input"), path.name


# Conditions in protocol/ that combine three terms or more: each is a state that has no name.
MOST_OF_THREE_TERMS = 5


def terms(node: ast.expr) -> int:
    if isinstance(node, ast.BoolOp):
        return sum(map(terms, node.values))
    return terms(node.operand) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else 1


def test_hardly_any_condition_in_protocol_combines_three_terms() -> None:
    trees = {path.stem: ast.parse(path.read_text()) for path in MODULES if room(path) == "protocol"}
    conditions = [
        (name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.BoolOp)
    ]
    long = [f"{name}:{node.lineno} {ast.unparse(node)}" for name, node in conditions if terms(node) > 2]
    assert len(long) <= MOST_OF_THREE_TERMS, "\n".join(long)


def lines_of_code(path: Path) -> int:
    """Without docstrings, comments and blank lines."""
    texts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
    docstrings = [node for node in texts if isinstance(node.value, ast.Constant)]
    left_out = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    with path.open() as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in blank]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - left_out)


def test_protocol_agent_and_worker_stay_small() -> None:
    own = [path for path in MODULES if room(path) in ("protocol", "agent", "worker")]
    assert sum(map(lines_of_code, own)) <= MOST_LINES_OF_AGENT_AND_WORKER


@pytest.mark.parametrize(("room", "most"), [("ddp_manual", MOST_LINES_OF_PACKAGE), ("tests", MOST_LINES_OF_TESTS)])
def test_package_and_tests_stay_as_small_as_they_are(room: str, most: int) -> None:
    files = (REPOSITORY / room).rglob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= most


@pytest.mark.parametrize("path", MODULES, ids=module)
def test_no_file_and_no_function_is_longer_than_a_reader_takes_in(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert len(text.splitlines()) <= 400
    assert [one.name for one in functions if (one.end_lineno or 0) - one.lineno >= 60] == []


FLAGS = {
    "agent/leave.py": {"self.hurries"},
    "agent/main.py": set[str](),
    "protocol/agent.py": {"self._has_warned", "self.has_trained"},
    "protocol/this_rank.py": {"self.is_own_folder"},
    "protocol/why_this_rank_ends.py": set[str](),
    "protocol/stop_signals.py": {"self._takes_stops"},
    "protocol/coordinator.py": set[str](),
    "protocol/roll_call.py": {"self.changed"},
    "protocol/recovery.py": set[str](),
    "protocol/wait_or_shrink.py": set[str](),
    "protocol/wait_for_all_ranks.py": set[str](),
    "protocol/lost_or_to_blame.py": set[str](),
    "protocol/end_or_begin_anew.py": set[str](),
    "protocol/search_for_mismatch.py": set[str](),
}


@pytest.mark.parametrize("path", FLAGS)
def test_no_attribute_is_a_flag_for_a_state(path: str) -> None:
    """They say what was said once, where files go, and what was done: all of it holds in every state."""
    tree = ast.parse((PACKAGE / path).read_text())
    assigned = [
        (ast.unparse(target), value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for one in node.targets
        for target, value in zip(_parts(one), _parts(node.value), strict=False)
    ]
    own = [(name, ast.unparse(value)) for name, value in assigned if re.fullmatch(r"self\.\w+", name)]
    flags = {name for name, value in own if value in ("True", "False")}
    assert flags == FLAGS[path]


def test_the_agent_enters_its_states_at_one_place() -> None:
    text = (PACKAGE / "protocol" / "this_rank.py").read_text()
    assert len(re.findall(r"^ +self\.state = state$", text, re.MULTILINE)) == 1  # a rank that has ended stays ended
    assert not [path for path in MODULES if "rank.state = " in path.read_text()]


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def test_the_command_line_needs_no_torch() -> None:
    script = (
        "import sys, ddp_manual.cli.main, ddp_manual.launch.this_host\n"
        "import ddp_manual.agent.__main__, ddp_manual.agent.by_hand\n"
        "import ddp_manual.tools.check, ddp_manual.tools.status, ddp_manual.tools.checkpoints, ddp_manual.tools.runs\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, check=False).returncode == 0


def test_the_public_names_are_these() -> None:
    public = ["DdpManualError", "TrainConfig", "World", "WorldSpec", "__version__"]
    public += ["check_replicas", "held", "hold", "join", "spawn", "train"]
    assert ddp_manual.__all__ == public
    for name in ddp_manual.__all__:
        assert getattr(ddp_manual, name)
