from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

OF_OTHER_PROGRAMS = {
    "benchmarks.md": "--before --repetitions --threads",
    "clusters.md": "--rdzv-id",
    "from-tutorials.md": "--image --inplace --logdir --remote",
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_script_in_the_readme_is_the_example() -> None:
    code = (REPOSITORY / "examples" / "own_script.py").read_text().split('"""')[2].strip()
    assert code in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_option_a_document_names_exists(document: Path) -> None:
    from ddp_manual import cli

    commands = cli.ddp_manual.commands.values()
    options = {
        name
        for command in commands
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    elsewhere = set(OF_OTHER_PROGRAMS.get(document.name, "").split())
    named = set(re.findall(r"(?<![^\s`(\[])--[a-z_]+(?:-[a-z]+)*", document.read_text()))
    assert named - options <= {"--help", "--nproc-per-node", "--max-restarts", "--standalone", *elsewhere}
