"""Rank 0's address under torchrun: the value of a key in the TCPStore that torchrun's own agent has at MASTER_PORT.

This module sends the few messages that it needs, as torch/csrc/distributed/c10d/TCPStoreBackend.hpp of torch 2.11 to
2.15 defines them, so that the agent need not load torch.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ddp_manual.agent.wait_for_rank_0 import VALIDATE
from ddp_manual.deadline import POLL_EVERY, Waiting
from ddp_manual.environment import user_variables
from ddp_manual.errors import (
    BadOption,
    MasterLost,
    RankMissing,
)
from ddp_manual.rank_options import WorldSpec
from ddp_manual.wire import LONGEST_LINE, decode

# Codes of TCPStore's messages, and of its reply that a key is there; REPLY_TIMEOUT: seconds for a reply.
_SET, _GET, _CHECK, _READY = b"\x01", b"\x03", b"\x05", b"\0"
REPLY_TIMEOUT = 5.0


async def write_torchrun_address(spec: WorldSpec, attempt: str, address: str, port: int) -> None:
    """Write into torchrun's store where rank 0's agent listens; called on rank 0.

    Args:
        attempt: part of the key, different each time that the ranks of this torchrun join.
    """
    async with _connected(spec) as (reader, writer):
        writer.write(_SET + _key(attempt) + _text(json.dumps([address, port]).encode()))
        await _get(reader, writer, attempt)  # the reply shows that the store has it


async def read_torchrun_address(spec: WorldSpec, attempt: str, waiting: Waiting) -> tuple[str, int]:
    """Return where rank 0's agent listens, once rank 0 has written that; called on the other ranks.

    Raises:
        RankMissing: rank 0 has not written it when the time is up. MasterLost: the store is gone.
    """
    where = f"torchrun's store at {spec.master_addr}:{spec.master_port}"
    async with _connected(spec) as (reader, writer):
        while (found := await _get(reader, writer, attempt)) is None:
            missing = RankMissing(
                f"rank 0 did not join within {waiting.waited:.0f} s",
                why=f"{where} answers, without rank 0's address",
                next="look at what rank 0 says, then start torchrun again",
            )
            waiting.wait_on(f"rank 0 has not said yet in {where} where it is", missing)
            await asyncio.sleep(POLL_EVERY)
    address, port = decode(found.decode())
    return str(address), int(port)


@asynccontextmanager
async def _connected(spec: WorldSpec) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    where = f"{spec.master_addr}:{spec.master_port}"
    try:
        opening = asyncio.open_connection(spec.master_addr, spec.master_port)
        reader, writer = await asyncio.wait_for(opening, REPLY_TIMEOUT)
    except (OSError, TimeoutError, asyncio.TimeoutError):
        # torchrun's agent listens before it starts any rank: if nothing listens, there is no torchrun.
        variables = user_variables.listed("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")
        raise BadOption(
            f"variables of another launcher say that its agent hosts the store at {where}, but nothing listens there",
            why="; ".join([variables, *(spec.named(name) for name in ("world_size", "rank"))]),
            next="unset TORCHELASTIC_USE_AGENT_STORE RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT\n"
            "then start every rank again, with flags",
        ) from None
    writer.write(VALIDATE)
    try:
        yield reader, writer
    except (OSError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
        raise MasterLost(
            f"torchrun's store at {where} is gone",
            why=f"asking it for rank 0's address gave: {error or type(error).__name__}",
            next="look at what torchrun says, then start it again",
        ) from None
    finally:
        writer.close()


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attempt: str) -> bytes | None:
    """Return the value of the key, or None while nobody has set it."""

    async def read(count: int) -> bytes:
        return await asyncio.wait_for(reader.readexactly(count), REPLY_TIMEOUT)

    writer.write(_CHECK + struct.pack("<Q", 1) + _key(attempt))
    if await read(1) != _READY:
        return None
    writer.write(_GET + _key(attempt))
    (length,) = struct.unpack("<Q", await read(8))
    return await read(min(length, LONGEST_LINE))


def _key(attempt: str) -> bytes:
    """Return the key for an attempt; torch's own clients put a slash before every key."""
    return _text(f"/ddp_manual/{attempt}/coordinator".encode())


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content
