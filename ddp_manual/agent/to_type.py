"""What a person is told to type: the command of another rank, that of this one again, or one that looks at the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_manual.environment import command_line
from ddp_manual.environment.rank_0_of_kubernetes import OWN_NAME
from ddp_manual.option_fields import as_flags
from ddp_manual.rank_options import WorldSpec
from ddp_manual.secret_arguments import without_secrets
from ddp_manual.text_wrapping import as_shell_words

# The option that says where rank 0 listens, at an address of its own host; no other rank's command has it.
LISTENING = "listen_addr"
# Options that differ between ranks or runs, so that one rank's value is never copied to another's command.
PER_RANK_OPTIONS = {"world_size", "rank", "local_rank", "master_addr", "master_port", "run_id", LISTENING}
# Options of which all ranks use rank 0's value; the command that goes on with the run gives other values.
OF_RANK_0 = ("run_dir", "resume")
# This package's commands that run a rank, start ranks, or print what to type for each.
OF_RANKS = ("train", "run", "check", "launch", "hosted", "commands")


def rank_command(spec: WorldSpec, command: str, options: Mapping[str, Any] = {}, rest: str = "") -> str:
    """Return the command that starts another rank of this run, with ``{rank}`` and ``{master_port}`` in it; where a
    launcher starts all ranks together, the command that does so; in a pod, the command that shows why a pod is missing.

    If ``launch`` has started ranks on this host, a single rank on another host may still be started by hand.

    Args:
        command: ``train``, ``run`` or ``check``.
        options: the options that the command has besides those of ``spec``.
        rest: what comes last, quoted for a shell.
    """
    typed, arguments = command_line.typed_command()
    if spec.started_by:
        return f"{spec.started_by} ... {as_shell_words(without_secrets([*typed, *arguments]))}"
    if spec.source("master_addr") == f"from {OWN_NAME}":
        # <job>-0.<service>.<namespace>.svc.<domain>
        pod, _, namespace, svc, *_ = [*spec.master_addr.split("."), "", "", ""]
        job, label = pod.removesuffix("-0"), "batch.kubernetes.io/job-"
        where = f"--namespace {namespace} " if svc == "svc" else ""
        return f"kubectl describe pods {where}--selector {label}name={job},{label}completion-index={{rank}}"
    if arguments[:1] and arguments[0] in OF_RANKS:
        typed.append(command)
    words = [as_shell_words(typed), f"--world_size {spec.world_size} --rank {{rank}}"]
    if spec.master_addr != WorldSpec.master_addr:
        words.append(f"--master_addr {as_shell_words([spec.master_addr])}")
    if spec.master_port != WorldSpec.master_port:
        words.append("--master_port {master_port}")
    given = {name: value for name, value in spec.given_options().items() if name not in PER_RANK_OPTIONS}
    return " ".join(filter(None, [*words, as_flags({**given, **options}), rest]))


def with_port(command: str, spec: WorldSpec) -> str:
    """Return a rank's command with the number for its ``{master_port}``: it has one if that is not the default, and
    what looks like one otherwise is a word of the program's."""
    if spec.master_port == WorldSpec.master_port:
        return command
    return command.replace("{master_port}", str(spec.master_port), 1)


def script_command(spec: WorldSpec, typed: Sequence[str]) -> str:
    """Return the command that starts another rank of a script that calls ``join``: with variables, since the script's
    flags are not known here. If nothing was ``typed``, as at Python's prompt, return the call of ``join``.

    A variable does not count where the script gives ``join`` a keyword. Then the option of that name is changed, if it
    was typed with that value; otherwise a remark says that what makes the rank has to be changed.
    """
    where = {"world_size": spec.world_size, "rank": "{rank}"}
    if spec.master_addr != WorldSpec.master_addr:
        where["master_addr"] = spec.master_addr if typed else repr(spec.master_addr)
    if spec.master_port != WorldSpec.master_port:
        where["master_port"] = "{master_port}"
    if not typed:
        return f"ddp_manual.join({', '.join(f'{name}={value}' for name, value in where.items())})"
    command, variables, remark = as_shell_words(without_secrets(typed)), list[str](), ""
    for name, value in where.items():
        # WORLD_SIZE is the same for all ranks; ``missing_ranks`` tells by it that this is a script.
        if spec.source(name) != "flag" or name == "world_size":
            variables.append(f"{name.upper()}={value}")
            continue
        option = rf"(?<= )(--{name.replace('_', '[-_]')}[ =]){re.escape(str(getattr(spec, name)))}(?!\S)"
        command, is_option = re.subn(option, rf"\g<1>{value}", command, count=1)
        if name == "rank" and not is_option:
            remark = f"\n(with what makes it rank {{rank}} in place of rank {spec.rank})"
    return " ".join([*variables, command]) + remark


def typed_again() -> str:
    """Return the command that was typed in this terminal, without OF_RANK_0, which say how the run goes on."""
    program, arguments = command_line.typed_command()
    return as_shell_words([*program, *command_line.without_options(arguments, *OF_RANK_0)])


def status_command(**flags: Any) -> str:
    """Return the ``status`` command with these flags: it shows a run, or has it go on without the missing ranks."""
    program, arguments = command_line.typed_command()
    own = program if arguments[:1] and arguments[0].isalpha() else ["ddp-manual"]
    return f"{as_shell_words([*own, 'status'])} {as_flags(flags)}"


def status_of_run(spec: WorldSpec, **flags: Any) -> str:
    """Return the ``status`` command with these flags, such as ``shrink``, for the run that this rank is in."""
    at_rank_0 = {name: getattr(spec, name) for name in ("master_addr", "master_port", "token_file")}
    typed = {name: value for name, value in at_rank_0.items() if value != getattr(WorldSpec, name)}
    return status_command(**typed, **flags)
