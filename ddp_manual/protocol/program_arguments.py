"""The arguments of a user's own program as options, so that rank 0 can name those that differ; the program's own parser
is not known here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ddp_manual.environment.launcher_variables import TORCHRUN
from ddp_manual.secret_arguments import HIDDEN, without_secrets
from ddp_manual.wire import LONGEST_NAME, printable

# What names a rank's place in the run, and differs by definition: our own options, torchrun's and accelerate's.
PLACE = {
    *TORCHRUN,
    *("node_rank", "group_rank", "role_rank", "machine_rank", "process_id", "local_addr"),
    *("nnodes", "nproc_per_node", "num_machines", "num_processes", "main_process_ip", "main_process_port"),
    *("rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_conf"),
}
GIVEN = "given"
# Bytes. More arguments, such as a thousand names of files, are compared as one: a hello has 64 KiB.
MOST_BYTES = 20_000
OTHERS = "other arguments"
# hydra, OmegaConf: optimizer.lr=0.1, +data=mnist. Not a path or an address.
OVERRIDE = re.compile(r"([+~]{0,2}[A-Za-z_][\w.@]*)=(.*)", re.DOTALL)
SECRET = re.compile(rf"(^|[= ]){re.escape(HIDDEN)} \(digest [0-9a-f]{{12}}\)")
DIGITS = 12
# A word that begins with - and is no number, as -0.5 is.
OPTION = re.compile(r"-(?!\.?\d.*\Z)[\s\S]+")


def named_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return ``{"--lr": "0.1", "--amp": "given", "argument 1": "data"}`` for ``--lr 0.1 --amp data``-like words.

    A word behind an option is taken for its value; an option that is given again has all its values. Arguments that
    name a rank's place in the run are left out. A secret is replaced by its digest.
    """
    values: dict[str, list[str]] = {}
    named = None
    positions = 0
    only_values = False
    for word in without_secrets(arguments, lambda secret: f"{HIDDEN} ({_digest(secret)})"):
        is_option = not only_values and OPTION.fullmatch(word)
        if is_option and word == "--":
            only_values, named = True, None
        elif is_option:
            name, equals, value = word.partition("=")
            values.setdefault(name, []).extend([value] if equals else [])
            named = None if equals else name
        elif named is not None:
            values[named].append(word)
            named = None
        elif override := OVERRIDE.fullmatch(word):
            values.setdefault(override[1], []).append(override[2])
        else:
            positions += 1
            values[f"argument {positions}"] = [word]
    found = {name: " ".join(words) if words else GIVEN for name, words in values.items()}
    return _bounded({name: value for name, value in found.items() if _plain(name) not in PLACE})


def differing_arguments(
    rank_0: Mapping[str, str], arguments: Mapping[str, str], may_differ: Iterable[str] = ()
) -> list[str]:
    """Return the arguments that differ and may not.

    Args:
        may_differ: names as a person types them, such as ``lr``, ``--batch-size`` or ``argument 1``. A name that no
            argument has does no harm: where one is misspelled, the argument that was meant is still named.
    """
    allowed = {_plain(name) for name in may_differ}
    return [
        name
        for name in sorted({*rank_0, *arguments})
        if rank_0.get(name) != arguments.get(name) and _plain(name) not in allowed
    ]


def shown(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return arguments as others may see them: without the digests of secrets, which reveal a short one by guessing."""
    return {name: SECRET.sub(rf"\1{HIDDEN}", value) for name, value in arguments.items()}


def may_differ_option(names: Collection[str]) -> str:
    """Return what to type so that these arguments may differ."""
    return f"--may_differ {','.join(_plain(name) for name in names)}"


def _plain(name: str) -> str:
    """Return ``batch_size`` for ``--batch-size``, ``argument_1`` for ``argument 1``."""
    return name.strip().lstrip("-+~").replace("-", "_").replace(" ", "_")


def _bounded(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return names and values that fit into a hello: those that are too long, or too many, become a digest."""
    kept: dict[str, str] = {}
    rest: list[tuple[str, str]] = []
    size = 0
    for name, value in sorted(arguments.items()):
        item = _shortened(name), _shortened(value)
        size += len(json.dumps(item))
        if size > MOST_BYTES:
            rest.append((name, value))
        else:
            kept[item[0]] = item[1]
    return {**kept, OTHERS: f"{len(rest)}, {_digest(repr(rest))}"} if rest else kept


def _shortened(text: str) -> str:
    shown = printable(text, LONGEST_NAME // 2)
    return shown if shown == text else f"{shown} ({_digest(text)})"


def _digest(text: str) -> str:
    return f"digest {digest(text.encode('utf-8', 'surrogateescape'))}"


def digest(content: bytes) -> str:
    """Return 12 hexadecimal digits that tell contents apart, as ranks send and show them."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]
