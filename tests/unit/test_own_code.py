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

import pytest
from torch import nn

from ddp_manual import TrainConfig
from ddp_manual.errors import BadOption
from ddp_manual.training import own_code

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


class Editable:
    """A finder such as an editable install adds to ``sys.meta_path``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "editable" else None


def test_a_module_is_known_before_ranks_are_started_by_whatever_finder_would_import_it(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))  # without a spec
    write("beside", "raise AssertionError('imported')")
    for module in ("editable", "editable.net", "made_here", "beside", "__hello__", "json"):
        own_code.check_module("model", f"{module}:Net")
    assert "beside" not in sys.modules
    for module in ("nowhere", "nowhere.net", "beside.py"):
        with pytest.raises(BadOption, match=f"there is no module {module}"):
            own_code.check_module("model", f"{module}:Net")


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
    assert own_code.factory("model", "q3:Net") is script.Net
    digest, path = own_code.digest("model", "q3:Net")
    assert path == script.__file__
    Path(path).write_text("edited = True")
    assert own_code.digest("model", "q3:Net")[0] == digest
    with pytest.raises(BadOption, match="has no function or class Later") as caught:
        own_code.factory("model", "q3:Later")
    assert caught.value.why == f"{path} defines Net, Outer, unnamed, as far as it has run"
    assert "q3" not in sys.modules


@pytest.mark.parametrize("ask", [own_code.factory, own_code.digest])
def test_a_module_that_ends_the_program_is_named(ask: Callable[[str, str], object], write: Write) -> None:
    folder = write("leaving", "import sys; sys.exit('please pip install x')").parent
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("import leaving")
    module = "package.net" if ask is own_code.digest else "leaving"
    with pytest.raises(BadOption, match=f"--model {module}:Net cannot be imported") as caught:
        ask("model", f"{module}:Net")
    assert caught.value.why == "SystemExit: please pip install x"
    assert 'if __name__ == "__main__":' in caught.value.next


def test_a_module_that_parses_arguments_does_not_see_those_of_our_command_line(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parsing = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--width'{})\n"
    parsing += "arguments = parser.parse_args()\nclass Net: ...\n"
    typed = ["ddp-manual", "train", "--width", "7"]
    monkeypatch.setattr(sys, "argv", typed)
    monkeypatch.setitem(sys.modules, "ddp_manual.cli", ModuleType("cli"))
    write("optional", parsing.format(""))
    own_code.factory("model", "optional:Net")
    assert sys.modules["optional"].arguments.width is None and sys.argv is typed
    write("needed", parsing.format(", required=True"))
    with pytest.raises(BadOption, match="--model needed:Net cannot be imported"):
        own_code.factory("model", "needed:Net")
    assert "needed: error: the following arguments are required: --width" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "ddp_manual.cli")  # in a script the arguments are the user's own
    monkeypatch.setattr(sys, "argv", ["q3.py", "--width", "7"])
    own_code.factory("model", "needed:Net")
    assert sys.modules["needed"].arguments.width == "7"


@pytest.mark.parametrize("call", ["join(device='cpu')", "spawn(print, 1)"])
def test_a_module_must_not_train_while_it_is_imported(call: str, write: Write) -> None:
    write("unguarded", f"from ddp_manual import join, spawn\n{call}\n")
    with pytest.raises(BadOption, match="--model unguarded:Net cannot be imported") as caught:
        own_code.factory("model", "unguarded:Net")
    assert caught.value.why.startswith(f"BadOption: importing unguarded calls {call[:4]}")
    assert 'if __name__ == "__main__":' in caught.value.next
