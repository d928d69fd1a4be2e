"""Hosts behave as the other tests expect; tried with plain sockets, without ranks."""

from __future__ import annotations

import signal
import subprocess
import sys

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


def connect(host: Host, address: str, port: int) -> str:
    """Return ``connected``, or the name of the exception."""
    return host.run(sys.executable, "-S", "-c", CONNECT, address, port).stdout.strip()


def test_firewalls_and_cables_are_for_one_host_one_direction_and_one_port(hosts: Hosts) -> None:
    first, second, third = hosts(3, ipv6=True)
    assert [host.run("hostname").stdout.strip() for host in (first, second)] == ["hostA", "hostB"]
    for host in (first, second):
        host.start(sys.executable, "-c", LISTEN, 5001, 5002).wait_for("listening")
    first.drop_from(second, 5001)
    first.reject_from(third, 5001)
    for address in (first.ipv4, first.ipv6):
        assert connect(second, address, 5001) == "TimeoutError"
        assert connect(third, address, 5001) == "ConnectionRefusedError"
        assert connect(second, address, 5002) == "connected"
    assert connect(first, second.address, 5001) == "connected"
    first.open_all()
    assert connect(second, first.address, 5001) == "connected"
    first.only_port_open(5001)
    assert [connect(second, first.address, port) for port in (5001, 5002)] == ["connected", "TimeoutError"]
    first.disconnect()
    assert connect(second, first.address, 5001) == "TimeoutError"
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
