from __future__ import annotations

import pytest

from ddp_manual.rendezvous.seal import Seal, Unsealed, claimed

REQUEST = {"rank": 1, "host": "b", "nonce": "00"}


def test_a_sealed_message_is_opened_by_the_same_token_for_the_same_purpose() -> None:
    sealed = Seal(b"token").close("run-1 request", REQUEST)
    assert Seal(b"token").open("run-1 request", sealed) == REQUEST
    assert claimed(sealed) == REQUEST


@pytest.mark.parametrize(
    ("token", "purpose", "reason"),
    [
        (b"other", "run-1 request", "another token, or was recorded elsewhere"),
        (b"token", "run-2 request", "another token, or was recorded elsewhere"),
        (b"token", "run-1 news 2", "another token, or was recorded elsewhere"),
        (None, "run-1 request", "this process has none"),
    ],
)
def test_it_is_opened_by_no_other_token_and_for_no_other_purpose(
    token: bytes | None, purpose: str, reason: str
) -> None:
    sealed = Seal(b"token").close("run-1 request", REQUEST)
    with pytest.raises(Unsealed, match=reason):
        Seal(token).open(purpose, sealed)


def test_an_altered_message_is_not_opened() -> None:
    sealed = dict(Seal(b"token").close("request", REQUEST))
    sealed["sealed"] = sealed["sealed"].replace('"rank": 1', '"rank": 2')
    with pytest.raises(Unsealed):
        Seal(b"token").open("request", sealed)


@pytest.mark.parametrize("message", [REQUEST, {"sealed": 5, "signature": "x"}, {"sealed": "{}"}])
def test_with_a_token_a_message_without_a_signature_is_not_opened(message: dict[str, object]) -> None:
    with pytest.raises(Unsealed, match="not signed with a token"):
        Seal(b"token").open("request", message)


def test_without_a_token_messages_travel_as_they_are() -> None:
    assert Seal(None).close("request", REQUEST) is REQUEST
    assert Seal(None).open("request", REQUEST) is REQUEST


def test_the_token_is_in_no_message() -> None:
    assert "token" not in str(Seal(b"token").close("request", {"rank": 1}))
