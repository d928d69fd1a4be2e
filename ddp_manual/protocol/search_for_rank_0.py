"""The search for rank 0: what answers in its place, what is said while a rank waits, and the error at its deadline."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ddp_manual.errors import DdpManualError, MasterLost, MasterNotAStore, MasterRefused, MasterUnreachable
from ddp_manual.protocol.reachability import compare_mtu
from ddp_manual.rank_options import WorldSpec
from ddp_manual.text_wrapping import whole
from ddp_manual.wording import at

PROXY = "a proxy or a port forward whose other side is not up"


class Answer(Enum):
    """What came back from an address and port. Of several addresses, the one whose answer is last here decides."""

    GREETED = "rank 0's agent answers"
    SILENT = "no answer: the packets are dropped, or there is no route"
    BUSY = "rank 0's agent is there, and takes long to answer"
    CLOSED = "something accepts connections there and closes them"
    REFUSED = "nothing listens"
    MUTE = "something accepts connections there but says nothing"
    STORE = "a TCPStore of torch answers"
    STRANGER = "something else answers"


NOT_RANK_0 = (Answer.MUTE, Answer.STORE, Answer.STRANGER)


@dataclass(frozen=True)
class Seen:
    """What answered at ``address``; ``detail`` has its first bytes or the operating system's words."""

    address: str
    answer: Answer
    detail: str = ""


class Finding(NamedTuple):
    """Why a rank still waits, in a line, and the error that ends it when its time is up."""

    line: str
    error: DdpManualError


class Search(NamedTuple):
    """Who looks for rank 0, and where."""

    spec: WorldSpec
    who: str
    """Such as ``rank 1``."""
    host: str
    rank_0_command: str
    """The command that starts rank 0, as a line of its own."""
    patient: bool = False
    """Whether rank 0 was there, and may have been stopped: then something else may answer until the deadline."""
    hint: Callable[[], str] = str
    """Says where else a rank 0 waits, if any does."""

    @property
    def where(self) -> str:
        return at(self.spec.master_addr, self.spec.master_port)

    def advice(self, seen: Seen) -> list[str]:
        """Return what to type, and what may be wrong instead."""
        here = "; if it is on another host, give its address: --master_addr" if is_loopback(seen.address) else ""
        firewall = f"open TCP port {self.spec.master_port} there, which a firewall may close"
        elsewhere = f"(if it runs: {self.where} may not be its address{here}; or {firewall})"
        return [self.rank_0_command] if self.patient else [self.rank_0_command, elsewhere]

    def judge(self, all_seen: Sequence[Seen], waited: float, elsewhere: str = "") -> tuple[Seen, Finding]:
        """Return the answer that decides, of all that came in place of a greeting of rank 0's agent, and what it means.

        Args:
            waited: seconds so far.
            elsewhere: what ``hint`` has said.
        """
        seen = max(all_seen, key=lambda one: list(Answer).index(one.answer))
        if seen.answer in NOT_RANK_0:
            error = self._not_rank_0(seen)
            finding = Finding(f"{error.what}: {seen.answer.value}", error)
        else:
            finding = self._no_rank_0(seen, all_seen, f" for {waited:.0f} s" if waited >= 1 else "")
        if elsewhere:
            finding.error.next = f"{elsewhere}\notherwise:\n{finding.error.next}"
            finding = Finding(f"{finding.line} ({elsewhere})", finding.error)
        return seen, finding

    def _no_rank_0(self, seen: Seen, all_seen: Sequence[Seen], waited: str) -> Finding:
        """Return what the answers mean if none of them shows that another program is there; ``seen`` decides."""
        addresses, name, port = [one.address for one in all_seen], self.spec.master_addr, self.spec.master_port
        where = self.where if addresses == [name] else f"{self.where} ({name} is {', '.join(addresses)})"
        if all(map(is_loopback, addresses)):
            where += f", which is {self.host} itself"
        tried = "; ".join(
            f"{at(one.address, port)}: {one.answer.value}{f' ({one.detail})' if one.detail else ''}" for one in all_seen
        )
        why = f"{self.who} on {self.host} tried {tried}"
        if seen.answer is Answer.REFUSED:
            if self.spec.source("master_addr") == "default":
                why += "\nno --master_addr was given: this is the default, for rank 0 on the same host"
            refused = MasterRefused(
                f"nothing {f'has listened{waited}' if waited else 'listens'} at rank 0's address {where}",
                why=why,
                next=f"{self.rank_0_command}\n"
                "then try again; if rank 0 runs, compare this with its line 'listening at'",
            )
            return Finding(f"nothing listens at {where}: is rank 0 started?", refused)
        if seen.answer is Answer.CLOSED:
            closed = MasterRefused(
                f"what listens at rank 0's address {where} has closed every connection{waited}",
                why=f"{why}\nthat is {PROXY}, or a program that takes no connections from this host",
                next=f"{self.rank_0_command}\nor see what listens there, on its host:\n{whole(listeners(port))}",
            )
            return Finding(f"{where} accepts connections and closes them: {PROXY}; is rank 0 started?", closed)
        if seen.answer is Answer.BUSY:
            is_there = f"rank 0's agent at {self.where} is there, and"
            busy = MasterLost(
                f"rank 0's agent at {where} is there, and does not greet this process",
                why=f"{why}; its host is overloaded",
                next=f"look at the load of rank 0's host ({name}), then try again",
            )
            return Finding(f"{is_there} takes long to answer: its host is busy", busy)
        unreachable = MasterUnreachable(
            f"no answer{waited} from rank 0's address {where}",
            why=why,
            next="check that --master_addr is the address of rank 0's host\n"
            f"or open TCP port {port} there, or check the route: ping {name}",
        )
        return Finding(f"no answer from {where}: dropped, or no route ({seen.detail})", unreachable)

    def _not_rank_0(self, seen: Seen) -> MasterNotAStore:
        if seen.answer is Answer.STORE:
            return MasterNotAStore(
                f"the store at {self.where} has no roll call",
                why="a TCPStore of torch answers there, but no rank 0 of this program",
                next="start rank 0 with this program, or choose another --master_port",
            )
        what, detail, next = "is not rank 0", f": {seen.detail}", "check"
        if seen.answer is Answer.MUTE:
            what, detail = "does not answer", ": a stopped rank 0 (Ctrl-Z), or another program"
            next = "if rank 0 was stopped: fg in its terminal, or kill -CONT with its pid; otherwise check"
        return MasterNotAStore(
            f"what listens at {self.where} {what}",
            why=f"asked at {seen.address}, {seen.answer.value}{detail}",
            next=f"{next} --master_addr and --master_port against rank 0's, or see what it is on "
            f"{self.spec.master_addr}:\n{whole(listeners(self.spec.master_port))}",
        )

    def unanswered(self, where: str, unacknowledged: int, waited: float) -> Finding:
        """Return what it means that rank 0, which may have been stopped after its greeting, does not answer a hello.

        Args:
            where: the address and port at which it has greeted.
            unacknowledged: bytes that its host has not confirmed.
        """
        greeted = f"rank 0 at {where} has greeted this rank, and"
        if unacknowledged:
            lost = MasterUnreachable(
                f"{greeted} what this rank sends does not arrive, for {waited:.0f} s",
                why=f"its host has not confirmed {unacknowledged} bytes, while small packets do arrive: "
                "large packets are lost on the way, or the host has gone meanwhile",
                next=compare_mtu(self.spec.master_addr),
            )
            return Finding(f"{greeted} what this rank sends does not arrive: large packets are lost", lost)
        frozen = MasterLost(
            f"{greeted} has not answered it for {waited:.0f} s",
            why="its process is stopped or frozen, its host is down, or the network is cut",
            next=f"look at rank 0; to start it again:\n{self.rank_0_command}",
        )
        return Finding(f"{greeted} does not answer it", frozen)

    def run_is_over(self, where: str, waited: float) -> Finding:
        """Return what it means that the run there ends, and that the next one has not begun."""
        over = MasterLost(
            f"the run at {where} has ended, and no other has begun",
            why=f"this rank came when it was over, and has waited {waited:.0f} s for the next run",
            next=self.rank_0_command,
        )
        return Finding(f"the run at {where} is ending; waiting for the next run", over)


def listeners(port: int) -> str:
    """Return the command that shows what listens at a port."""
    return f"ss -ltnp 'sport = :{port}'"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback
