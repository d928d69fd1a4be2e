"""Code of the user's own in options: by which name it is found, how often imported, and what it may not do then."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from torch import nn

from ddp_manual import TrainConfig
from ddp_manual.errors import BadOption
from ddp_manual.training import own_factory

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module of that name where it is found."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> Path:
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    return write


@pytest.fixture
def script(write: Write, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that runs is q3.py, as a rank of ``spawn`` has it; run once more, it would raise."""
    main = ModuleType("__mp_main__")
    main.__file__ = str(write("q3", "raise AssertionError('a second time')"))
    text = "class Net: ...\nclass Outer:\n    class Inner: ...\nunnamed = lambda: None\n"
    exec(text, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def refused(option: str, value: Any) -> str:
    """What to do instead."""
    with pytest.raises(BadOption) as caught:
        TrainConfig(**{option: value})
    assert caught.value.what.startswith(f"--{option} ")
    return caught.value.next


def test_a_module_is_known_before_ranks_are_started_and_without_importing_it(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = Mock(find_spec=lambda name, *_: ModuleSpec(name, None) if name == "editable" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, editable])  # as an editable install adds one
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))  # without a spec
    write("beside", "raise AssertionError('imported')")
    for module in ("editable.net", "made_here", "beside", "__hello__"):
        own_factory.check_module("model", f"{module}:Net")
    assert "beside" not in sys.modules
    for module in ("nowhere.net", "beside.py"):
        with pytest.raises(BadOption, match=f"there is no module {module}"):
            own_factory.check_module("model", f"{module}:Net")


def test_code_in_place_of_its_name_or_the_name_main_is_answered_with_the_name(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in (script.Net, "__main__:Net", "__mp_main__:Net"):
        assert refused("model", model) == 'write model="q3:Net"'
    assert refused("model", nn.Flatten) == 'write model="torch.nn.modules.flatten:Flatten"'
    for model in (script.Outer.Inner, script.unnamed, nn.Flatten(), functools.partial(script.Net, 3)):
        assert refused("model", model).endswith('write model="own:model"')
    assert refused("dataset", ([1], [2])).endswith('write dataset="own:dataset"')
    monkeypatch.setattr(script, "__file__", "/somewhere/my-script.py")  # no module could be called so
    assert refused("model", script.Net).endswith('write model="own:model"')


def test_the_script_that_runs_is_not_imported_once_more(script: ModuleType) -> None:
    assert own_factory.factory("model", "q3:Net") is script.Net
    digest, path = own_factory.digest("model", "q3:Net")
    assert path == script.__file__
    Path(path).write_text("edited = True")
    assert own_factory.digest("model", "q3:Net")[0] == digest
    with pytest.raises(BadOption, match="has no function or class Later") as caught:
        own_factory.factory("model", "q3:Later")
    assert caught.value.why == f"{path} defines Net, Outer, unnamed, as far as it has run"
    assert "q3" not in sys.modules


def test_a_module_that_ends_the_program_is_named(write: Write) -> None:
    write("leaving", "import sys; sys.exit('please pip install x')")
    with pytest.raises(BadOption, match="--model leaving:Net cannot be imported") as caught:
        own_factory.factory("model", "leaving:Net")
    assert caught.value.why == "SystemExit: please pip install x"
    assert 'if __name__ == "__main__":' in caught.value.next


def test_a_module_that_parses_arguments_sees_those_of_a_script_and_not_those_of_our_command_line(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = "parser = argparse.ArgumentParser()\nparser.add_argument('--width', required=True)\n"
    write("parsing", f"import argparse\n{parse}arguments = parser.parse_args()\nclass Net: ...\n")
    monkeypatch.setattr(sys, "argv", ["program", "--width", "7"])
    with monkeypatch.context() as ours:
        ours.setitem(sys.modules, "ddp_manual.cli.main", ModuleType("cli"))
        with pytest.raises(BadOption, match="--model parsing:Net cannot be imported"):
            own_factory.factory("model", "parsing:Net")
    assert "error: the following arguments are required: --width" in capsys.readouterr().err
    assert sys.argv == ["program", "--width", "7"]
    monkeypatch.delitem(sys.modules, "ddp_manual.cli.main", raising=False)
    own_factory.factory("model", "parsing:Net")
    assert sys.modules["parsing"].arguments.width == "7"


@pytest.mark.parametrize("call", ["join(device='cpu')", "spawn(print, 1)"])
def test_a_module_must_not_train_while_it_is_imported(call: str, write: Write) -> None:
    write("unguarded", f"from ddp_manual import join, spawn\n{call}\n")
    with pytest.raises(BadOption, match="--model unguarded:Net cannot be imported") as caught:
        own_factory.factory("model", "unguarded:Net")
    assert caught.value.why.startswith(f"BadOption: importing unguarded calls {call[:4]}")
    assert 'if __name__ == "__main__":' in caught.value.next
