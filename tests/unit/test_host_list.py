"""Which hosts a run has, as a person types them, and as the hostfiles of Open MPI and DeepSpeed say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_manual.errors import BadOption
from ddp_manual.launch.host_list import Host, choose_hosts, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("b,a:4", [("b", 1), ("a", 4)]),
        ("node_1, me@b.example.org:03", [("node_1", 1), ("me@b.example.org", 3)]),
        ("10.0.0.1:2,[fe80::1]:2,me@[fd00::2]", [("10.0.0.1", 2), ("fe80::1", 2), ("me@fd00::2", 1)]),
        ("[fe80::1%eth0]", [("fe80::1%eth0", 1)]),
    ],
)
def test_hosts_are_listed_in_the_order_in_which_their_ranks_count(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == hosts


def test_an_address_is_a_name_without_its_user() -> None:
    assert Host("me@fd00::2", 1).address == "fd00::2"
    assert Host("a", 1).address == "a"


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("", "--hosts '' lacks a host", "it is empty"),
        ("a:x", "--hosts 'a:x', entry a:x: 'x' is not a number of ranks", "--hosts a:4,b:4"),
        ("a:٣", "'٣' is not a number of ranks", "it is no whole number"),
        ("fe80::1:2", "has an IPv6 address without brackets: fe80::1:2", "[fe80::1]:4"),
        ("[fe80::x]:2", "'[fe80::x]' is not a host", "an IPv6 address"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host", "--hosts a:4"),
        ("a:2,b:1,me@A:3", "entry me@A:3: the host A is there already", "name each host once, with all its ranks: a:5"),
    ],
)
def test_a_list_of_hosts_that_cannot_be_meant_is_refused_with_what_to_write(text: str, what: str, hint: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_hosts(text)
    assert what in caught.value.what
    assert hint in f"{caught.value.why}\n{caught.value.next}"


def hostfile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hostfile"
    path.write_text(text)
    return str(path)


def test_a_hostfile_of_open_mpi_is_read_as_mpirun_reads_it(tmp_path: Path) -> None:
    """As seen in ``mpirun --display-allocation --hostfile`` of Open MPI 4.1.4, except for the address with colons."""
    text = "# two kinds\nh0 slots=2 max_slots=4\n\n  me@h1 slots = 3 # ours\nh2\nh3 max-slots=4\n[fe80::1] slots=2\n"
    hosts = [("h0", 2), ("me@h1", 3), ("h2", 1), ("h3", 4), ("fe80::1", 2)]
    assert read_hostfile(hostfile(tmp_path, text)) == hosts
    assert read_hostfile(hostfile(tmp_path, "fe80::1 slots=2")) == [("fe80::1", 2)]


def test_a_hostfile_of_deepspeed_is_read_as_it_is(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "\ufeffworker-1 slots=4\r\nworker-2 slots=8\r\n")
    assert read_hostfile(path) == [("worker-1", 4), ("worker-2", 8)]


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("# a slots=4\n\n", "names no host", "nothing but comments and blank lines"),
        ("a slots=2\nb slots=x", ", line 2: 'x' is not a number of ranks", "a slots=4"),
        ("a slots=2 slots=3", ", line 1: slots=3 cannot be used", "is there twice"),
        ("a slots=4 max_slots=2", ", line 1: slots=4 is above max_slots=2", "make slots smaller"),
        ("a:4", ", line 1: a:4 is not a host", "write: a slots=4"),
        ("a\n# more\nb\nA", ", line 4: the host A is there already", "once, with all its ranks: a slots=2"),
        ("a\0b slots=2", ", line 1: 'a\\x00b' is not a host", "a slots=4"),
    ],
)
def test_a_hostfile_that_cannot_be_meant_is_refused_by_file_and_line(
    tmp_path: Path, text: str, what: str, hint: str
) -> None:
    path = hostfile(tmp_path, text)
    with pytest.raises(BadOption) as caught:
        read_hostfile(path)
    assert f"--hostfile {path}" in caught.value.what and what in caught.value.what
    assert hint in f"{caught.value.why}\n{caught.value.next}"


def test_a_hostfile_that_cannot_be_read_is_an_error_and_never_this_machine_alone(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="cannot be read"):
        read_hostfile(str(tmp_path / "missing"))


def test_exactly_one_of_hosts_and_hostfile_says_where_the_ranks_are(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "a slots=2")
    assert choose_hosts("a:2", None) == choose_hosts(None, path) == [("a", 2)]
    with pytest.raises(BadOption, match="exclude each other"):
        choose_hosts("a:2", path)
    with pytest.raises(BadOption, match="no hosts were given"):
        choose_hosts(None, None)
