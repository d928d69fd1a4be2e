from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_script_in_the_readme_is_the_example() -> None:
    code = (REPOSITORY / "examples" / "own_script.py").read_text().split('"""')[2].strip()
    assert code in (REPOSITORY / "README.md").read_text()


def test_every_option_the_readme_names_exists() -> None:
    from ddp_manual import config
    from ddp_manual.options import option_fields

    options = {f"--{field.name}" for kind in (config.WorldSpec, config.TrainConfig) for field in option_fields(kind)}
    named = set(re.findall(r"(?<!\S)--[a-z_]+(?:-[a-z]+)*", (REPOSITORY / "README.md").read_text()))
    assert named - options <= {"--nproc", "--nproc-per-node", "--help", "--stacks"}
