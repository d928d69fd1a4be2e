"""The messages of the network: the list in docs/how-ranks-meet.md is the one in ``messages.py``."""

from __future__ import annotations

import inspect
import typing

import msgspec
import pytest

from ddp_manual import messages
from ddp_manual.wire import as_json, reader_of
from tests.conftest import REPOSITORY

SENDERS = {
    "a process that is no rank yet": messages.FromStranger,
    "the agent of a rank": messages.FromRank,
    "the coordinator": messages.FromRank0,
}


def table() -> str:
    """Return the lines of the table in the document."""
    rows = ["| message | from | says |", "|---|---|---|"]
    for sender, kinds in SENDERS.items():
        for kind in typing.get_args(kinds):
            says = " ".join(inspect.getdoc(kind).split()).replace("``", "`")  # type: ignore[union-attr]
            rows.append(f"| `{kind.__struct_config__.tag}` | {sender} | {says} |")
    return "\n".join(rows)


def test_the_document_lists_all_messages_in_the_words_of_their_docstrings() -> None:
    assert table() in (REPOSITORY / "docs" / "how-ranks-meet.md").read_text(encoding="utf-8"), table()


def test_every_message_belongs_to_one_sender() -> None:
    listed = [kind for kinds in SENDERS.values() for kind in typing.get_args(kinds)]
    bases = (messages.Message, messages.Signed, messages.OfWorker)
    defined = [kind for kind in vars(messages).values() if inspect.isclass(kind) and issubclass(kind, messages.Message)]
    assert sorted(map(repr, listed)) == sorted(repr(kind) for kind in defined if kind not in bases)


def test_an_option_may_come_from_a_file_with_any_name() -> None:
    source = f"from {'d' * 300}/donn\udce9es\n/config.json"
    info = messages.RankInfo(rank=0, world_size=1, host="a", pid=1, options={"lr": (0.1, source)})
    assert reader_of(messages.RankInfo)(as_json(info).decode()).options["lr"][1].startswith("from ddd")


def test_a_rank_may_wait_for_longer_than_anybody_lives() -> None:
    news = messages.News(1, timeout=1e18)
    assert messages.read_from_rank_0(as_json(news).decode()) == news


def test_a_greeting_may_say_more_and_other_messages_may_not() -> None:
    greeting = {"protocol": 9, "challenge": "", "host": "a", "pid": 1, "token": False, "later": 1}
    assert msgspec.convert({"type": "greeting", **greeting}, messages.Greeting).protocol == 9


KINDS = [kind for kinds in SENDERS.values() for kind in typing.get_args(kinds) if kind is not messages.Greeting]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_with_a_field_that_it_does_not_have_is_no_message(kind: type[messages.Message]) -> None:
    fields = {field.name: 0 for field in msgspec.structs.fields(kind)}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"type": kind.__struct_config__.tag, **fields, "another": 1}, kind)
