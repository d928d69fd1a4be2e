"""Rank 0's address under torchrun, whose own agent has a TCPStore at MASTER_PORT: one key in that store.

A client of the three messages this takes, as torch/csrc/distributed/c10d/TCPStoreBackend.hpp of torch 2.11 to 2.15
defines them, so that no torch has to be loaded.
"""

from __future__ import annotations

import asyncio
import json
import struct

from ddp_manual import launchers
from ddp_manual.errors import BadOption, MasterLost, RankMissing
from ddp_manual.terminal import POLL_EVERY, Waiting
from ddp_manual.world_spec import WorldSpec

_VALIDATE = bytes.fromhex("00cef7853c")
_SET, _GET, _CHECK = b"\x01", b"\x03", b"\x05"
_READY = b"\0"
# Seconds.
ANSWER_TIMEOUT = 5.0


class _Key:
    """Rank 0's address, as a client of the TCPStore that has it.

    Args:
        attempt: differs for each time that the ranks of this torchrun meet.
    """

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], where: str, attempt: str) -> None:
        (self._reader, self._writer), self._where = streams, where
        # torch's own clients put a slash before every key.
        self._key = _text(f"/ddp_manual/{attempt}/coordinator".encode())
        self._writer.write(_VALIDATE)

    def set(self, value: bytes) -> None:
        self._writer.write(_SET + self._key + _text(value))

    async def get(self) -> bytes | None:
        """None: nobody has set it yet.

        Raises:
            MasterLost: the store is gone.
        """
        try:
            self._writer.write(_CHECK + struct.pack("<Q", 1) + self._key)
            if await self._read(1) != _READY:
                return None
            self._writer.write(_GET + self._key)
            (length,) = struct.unpack("<Q", await self._read(8))
            return await self._read(length)
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
            raise MasterLost(
                f"torchrun's store at {self._where} is gone",
                why=f"asking it for rank 0's address gave: {error or type(error).__name__}",
                next="look at what torchrun says, then start it again",
            ) from None

    async def _read(self, count: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(count), ANSWER_TIMEOUT)

    def close(self) -> None:
        self._writer.close()


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


async def _connect(spec: WorldSpec, attempt: str) -> _Key:
    where = f"{spec.master_addr}:{spec.master_port}"
    try:
        opening = asyncio.open_connection(spec.master_addr, spec.master_port)
        return _Key(await asyncio.wait_for(opening, ANSWER_TIMEOUT), where, attempt)
    except (OSError, TimeoutError, asyncio.TimeoutError):
        # torchrun's agent listens before it starts any rank, so one that does not is not there.
        raise BadOption(
            f"variables of another launcher say that its agent hosts the store at {where}, but nothing listens there",
            why="; ".join([launchers.agent_variables(), *(spec.named(name) for name in ("world_size", "rank"))]),
            next="unset TORCHELASTIC_USE_AGENT_STORE RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT\n"
            "then start every rank again, with flags",
        ) from None


async def tell_address(spec: WorldSpec, attempt: str, address: str, port: int) -> None:
    """As rank 0: where its agent listens."""
    key = await _connect(spec, attempt)
    key.set(json.dumps([address, port]).encode())
    await key.get()  # the answer says that it is there
    key.close()


async def ask_address(spec: WorldSpec, attempt: str, waiting: Waiting) -> tuple[str, int]:
    """As another rank: where rank 0's agent listens.

    Raises:
        RankMissing: rank 0 has not said so when the time is up.
    """
    where = f"torchrun's store at {spec.master_addr}:{spec.master_port}"
    key = await _connect(spec, attempt)
    try:
        while (found := await key.get()) is None:
            waiting.about(f"rank 0 has not said yet in {where} where it is")
            if waiting.over:
                raise RankMissing(
                    f"rank 0 did not join within {waiting.waited:.0f} s",
                    why=f"{where} answers, without rank 0's address",
                    next="look at what rank 0 says, then start torchrun again",
                )
            await asyncio.sleep(POLL_EVERY)
    finally:
        key.close()
    address, port = json.loads(found)
    return str(address), int(port)
