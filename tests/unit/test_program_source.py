"""What of a user's own program is compared: its files, its packages, its arguments, and the variables around it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from ddp_manual.agent.program_source import MOST_FILES, MOST_PARTS, check_program, forkable_imports, source_of
from ddp_manual.environment import user_variables
from ddp_manual.errors import BadOption
from ddp_manual.messages import Claim, Hello
from ddp_manual.program import EXECUTABLE, MODULE, SCRIPT, Program
from ddp_manual.protocol.collective_variables import collective_variables, differing_variables
from ddp_manual.protocol.compatibility import _other_arguments
from ddp_manual.protocol.handshakes import LONGEST_HELLO
from ddp_manual.protocol.program_arguments import differing_arguments, may_differ_option, named_arguments, shown
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.ranks_and_runs import RankInfo
from ddp_manual.wire import as_json, encode, reader_of
from tests.runs import RUN, info, run_info


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def code_of(name: Path | str, kind: str = SCRIPT) -> Mapping[str, str]:
    return source_of.__wrapped__(Program(kind=kind, name=str(name))).code


def files_of(name: Path | str, kind: str = SCRIPT) -> list[str]:
    return sorted(code_of(name, kind))


def packages_of(script: Path) -> Mapping[str, str]:
    return source_of.__wrapped__(Program(kind=SCRIPT, name=str(script))).packages


PACKAGE = {
    "pack/__init__.py": "from . import always\n",
    "pack/always.py": "",
    "pack/train.py": "from .part import x\nimport top\n",
    "pack/part.py": "",
    "pack/__main__.py": "",
    "top.py": "",
}


def install(folder: Path, name: str, version: str, *modules: str) -> None:
    """Make as if a distribution were installed: only what says so is there, and modules without content."""
    site = folder / "site-packages"
    record = "".join(f"{module},,\n" for module in modules)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    write(site, {**dict.fromkeys(modules, ""), f"{info}/METADATA": metadata, f"{info}/RECORD": record})


# -- files ------------------------------------------------------------------------------------------------------------


def test_local_modules_are_followed_wherever_they_are_imported(tmp_path: Path) -> None:
    files = {
        "train.py": "import one\nfrom pack import inner\nif x: import short; import last\ndef f(): import late\n",
        "one.py": "from pack.sub.deep import (\n    a,  # (why)\n    b,\n)\n",
        "pack/inner.py": "from . import beside\nfrom .sub import deep\n",
        "pack/sub/__init__.py": "from .. import above\n",
        "pack/sub/deep.py": "import one\n",
    }
    without_imports = "pack/__init__ pack/beside pack/above late short last never random"
    files |= {f"{name}.py": "" for name in without_imports.split()}
    write(tmp_path, files)
    assert {*files_of(tmp_path / "train.py")} == {*files} - {"never.py", "random.py"}


@pytest.mark.parametrize(
    ("files", "named", "kind", "followed"),
    [
        ({"train.py": "import random, json\n", "random.py": ""}, "train.py", SCRIPT, "random.py train.py"),
        ({"app/__main__.py": "import part\n", "app/part.py": ""}, "app", SCRIPT, "__main__.py part.py"),
        ({"train.py": "\ufeffimport one\ndef f(:\n", "one.py": ""}, "train.py", SCRIPT, "one.py train.py"),
        (PACKAGE, "pack.train", MODULE, "pack/__init__.py pack/always.py pack/part.py pack/train.py top.py"),
        (PACKAGE, "pack", MODULE, "pack/__init__.py pack/__main__.py pack/always.py"),
        # It was started with -m, and calls join: only the path of the file is known.
        (PACKAGE, "pack/train.py", SCRIPT, "pack/__init__.py pack/always.py pack/part.py top.py train.py"),
    ],
)
def test_the_files_of_a_program_are_those_that_python_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], named: str, kind: str, followed: str
) -> None:
    monkeypatch.chdir(write(tmp_path, files))
    assert files_of(named, kind) == followed.split()


def test_of_an_installed_module_its_file_and_its_package_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "Some-Tool", "1.5", "sometool/__init__.py", "sometool/run.py", "sometool/part.py")
    write(tmp_path / "site-packages", {"sometool/run.py": "import sometool.part, json\n"})
    monkeypatch.syspath_prepend("")
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path / "site-packages")])
    source = source_of.__wrapped__(Program(kind=MODULE, name="sometool.run"))
    assert list(source.code) == ["sometool/run.py"]
    assert source.packages == {"Some-Tool": "1.5"}


@pytest.mark.parametrize(
    "text", ["from x import (\n" + "    aa,  # why\n" * 5000, "# ;import (\n" * 5000, "from x import (\n" * 5000]
)
def test_imports_whose_parentheses_are_not_closed_are_read_in_no_time(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"train.py": f"{text}\nimport one\n", "one.py": ""})
    started = time.process_time()  # the machine has other work too
    assert files_of(tmp_path / "train.py") == ["one.py", "train.py"]
    assert time.process_time() - started < 3


def test_many_files_are_combined_by_folder_and_still_fit_into_a_hello(tmp_path: Path) -> None:
    modules = [f"pack{folder}.sub.module{number}" for folder in range(30) for number in range(30)]
    names = [f"{name.replace('.', '/')}.py" for name in modules]
    write(tmp_path, {"train.py": "".join(f"import {name}\n" for name in modules), **dict.fromkeys(names, "")})
    before = code_of(tmp_path / "train.py")
    assert {*before} == {"train.py", *(f"pack{folder}/sub" for folder in range(30))}
    (tmp_path / names[-1]).write_text("changed = True")
    after = code_of(tmp_path / "train.py")
    assert [name for name in before if before[name] != after[name]] == ["pack29/sub"]


def test_a_program_of_any_size_is_read_within_bounds(tmp_path: Path) -> None:
    files = {f"module{number}.py": f"import module{number + 1}\n" for number in range(MOST_FILES + 100)}
    write(tmp_path, {"train.py": "import module0\n", **files})
    assert files_of(tmp_path / "train.py") == ["local modules"]


# -- packages ---------------------------------------------------------------------------------------------------------


def test_a_package_that_was_installed_in_development_mode_is_a_part_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``pip install --editable`` with setuptools does it: a hook knows where the package is, and no path does."""
    folder = write(tmp_path, {"train.py": "import mine\nfrom mine import part\n", "src/mine/__init__.py": ""})
    write(tmp_path, {"src/mine/part.py": ""})

    class Hook:
        __module__ = "__editable___mine_1_0_finder"

        @classmethod
        def find_spec(cls, name: str, path: object = None) -> ModuleSpec | None:
            file = folder / "src" / "mine" / "__init__.py"
            return spec_from_file_location(name, file) if name == "mine" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    assert files_of(folder / "train.py") == ["mine/__init__.py", "mine/part.py", "train.py"]
    assert packages_of(folder / "train.py") == {}


def test_packages_that_are_imported_at_the_top_count_with_their_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "Odd-Name", "2.0", "oddly/__init__.py")
    for name in ("plain", "inside", "optional", "indirect"):
        install(tmp_path, name, "3.1", f"{name}.py")
    lines = "import oddly.part, json\nfrom plain import x\nimport local, torch, ddp_manual, not_there\n"
    later = "def f():\n    import inside\ntry:\n    import optional\nexcept ImportError:\n    pass\n"
    write(tmp_path, {"train.py": lines + later, "local.py": "import indirect\n"})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    assert packages_of(tmp_path / "train.py") == {"Odd-Name": "2.0", "indirect": "3.1", "plain": "3.1"}


DDP = "dynamo torch.nn.parallel torch.nn.parallel.DistributedDataParallel"


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import torch\nimport torchvision.models as models\nimport numpy as np\n", "numpy torch torchvision.models"),
        ("from torch.nn import (  # why\n    Linear,\n)", "torch.nn torch.nn.Linear"),
        ("import torchmetrics, transformers, torch_geometric\n", "dynamo"),
        ("from local import data\n", "dynamo"),
        ("import sys, ddp_manual\ntrain_loader = optimise()\n", ""),
        ("import torch\nmodel = torch.compile(model)\n", "dynamo torch"),
        ("import torch\noptimizer = torch.optim.SGD(model.parameters())\n", "dynamo torch"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n", DDP),
        ("from torch.utils.tensorboard import SummaryWriter\nimport torch._inductor\n", ""),
        ("def f():\n    import torchvision\nif x:\n    import numpy\n", ""),
    ],
)
def test_what_is_imported_before_a_fork_is_torch_torchvision_numpy_and_dynamo_for_what_may_train(
    tmp_path: Path, text: str, imported: str
) -> None:
    script = write(tmp_path, {"train.py": text}) / "train.py"
    assert forkable_imports(Program(kind=SCRIPT, name=str(script))) == imported.split()
    assert forkable_imports(Program(kind=SCRIPT, name=str(tmp_path / "gone.py"))) == []


# -- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_are_named_as_a_person_would_name_them() -> None:
    typed = "--lr 0.1 --batch-size=32 data --amp --set a=1 --set b=2 optimizer.lr=0.3 --offset -1.5 -v -- --more"
    assert named_arguments(typed.split()) == {
        **{"--lr": "0.1", "--batch-size": "32", "--offset": "-1.5", "optimizer.lr": "0.3", "--set": "a=1 b=2"},
        **{"--amp": "given", "-v": "given", "argument 1": "data", "argument 2": "--more"},
    }


def test_a_secret_is_compared_by_a_digest_and_hidden_in_messages_and_commands() -> None:
    typed = "--api_key hunter2 --hf-token=hunter2 wandb.apiKey=hunter2 --set lr=1,password=hunter2=="
    open_to_all = "--tokenizer bert --max_tokens=5 --keys a monkey=b --use_token --lr 1"
    arguments = named_arguments([*typed.split(), *open_to_all.split()])
    assert "hunter2" not in repr(arguments)
    assert shown(arguments) == {
        **dict.fromkeys(("--api_key", "--hf-token", "wandb.apiKey"), "<hidden>"),
        "--set": "lr=1,password=<hidden>",
        **{"--tokenizer": "bert", "--max_tokens": "5", "--keys": "a", "monkey": "b", "--use_token": "given"},
        "--lr": "1",
    }
    other = {**arguments, "--api_key": named_arguments(["--api_key", "hunter3"])["--api_key"]}
    assert differing_arguments(arguments, other) == ["--api_key"]
    hidden = (
        "train.py --api_key '<hidden>' '--hf-token=<hidden>' 'wandb.apiKey=<hidden>' --set 'lr=1,password=<hidden>'"
    )
    program = Program(kind=SCRIPT, name="train.py", arguments=(*typed.split(), *open_to_all.split()))
    assert program.typed == f"{hidden} {open_to_all}"
    error = _other_arguments(info(1, "b", arguments=other), info(0, "a", arguments=arguments), RUN)
    assert error is not None
    assert error.why == "--api_key: rank 0 (a) has <hidden>, rank 1 has <hidden>"
    or_not = "\nor, where they differ on purpose, before its name: --may_differ api_key"
    assert error.next == f"  train --rank 1 --data '{{x}}'{or_not}"
    for named, command in (
        ((), "train --rank {rank} --api_key '<hidden>'"),
        ((), "srun train"),
        (("lr",), RUN.command),
    ):
        one = info(1, "b", arguments=other, may_differ=named)
        error = _other_arguments(one, info(0, "a", arguments=arguments), run_info(command=command))
        assert error is not None and error.next == f"give the program the same arguments on every rank{or_not}"


@pytest.mark.parametrize(
    ("one", "other", "may_differ", "differ"),
    [
        ("--epochs=1 --rank 1 --local-rank=1 --master_addr a", "--node_rank=0 --epochs 1", "", ""),
        ("--lr=0.1 --amp", "--lr 0.2", "", "--amp,--lr"),
        ("--batch-size 1 a", "--batch-size 2 b", "batch_size", "argument 1"),
        ("--batch-size 1 a", "--batch-size 2 b", " --batch-size ,argument 1,no_such_argument", ""),
        ("--batch-size 1 a", "--batch-size 2 b", "batch_size,argument_1", ""),
    ],
)
def test_arguments_differ_by_value_however_they_or_those_that_may_differ_are_typed(
    one: str, other: str, may_differ: str, differ: str
) -> None:
    named = named_arguments(one.split()), named_arguments(other.split())
    assert ",".join(differing_arguments(*named, may_differ.split(","))) == differ
    assert may_differ_option(["--batch-size", "argument 1"]) == "--may_differ batch_size,argument_1"


def test_any_number_of_arguments_of_any_length_fits_into_a_hello() -> None:
    longest = ["--text", "x" * 100_000, *(f"--option{number}={'é' * 300}{number}" for number in range(1000))]
    arguments = named_arguments([*longest, "odd\x1b[2J\udcff"])
    code = dict.fromkeys([f"{number}{'c' * 200}" for number in range(MOST_PARTS)], "d" * 12)
    rank = info(0, "a", arguments=arguments, code=code)
    assert reader_of(RankInfo)(as_json(rank).decode()) == rank
    assert len(encode(Seal(b"token").close(Hello, "n" * 32, Claim(rank, "n" * 32)))) < LONGEST_HELLO
    longest[-1] += "changed"
    changed = named_arguments([*longest, "odd\x1b[2J\udcff"])
    assert differing_arguments(arguments, changed) == ["other arguments"]
    longest[2] += "changed"
    assert differing_arguments(changed, named_arguments([*longest, "odd\x1b[2J\udcff"])) == ["--option0"]


# -- variables --------------------------------------------------------------------------------------------------------


def test_variables_that_change_collectives_are_compared_and_those_of_a_host_or_a_log_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = (
        "NCCL_ALGO NCCL_P2P_DISABLE TORCH_NCCL_BLOCKING_WAIT TORCH_DISTRIBUTED_DEBUG GLOO_DEVICE_TRANSPORT NCCL_PSK"
    )
    not_compared = (
        "NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA NCCL_HOSTID NCCL_DEBUG NCCL_DEBUG_FILE NCCL_TOPO_FILE "
        "NCCL_GRAPH_DUMP_FILE_RANK TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_DUMP_ON_TIMEOUT "
        "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT MASTER_PORT OMP_NUM_THREADS TORCHELASTIC_RUN_ID"
    )
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "TORCH_"))]:
        monkeypatch.delenv(name)
    for name in [*compared.split(), *not_compared.split()]:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("NCCL_NTHREADS", "")
    found = collective_variables(user_variables.network_variables())
    assert found == {**dict.fromkeys(compared.split(), "secret"), "NCCL_PSK": "set"}  # a key is not sent


def test_how_gpus_of_one_host_reach_each_other_is_compared_on_that_host_only() -> None:
    one, other = {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}
    assert differing_variables(one, other, same_host=True) == ["NCCL_ALGO", "NCCL_P2P_DISABLE"]
    assert differing_variables(one, other, same_host=False) == ["NCCL_ALGO"]


# -- programs that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "what", "next"),
    [
        (SCRIPT, "trian.py", "trian.py does not exist", "did you mean train.py?"),
        (SCRIPT, "pack", "pack is a folder without a __main__.py", "name the script in it: pack/only.py"),
        (MODULE, "train.py", "-m train.py is the name of a file", "-m train, or the file without -m: train.py"),
        (MODULE, "no.such", "there is no module no.such", "start in the folder that has it"),
        (MODULE, "regular", "the package regular has no __main__.py", "name a module of it: -m regular.MODULE"),
        (EXECUTABLE, "no-such", "there is no executable no-such", "give its path, such as ./no-such"),
        (EXECUTABLE, "./train.py", "./train.py cannot be executed", "chmod +x ./train.py"),
    ],
)
def test_a_program_that_is_not_there_is_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, what: str, next: str
) -> None:
    write(tmp_path, {"train.py": "", "pack/only.py": "", "regular/__init__.py": ""})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOption) as raised:
        check_program(Program(kind=kind, name=name))
    assert raised.value.what == what
    assert next in raised.value.next
    assert raised.value.exit_code == 2


def test_an_executable_that_is_a_script_is_compared_and_a_binary_is_not(tmp_path: Path) -> None:
    path, digests = tmp_path / "tool", []
    for text in ("#!/bin/sh\n", "#!/bin/sh\nexit 1\n", "\x7fELF1", "\x7fELF2"):
        path.write_text(text)
        path.chmod(0o755)
        digests.append(code_of(path, EXECUTABLE)["tool"])
    assert digests[0] != digests[1]
    assert digests[2] == digests[3]
