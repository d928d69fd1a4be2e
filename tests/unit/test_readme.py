"""What the documents say exists: links, options, commands, identifiers, the code of an example."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ddp_manual import TrainConfig, WorldSpec, errors
from ddp_manual.cli import main as cli
from ddp_manual.cli.flags_from_options import given

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
DOCUMENTS = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
COMMANDS = cli.ddp_manual.commands
EACH_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)

OF_OTHER_PROGRAMS = {
    "benchmarks.md": "--before --images --only --repetitions --threads",
    "clusters.md": " ".join(
        (
            "--build-arg --network",  # docker
            "--follow --from-literal --prefix --selector",  # kubectl
            "--allow-run-as-root --bind-to --host --mca --output --output-filename --oversubscribe",  # mpirun
            "--array --cpus-per-task --distribution --gpus-per-task --nodes --ntasks-per-node --partition",  # Slurm
            "--signal --time",  # Slurm
            "--ranks",  # benchmarks.limits
            "--master-addr --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id",  # torchrun
        )
    ),
    "command-line.md": "--version --world-size",
    "faults.md": "--ipc --shm-size",
    "from-tutorials.md": "--image --inplace --logdir --remote",
    "security.md": "--api_key --hf_token --max_tokens --tokenizer",
}
# What follows one of these is the command line of ``ddp-manual train``.
TRAINING = (
    ("python", "run_multi_gpu_train.py"),
    ("python", "-m", "run_multi_gpu_train"),
    ("run_multi_gpu_train",),
)


def test_the_documents_stay_as_short_as_they_are() -> None:
    words = {document.name: len(document.read_text(encoding="utf-8").split()) for document in DOCUMENTS}
    assert words["README.md"] <= 1_200 and sum(words.values()) <= 22_000, words


@EACH_DOCUMENT
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(document: Path) -> None:
    dead = []
    for name, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text()):
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{name}#{anchor}")
    assert dead == []


def anchors(document: Path) -> set[str]:
    """What GitHub calls the headings of a document in links."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_script_that_calls_join_is_the_example() -> None:
    code = (REPOSITORY / "examples" / "own_script.py").read_text().split('"""')[2].strip()
    assert code in (REPOSITORY / "docs" / "any-script.md").read_text()


def test_the_readme_leads_to_every_other_document() -> None:
    linked = re.findall(r"\]\(([^)#:]*)", README.read_text())
    assert [path.name for path in DOCUMENTS[1:] if f"docs/{path.name}" not in linked] == []


def every_option() -> set[str]:
    return {
        name
        for command in COMMANDS.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


@EACH_DOCUMENT
def test_every_option_a_document_names_exists(document: Path) -> None:
    elsewhere = set(OF_OTHER_PROGRAMS.get(document.name, "").split())
    named = set(re.findall(r"(?<![^\s`(\[])--[a-z_]+(?:-[a-z]+)*", document.read_text()))
    assert named - every_option() <= {
        "--help",
        "--help-all",
        "--nproc-per-node",
        "--max-restarts",
        "--standalone",
        *elsewhere,
    }


def test_every_option_is_in_the_reference() -> None:
    reference = (REPOSITORY / "docs" / "command-line.md").read_text()
    # Not the off half of a switch, such as --no_allow_mismatch, nor what torchrun calls otherwise.
    parameters = [parameter for command in COMMANDS.values() for parameter in command.params]
    names = {parameter.opts[0] for parameter in parameters if not getattr(parameter, "hidden", False)}
    assert [name for name in sorted(names) if name.startswith("--") and not re.search(rf"`{name}\b", reference)] == []


@EACH_DOCUMENT
def test_every_identifier_a_document_names_exists(document: Path) -> None:
    assert set(re.findall(r"error\[([a-z-]+)\]", document.read_text())) <= set(errors.EVERY_ERROR)


def test_every_module_in_the_map_of_the_code_exists() -> None:
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", (REPOSITORY / "docs" / "architecture.md").read_text())
    package = REPOSITORY / "ddp_manual"
    missing = [name for name in named if not (package / name).exists() and not (REPOSITORY / name).exists()]
    assert missing == [] and len(named) > 30


def typed(document: Path) -> Iterator[list[str]]:
    """The words of each command that a document shows behind a prompt."""
    blocks = re.findall(r"^```\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).splitlines():
        if prompted := re.match(r"(?:host[A-Z])?\$ (.*)", line):
            words = shlex.split(prompted[1].removesuffix(" &"))
            while re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            yield words


@EACH_DOCUMENT
def test_every_command_a_document_shows_is_one_that_the_command_line_accepts(document: Path) -> None:
    for words in typed(document):
        if words[0] == "torchrun":
            if "ddp_manual" in words:
                words = ["ddp-manual", *words[words.index("ddp_manual") + 1 :]]
            else:
                train(words[words.index("run_multi_gpu_train.py") + 1 :])
                continue
        if words[0] == "ddp-manual":
            COMMANDS[words[1]].make_context(words[1], words[2:])
            if words[1] == "launch" and "--" in words:
                train(words[words.index("--") + 1 :])
        elif words[0] == "python" and words[1].startswith("examples/"):
            assert (REPOSITORY / words[1]).exists()
        else:
            [length] = [len(start) for start in TRAINING if tuple(words[: len(start)]) == start] or [0]
            assert length or words[0] in ("cp", "echo", "jupyter", "pyflyte"), words
            if length:
                train(words[length:])


def train(arguments: list[str]) -> None:
    """Make of the flags what a rank would make of them."""
    flags = COMMANDS["train"].make_context("train", arguments).params
    TrainConfig(**given(TrainConfig, flags))
    WorldSpec(**given(WorldSpec, flags))
