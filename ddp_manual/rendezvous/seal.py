"""With a token, every message of the roll call is signed, in both directions; without one, it is not.

A message is bound to its purpose: what it is (a request, a verdict, ...), the run, and a nonce that the reader drew. A
recorded one therefore fits no other run, no other process and no other place in the same run. The token itself never
leaves the process.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any


class Unsealed(Exception):
    """A message that is not signed with this run's token, or that was signed for something else."""


class Seal:
    """Signs and checks messages with the run's token (HMAC-SHA256, RFC 2104).

    Args:
        token: None for a run without one; messages then travel as they are.
    """

    def __init__(self, token: bytes | None) -> None:
        self._token = token

    def __bool__(self) -> bool:
        return self._token is not None

    def close(self, purpose: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message to send; ``purpose`` must be told to ``open`` in the same words."""
        if self._token is None:
            return content
        text = json.dumps(content)
        return {"sealed": text, "signature": self._sign(purpose, text)}

    def open(self, purpose: str, message: Mapping[str, Any]) -> Any:
        """What was sent.

        Raises:
            Unsealed: there is a token, and the message is not signed with it for this purpose.
        """
        if self._token is None:
            if "sealed" in message:
                raise Unsealed("it is signed with a token, and this process has none")
            return message
        text, signature = message.get("sealed"), message.get("signature")
        if not isinstance(text, str) or not isinstance(signature, str):
            raise Unsealed("it is not signed with a token")
        if not hmac.compare_digest(signature.encode(), self._sign(purpose, text).encode()):
            raise Unsealed("it is signed with another token, or was recorded elsewhere")
        return json.loads(text)

    def _sign(self, purpose: str, text: str) -> str:
        assert self._token is not None
        return hmac.new(self._token, json.dumps([purpose, text]).encode(), hashlib.sha256).hexdigest()


def claimed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a message says, whether or not it may be believed: to name a stranger by what it calls itself."""
    text = message.get("sealed")
    found = json.loads(text) if isinstance(text, str) else message
    return found if isinstance(found, dict) else {}
