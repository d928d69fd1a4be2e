"""The proof of the token, once per connection and side (HMAC-SHA256, RFC 2104).

The agent signs its hello over the challenge in the coordinator's greeting, the coordinator signs its reply over a nonce
in the hello. A recorded message fits no other connection. The token itself never leaves the process.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, TypeVar

import msgspec

from ddp_manual.errors import DdpManualError
from ddp_manual.messages import Refused, Signed
from ddp_manual.ranks_and_runs import LastWords
from ddp_manual.wire import Read, as_json, reader_of

S = TypeVar("S", bound=Signed)
T = TypeVar("T")


class Unsealed(Exception):
    """A message is not signed with this run's token, or was signed for another purpose."""


class Seal:
    """Signs and checks messages with the run's token.

    Args:
        token: None for a run without one; messages then travel as they are.
    """

    def __init__(self, token: bytes | None) -> None:
        self._token = token

    def __bool__(self) -> bool:
        return self._token is not None

    def close(self, kind: type[S], nonce: str, content: Any) -> S:
        """Return the message to send; ``open`` needs the same kind and nonce."""
        raw = as_json(content)
        return kind(content=msgspec.Raw(raw), signature=self._sign(kind, nonce, raw) if self else "")

    def open(self, message: Signed, nonce: str, read: Read[T]) -> T:
        """Return the content.

        Raises:
            Unsealed: it is not signed with this run's token for this purpose, or is signed and the run has no token.
            msgspec.MsgspecError: ``read`` cannot read it.
        """
        raw = bytes(message.content)
        if not self and message.signature:
            raise Unsealed("it is signed with a token, and this process has none")
        if self and not message.signature:
            raise Unsealed("it is not signed with a token")
        expected = self._sign(type(message), nonce, raw) if self else ""
        if not hmac.compare_digest(message.signature.encode(), expected.encode()):
            raise Unsealed("it is signed with another token, or was recorded elsewhere")
        return read(raw.decode())

    def refusal(self, message: Refused, nonce: str) -> DdpManualError:
        """Return the error with which the coordinator refuses this process. Raises as ``open`` does."""
        return self.open(message, nonce, _read_words).error()

    def _sign(self, kind: type[Signed], nonce: str, content: bytes) -> str:
        assert self._token is not None
        purpose = f"{kind.__name__} {nonce}\n".encode()
        return hmac.new(self._token, purpose + content, hashlib.sha256).hexdigest()


_read_words: Read[LastWords] = reader_of(LastWords)
_read_anything: Read[dict[str, Any]] = reader_of(dict[str, Any])


def claimed(message: Signed) -> dict[str, Any]:
    """Return what a message says without checking its signature: a refused stranger is named as it names itself."""
    try:
        return _read_anything(bytes(message.content).decode())
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
