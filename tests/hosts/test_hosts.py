"""Hosts behave as the other tests expect; tried with plain sockets, without ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.conftest import Start
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import PREFIX, Host, Namespace, remove_leftovers

# The kernel completes a connection to a listening socket; nobody needs to accept it.
LISTEN = (
    "import socket, sys, time\n"
    "sockets = [socket.create_server(('::', int(port)), family=socket.AF_INET6, dualstack_ipv6=True)"
    " for port in sys.argv[1:]]\n"
    "print('listening', file=sys.stderr, flush=True)\n"
    "time.sleep(60)\n"
)
CONNECT = (
    "import socket, sys\n"
    "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.5)\n"
    "except OSError as error: print(type(error).__name__)\n"
    "else: print('connected')\n"
)


def listen(host: Host, *ports: int) -> None:
    host.start(sys.executable, "-c", LISTEN, *ports).wait_for("listening")


def connect(host: Host, address: str, port: int) -> str:
    """Return ``connected``, or the name of the exception."""
    return host.run(sys.executable, "-c", CONNECT, address, port).stdout.strip()


def look_up(host: Host, name: str) -> list[str]:
    """Return the IPv4 addresses of a name."""
    lines = host.run("env", "RES_OPTIONS=timeout:1 attempts:1", "getent", "ahostsv4", name, check=False).stdout
    return [line.split()[0] for line in lines.splitlines() if "STREAM" in line]


def test_a_host_has_a_name_of_its_own_and_knows_the_others_until_told_otherwise(hosts: Hosts) -> None:
    first, second = hosts(2)
    assert [host.run("hostname").stdout.strip() for host in (first, second)] == ["hostA", "hostB"]
    assert os.uname().nodename not in ("hostA", "hostB")
    assert look_up(first, "hostA") == look_up(second, "hostB") == ["127.0.1.1"]
    assert look_up(first, "hostB") == [second.address]
    first.resolve("hostB", "10.0.0.1", "10.0.0.2")
    assert look_up(first, "hostB") == ["10.0.0.1", "10.0.0.2"]
    first.resolve("hostB")
    assert look_up(first, "hostB") == []


def test_without_a_resolver_look_ups_fail_at_once_and_with_a_silent_one_they_last(hosts: Hosts) -> None:
    (host,) = hosts(1)
    started = time.monotonic()
    assert look_up(host, "elsewhere.example") == []
    assert time.monotonic() - started < 0.9
    host.resolver(host.network.silent)
    started = time.monotonic()
    assert look_up(host, "elsewhere.example") == []
    assert time.monotonic() - started >= 1


def test_a_process_on_a_host_is_the_one_that_was_started(hosts: Hosts) -> None:
    shell = hosts(1)[0].start("sh", "-c", "echo $$")
    assert shell.wait() == 0
    assert int(shell.out) == shell.process.pid


def test_a_firewall_rule_is_for_one_host_one_direction_and_one_port(hosts: Hosts) -> None:
    first, second, third = hosts(3, ipv6=True)
    for host in (first, second):
        listen(host, 5001, 5002)
    first.drop_from(second, 5001)
    first.reject_from(third, 5001)
    for address in (first.ipv4, first.ipv6):
        assert connect(second, address, 5001) == "TimeoutError"
        assert connect(third, address, 5001) == "ConnectionRefusedError"
        assert connect(second, address, 5002) == "connected"
    assert connect(first, second.address, 5001) == "connected"
    first.open_all()
    assert connect(second, first.address, 5001) == "connected"


def test_only_one_port_can_be_open_to_the_other_hosts(hosts: Hosts) -> None:
    first, second = hosts(2)
    listen(first, 5001, 5002)
    first.only_port_open(5001)
    assert [connect(second, first.address, port) for port in (5001, 5002)] == ["connected", "TimeoutError"]
    assert connect(first, first.address, 5002) == "connected"


def test_a_host_without_its_cable_answers_nobody_and_keeps_its_address(hosts: Hosts) -> None:
    first, second = hosts(2)
    listen(first, 5001)
    assert connect(second, first.address, 5001) == "connected"
    first.disconnect()
    assert connect(second, first.address, 5001) == "TimeoutError"
    assert connect(first, first.address, 5001) == "connected"
    first.reconnect()
    assert connect(second, first.address, 5001) == "connected"


def test_namespaces_of_a_killed_test_process_are_removed_and_those_of_a_running_one_stay(
    hosts: Hosts, start: Start
) -> None:
    (living,) = hosts(1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = Namespace(f"{PREFIX}{ended.pid}-1-hostA")
    left.etc.mkdir(parents=True)
    left.add()
    process = start("ip", "netns", "exec", left.name, "sh", "-c", "echo here >&2; exec sleep 60")
    process.wait_for("here")
    remove_leftovers()
    assert process.wait(5) == -signal.SIGKILL
    assert not left.etc.exists()
    assert left.name not in (listed := subprocess.check_output(["ip", "netns", "list"], text=True))
    assert living.namespace.name in listed
