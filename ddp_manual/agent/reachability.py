"""Whether hosts can connect to each other: tried while workers load torch, and when all ranks wait in a collective.

Each agent answers at a port of its own. The first rank of each host connects to the first ranks of the other hosts, and
rank 0 tells everybody which pairs failed, in which direction, and how the network responded. On one host there is
nothing to try.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from ddp_manual.agent.network_interface import family
from ddp_manual.protocol.reachability import CUT_OFF

# Seconds. Failing pairs have to be known within 10 s of the roll call.
CONNECT_TIMEOUT = 3.0
# Seconds for one connection that is answered, and how many connections are answered at once: at most 31 hosts connect;
# if other programs connect too, the oldest connection is aborted.
ANSWER_WITHIN = 6.0
MOST_CONNECTED = 32
# More than one packet, in each direction: a network that drops large packets still lets small ones connect.
GREETING_BYTES = 16_384


async def answer_at(address: str) -> asyncio.Server:
    """Return a server that answers at a free port of this IP address, until it is closed."""
    connected: dict[asyncio.StreamWriter, None] = {}  # in the order in which they came

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connected) >= MOST_CONNECTED:
            first = next(iter(connected))
            del connected[first]
            first.transport.abort()
        connected[writer] = None
        writer.write(greeting(writer.get_extra_info("sockname")[1]))
        try:
            await asyncio.wait_for(reader.readexactly(GREETING_BYTES), ANSWER_WITHIN)
            writer.close()
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError):
            writer.transport.abort()
        finally:
            connected.pop(writer, None)

    return await asyncio.start_server(answer, address, 0, limit=GREETING_BYTES, backlog=MOST_CONNECTED)


def greeting(port: int) -> bytes:
    """Return the bytes that both sides send; they tell an agent from any other program that listens there."""
    return f"ddp_manual {port}\n".encode().ljust(GREETING_BYTES, b".")


async def try_to_reach(address: str, port: int) -> str | None:
    """Return None if an agent answers there, otherwise how the network responded."""
    expected = greeting(port)
    received, connected = b"", False
    loop = asyncio.get_running_loop()
    try:
        connection = socket.socket(family(address))
    except OSError as error:  # this process has too many open files
        return str(error.strerror)
    connection.setblocking(False)
    try:
        await asyncio.wait_for(loop.sock_connect(connection, (address, port)), CONNECT_TIMEOUT)
        connected = True
        await asyncio.wait_for(loop.sock_sendall(connection, expected), CONNECT_TIMEOUT)
        while len(received) < len(expected):
            # Not with a StreamReader, which drops the bytes that came before a reset.
            piece = await asyncio.wait_for(loop.sock_recv(connection, 65536), CONNECT_TIMEOUT)
            if not piece:
                break
            received += piece
    except ConnectionRefusedError:
        return "connection refused"
    except (TimeoutError, asyncio.TimeoutError):
        if connected:
            return f"{CUT_OFF} {len(received)} of {len(expected)} bytes came through: large packets are lost"
        return f"no answer within {CONNECT_TIMEOUT:.0f} s: dropped"
    except OSError as error:
        if not received:
            return os.strerror(error.errno) if error.errno else str(error)
    finally:
        connection.close()
    return None if received == expected else "something else answers there"


async def try_all(wanted: Sequence[tuple[int, str, int]]) -> list[tuple[int, str]]:
    """Try hosts, each (number, address, port); return the number of each that cannot be reached, and how it failed."""
    outcomes = await asyncio.gather(*(try_to_reach(address, port) for _, address, port in wanted))
    return [(number, outcome) for (number, _, _), outcome in zip(wanted, outcomes, strict=True) if outcome]
