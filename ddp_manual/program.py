"""Program: what ranks run that is not our own training: a script, a module or any executable."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_manual.secret_arguments import without_secrets
from ddp_manual.text_wrapping import as_shell_words

SCRIPT, MODULE, EXECUTABLE = "script", "module", "executable"
# Among the modules that a process imports before it forks workers: torch's compiler.
DYNAMO = "dynamo"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its arguments, as a person types them after ``ddp-manual run``."""

    kind: str
    """SCRIPT, MODULE or EXECUTABLE."""
    name: str
    """The path of the script, the module's name, or the executable."""
    arguments: tuple[str, ...] = ()
    prepare: str = ""
    """``module:function``, called with the rank and the arguments before all ranks are here; it returns the options, of
    the user's own code, that must be the same on all ranks. The worker then chooses the device too; a program without
    ``prepare`` chooses its device itself."""
    ends_at_once: bool = False
    """Whether it has nothing to do at its end, such as for threads, so that a teardown that could hang is left out."""

    @property
    def words(self) -> list[str]:
        """What to type for it after the options of ``run``."""
        return [*{SCRIPT: [], MODULE: ["-m"], EXECUTABLE: ["--no_python"]}[self.kind], self.name, *self.arguments]

    @property
    def typed(self) -> str:
        """What to type for it after the options of ``run``, quoted for a shell, with ``<hidden>`` for secrets."""
        return as_shell_words(without_secrets(self.words))
