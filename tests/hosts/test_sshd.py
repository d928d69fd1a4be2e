"""The sshd of the tests behaves as the other tests expect; tried with ssh alone, without ranks."""

from __future__ import annotations

from tests.hosts.conftest import SshInto

BATCH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")


def test_ssh_runs_a_command_on_each_host_by_its_name_or_letter_with_the_given_variables(ssh_into: SshInto) -> None:
    reached = ssh_into(2, WORD="some word")
    for to in (*reached.hosts, "a", "b"):
        name = to if isinstance(to, str) else to.name
        said = reached.hosts[0].run(*reached.command.split(), *BATCH, name, 'hostname; echo "$WORD"').stdout.split("\n")
        assert said[0].lower().endswith(name[-1].lower()) and said[1] == "some word"
