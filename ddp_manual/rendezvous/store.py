"""The TCPStore of a run: who hosts it, who connects, and every key in it.

All keys but ``ddp_manual/current``, which says the last attempt, begin with ``ddp_manual/<attempt>/``. What they hold
is JSON, never pickle.

    hello             what run this is (rank 0 writes it once, before anybody can ask)
    arrivals          queue: each process's request to be a rank, to be taken off again, or that it lives
    verdict/<nonce>   rank 0's answer to one request
    news/<version>    the roll call so far, one version per change; waiting ranks block on the next one
    place/<nonce>     where a rank that has waited stands, once all are here
    summary           the roll call so far with all that is known of each rank, for whoever only looks
    hosts             by node: the rank that speaks for a host, and the address and port where it answers
    reach/<node>      the hosts which that one could not reach; ``unreachable`` has all failing pairs
    progress          what each rank does, and how long ago it was heard
    stacks_asked      queue: the keys under which third terminals want the Python stacks of all ranks, stacks/<key>
    once/<host>/<n>   the outcome of the nth job that one rank per host does for the others
    report/<rank>     what a rank has to tell rank 0 at its end
    failure           the first failure of the run: whoever reads it leaves
    finished/<rank>   this rank has done its work and takes part in no more collectives; ``finished`` counts them
    together          whether the ranks close their process groups together; the first to know decides
    left/<nonce>      this process needs the store no more; not by rank, which an earlier process may have been
    process_group/    torch's own keys
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_manual import environment
from ddp_manual.errors import BackendUnavailable, MasterLost
from ddp_manual.rendezvous import peernames
from ddp_manual.rendezvous.address import at
from ddp_manual.rendezvous.waiting import Waiting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

T = TypeVar("T")

# A read that blocks until its key is set is ended by the key, by the process or by rank 0's socket closing.
UNBOUNDED = timedelta(days=365)
# For an address that was just seen to answer as a store; torch does not listen to Ctrl-C meanwhile.
CONNECT_TIMEOUT = timedelta(seconds=10)
CURRENT_ATTEMPT = "ddp_manual/current"
# Bytes. What a process may say of itself: with every option and digest it takes 3 KB.
LARGEST_REQUEST = 1 << 16
# Whatever else is read from the store; the summary of 4,096 ranks takes 0.8 MB.
LARGEST_MESSAGE = 1 << 22
# Keys in one message: the first ranks read their verdicts while rank 0 still writes those of the last.
MOST_AT_ONCE = 64


class StoreGone(MasterLost):
    """The store of a run has ended under a client, or is about to."""

    def __init__(self, address: str, port: int, why: str) -> None:
        super().__init__(
            f"rank 0's store at {at(address, port)} is gone",
            why=why,
            next="look at rank 0's last lines for why it left, then start all ranks again",
        )


class RunStore:
    """One client of the run's TCPStore.

    A blocked read holds its connection, so each thread has a client of its own: ``clone()``.
    Every method raises StoreGone when the store is gone.
    """

    def __init__(self, client: TCPStore, address: str, port: int, attempt: str, *, hosts: bool = False) -> None:
        self._client = client
        self._hosts = hosts
        self.address = address
        self.port = port
        self._attempt = attempt
        self.lost = False
        """Whether a call has found the store gone; torch prints a page about each further one."""

    @classmethod
    def host(cls, listener: socket.socket, attempt: str = "0") -> RunStore:
        """Serve a store on a listening socket (which it takes over), and connect to it."""
        address, port = listener.getsockname()[:2]
        with _torch_errors(address, port):
            return cls(_client(address, port, listen_fd=listener.detach()), address, port, attempt, hosts=True)

    @classmethod
    def connect(cls, address: str, port: int, attempt: str = "0") -> RunStore:
        """A client of the store at an IP address that was seen to answer."""
        with _torch_errors(address, port):
            return cls(_client(address, port), address, port, attempt)

    def close(self) -> None:
        """Let go of the client and, on rank 0, of the server and its port. No method works after this."""
        del self._client

    def clone(self) -> RunStore:
        return RunStore.connect(self.address, self.port, self._attempt)

    def for_process_group(self) -> Store:
        """The part of the store that ``init_process_group`` may use.

        Where this process hosts the store it is another client: a DDP module holds its process group, and would keep
        the server and its port from the next rendezvous for as long as the script keeps the module.
        """
        from torch._C._distributed_c10d import PrefixStore

        client = self.clone()._client if self._hosts else self._client
        return PrefixStore(self._key("process_group"), client)

    # -- the roll call ------------------------------------------------------------------------------------------

    def say_hello(self, hello: dict[str, Any]) -> bool:
        """Open the roll call; False if another rank 0 has (possible only in an agent's store)."""
        with self._errors():
            self._client.set(CURRENT_ATTEMPT, self._attempt)
        return self._set_once("hello", hello)

    def join_attempt(self) -> None:
        """Read the roll call that was opened last, for whoever does not know which that is."""
        with self._errors():
            if self._client.check([CURRENT_ATTEMPT]):
                self._attempt = self._client.get(CURRENT_ATTEMPT).decode(errors="replace")

    def hello(self) -> Any:
        return self._get("hello")

    def hello_if_any(self) -> Any:
        return self.hello() if self._known("hello") else None

    def arrive(self, request: Mapping[str, Any]) -> None:
        with self._errors():
            self._client.queue_push(self._key("arrivals"), json.dumps(request))

    def next_arrival(self, *, block: bool) -> bytes | None:
        """The oldest request not yet taken; with ``block`` as long as it takes, else None if there is none."""
        return self._pop("arrivals", block=block)

    def set_verdicts(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        self._set_all({f"verdict/{nonce}": verdict for nonce, verdict in verdicts.items()})

    def verdict(self, nonce: str) -> Any:
        return self._get(f"verdict/{nonce}")

    def publish_news(self, version: int, news: Mapping[str, Any]) -> None:
        self._set(f"news/{version}", news)

    def news(self, version: int) -> Any:
        return self._get(f"news/{version}")

    def set_places(self, places: Mapping[str, Mapping[str, Any]]) -> None:
        self._set_all({f"place/{nonce}": place for nonce, place in places.items()})

    def place(self, nonce: str) -> Any:
        return self._get(f"place/{nonce}")

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        self._set("summary", summary)

    def summary(self) -> Any:
        return self._get("summary")

    # -- between hosts --------------------------------------------------------------------------------------------

    def set_hosts(self, hosts: list[dict[str, Any]]) -> None:
        self._set("hosts", hosts)

    def hosts(self) -> Any:
        return self._get("hosts")

    def report_reach(self, node: int, failures: list[list[Any]]) -> None:
        self._set(f"reach/{node}", failures)

    def have_reported_reach(self, nodes: Iterable[int]) -> bool:
        return self._known(*(f"reach/{node}" for node in nodes))

    def reach(self, node: int) -> Any:
        return self._get(f"reach/{node}")

    def set_unreachable(self, pairs: list[dict[str, Any]]) -> None:
        self._set("unreachable", pairs)

    def unreachable(self) -> Any:
        return self._get("unreachable")

    # -- the run ------------------------------------------------------------------------------------------------

    def set_outcome(self, host: int, number: int, outcome: dict[str, Any]) -> None:
        self._set(f"once/{host}/{number}", outcome)

    def outcome(self, host: int, number: int) -> Any:
        return self._get(f"once/{host}/{number}")

    def set_progress(self, progress: Sequence[Any]) -> None:
        self._set("progress", progress)

    def progress_if_any(self) -> Any:
        return self._get("progress") if self._known("progress") else None

    def ask_stacks(self, key: str) -> None:
        """Ask rank 0 for the stacks of all ranks, to be put under ``key``."""
        with self._errors():
            self._client.queue_push(self._key("stacks_asked"), json.dumps(key))

    def next_asked_for_stacks(self) -> Any:
        """The oldest key that was asked under and not yet taken, or None; does not block."""
        message = self._pop("stacks_asked", block=False)
        return None if message is None else decode(message)

    def forget_stacks(self, key: str) -> None:
        with self._errors():
            self._client.delete_key(self._key(f"stacks/{key}"))

    def set_stacks(self, key: str, stacks: Mapping[str, str]) -> None:
        self._set(f"stacks/{key}", stacks)

    def stacks(self, key: str) -> Any:
        return self._get(f"stacks/{key}")

    def set_report(self, rank: int, report: Mapping[str, Any]) -> None:
        self._set(f"report/{rank}", report)

    def report(self, rank: int) -> Any:
        return self._get(f"report/{rank}")

    def publish_failure(self, failure: dict[str, Any]) -> None:
        """Make this the run's failure, unless there is one already."""
        self._set_once("failure", failure)

    def failure(self) -> Any:
        return self._get("failure")

    def failure_if_any(self) -> Any:
        """The run's failure, or None; does not block."""
        return self.failure() if self._known("failure") else None

    def set_finished(self, rank: int) -> int:
        """This rank has done its work; returns how many have."""
        self._set(f"finished/{rank}", True)
        with self._errors():
            return int(self._client.add(self._key("finished"), 1))

    def count_finished(self) -> int:
        with self._errors():
            return int(self._client.add(self._key("finished"), 0))

    def close_together(self, seen: bool) -> bool:
        """Whether all ranks close their process groups together: ``seen`` of the first that has seen it, for all."""
        return seen if self._set_once("together", seen) else not seen

    def has_finished(self, rank: int) -> bool:
        return self._known(f"finished/{rank}")

    def set_left(self, nonce: str) -> None:
        self._set(f"left/{nonce}", True)

    def have_left(self, nonces: Iterable[str]) -> bool:
        """Whether all of these processes need the store no more."""
        return self._known(*(f"left/{nonce}" for nonce in nonces))

    # -- below ---------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"ddp_manual/{self._attempt}/{name}"

    def _set(self, name: str, value: Any) -> None:
        with self._errors():
            self._client.set(self._key(name), json.dumps(value))

    def _set_all(self, values: Mapping[str, Any]) -> None:
        """Many keys in few messages."""
        names = list(values)
        for some in (names[first : first + MOST_AT_ONCE] for first in range(0, len(names), MOST_AT_ONCE)):
            texts = [json.dumps(values[name]) for name in some]
            with self._errors():
                self._client.multi_set([self._key(name) for name in some], texts)  # type: ignore[attr-defined]

    def _set_once(self, name: str, value: Any) -> bool:
        """Set a key that has no value yet; False if it has another one."""
        text = json.dumps(value)
        with self._errors():
            return bool(self._client.compare_set(self._key(name), "", text) == text.encode())

    def _known(self, *names: str) -> bool:
        """Whether all of these keys are set; does not block."""
        with self._errors():
            return self._client.check([self._key(name) for name in names])

    def _pop(self, queue: str, *, block: bool) -> bytes | None:
        from torch.distributed import QueueEmptyError

        with self._errors():
            try:
                return self._client.queue_pop(self._key(queue), block)
            except QueueEmptyError:
                return None

    def _get(self, name: str) -> Any:
        with self._errors():
            return decode(self._client.get(self._key(name)))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with _torch_errors(self.address, self.port):
                yield
        except MasterLost:
            self.lost = True
            raise


def decode(message: bytes) -> Any:
    """JSON from the store.

    Raises:
        ValueError: it is not JSON, or longer than anything this package writes.
    """
    if len(message) > LARGEST_MESSAGE:
        raise ValueError(f"a message of {len(message)} bytes")
    return json.loads(message)


def interruptibly(call: Callable[[], T], waiting: Waiting, about: str) -> T:
    """Run ``call`` in a thread and wait for it: Ctrl-C reaches Python code, but not a blocked call into torch.

    Args:
        waiting: says ``about`` when a line is due.

    Raises:
        TimeoutError: ``waiting`` is over. Else what ``call`` raises.
    """
    results: list[T] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the waiting thread, which raises it
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()
    while not done.wait(waiting.until_next_line):
        if waiting.over:
            raise TimeoutError(about)
        waiting.about(about)
    if failures:
        raise failures[0]
    return results[0]


def _client(address: str, port: int, listen_fd: int | None = None) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    if environment.legacy_store_requested():
        raise BackendUnavailable(
            "the store must be torch's libuv one",
            why="USE_LIBUV=0 is set; the legacy store it asks for has no queues",
            next="unset USE_LIBUV",
        )
    peernames.ask_for_none()
    client = TCPStore(
        address,
        port,
        None,
        listen_fd is not None,
        CONNECT_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=listen_fd,
        use_libuv=True,
    )
    client.set_timeout(UNBOUNDED)
    return client


@contextmanager
def _torch_errors(address: str, port: int) -> Iterator[None]:
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        first_line = str(error).strip().splitlines()[0]
        raise StoreGone(address, port, f"the connection to it broke: {first_line}") from error
