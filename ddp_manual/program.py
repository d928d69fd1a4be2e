"""Program: what ranks run that is not our own training: a script, a module or any executable; and which of its
arguments nobody else may read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SCRIPT, MODULE, EXECUTABLE = "script", "module", "executable"
# Words in the name of an argument that is a secret: --api_key, --hf-token, wandb.apiKey; not --tokenizer, --max_tokens.
SECRETS = {"key", "token", "secret", "password", "passwd", "credential", "credentials"}
WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
HIDDEN = "..."


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its arguments, as a person types them after ``ddp-manual run``."""

    kind: str
    """SCRIPT, MODULE or EXECUTABLE."""
    name: str
    """The path of the script, the module's name, or the executable."""
    arguments: tuple[str, ...] = ()
    prepare: str = ""
    """``module:function``, which says before all ranks are here what they must have in common of the user's own code:
    it is called with the rank and the arguments, and returns options. The device is chosen then too; a program without
    it chooses a device itself."""
    ends_at_once: bool = False
    """Whether it has nothing to do at its end, such as for threads, so that a teardown that could hang is left out."""

    @property
    def words(self) -> list[str]:
        """What to type for it after the options of ``run``."""
        return [*{SCRIPT: [], MODULE: ["-m"], EXECUTABLE: ["--no_python"]}[self.kind], self.name, *self.arguments]

    @property
    def typed(self) -> str:
        """What to type for it after the options of ``run``, quoted for a shell, with ``...`` for secrets."""
        return shlex.join(without_secrets(self.words))


def without_secrets(words: Sequence[str], shown: Callable[[str], str] = lambda secret: HIDDEN) -> list[str]:
    """Return what was typed with other words for secrets: the values of ``--api_key value`` and ``api_key=value``."""
    kept: list[str] = []
    is_value = False
    for word in words:
        parts = word.split("=")
        named = next((end for end in range(1, len(parts)) if _is_secret(parts[end - 1])), 0)
        is_option = word.startswith("-") and len(word) > 1
        if is_value and not is_option:
            kept.append(shown(word))
        elif named:
            kept.append("=".join([*parts[:named], shown("=".join(parts[named:]))]))
        else:
            kept.append(word)
        is_value = is_option and len(parts) == 1 and _is_secret(word)
    return kept


def _is_secret(name: str) -> bool:
    return any(word.lower() in SECRETS for word in WORD_OF_NAME.findall(name))
