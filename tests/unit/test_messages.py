"""The messages of the network, and those between an agent and its own worker."""

from __future__ import annotations

import inspect
import json
import math
import typing
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict

from ddp_manual import from_agent, from_worker, messages
from ddp_manual.program import SCRIPT, Program
from ddp_manual.ranks_and_runs import Beat, RunSoFar
from ddp_manual.wire import LineReader, Unreadable, as_json, encode_local, reader_of
from tests.runs import info, ready

SENDERS = (messages.FromStranger, messages.FromRank, messages.FromRank0)

LOCAL = {from_worker: from_worker.FromWorker, from_agent: from_agent.FromAgent}
PASSED_ON = {from_worker: messages.FromRank, from_agent: messages.FromRank0}


def messages_in(module: ModuleType) -> set[type[messages.Message]]:
    """Return the messages that a module defines."""
    defined = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    bases = (messages.Message, messages.Signed, messages.OfWorker)
    return {kind for kind in defined if issubclass(kind, messages.Message) and kind not in bases}


def test_every_message_belongs_to_one_sender_and_has_words_of_its_own() -> None:
    listed = [kind for kinds in SENDERS for kind in typing.get_args(kinds)]
    assert sorted(map(repr, listed)) == sorted(map(repr, messages_in(messages)))
    assert_has_words(listed)


@pytest.mark.parametrize("module", LOCAL, ids=lambda module: module.__name__)
def test_what_agent_and_worker_say_is_one_type_each_with_words_for_it(module: ModuleType) -> None:
    listed, own = typing.get_args(LOCAL[module]), messages_in(module)
    assert own <= {*listed} <= {*own, *typing.get_args(PASSED_ON[module])}
    assert len({kind.__struct_config__.tag for kind in listed}) == len(listed)
    assert_has_words(listed)


def assert_has_words(kinds: Iterable[type[messages.Message]]) -> None:
    """Check that each docstring says who sends the message when: ``messages.py`` is the only list of them."""
    says = [inspect.getdoc(kind) or "" for kind in kinds]
    assert len(set(says)) == len(says) and all(text.endswith(".") for text in says)


def test_a_greeting_may_say_more_and_other_messages_may_not() -> None:
    greeting = {"protocol": 9, "challenge": "", "host": "a", "pid": 1, "token": False, "later": 1}
    assert msgspec.convert({"type": "greeting", **greeting}, messages.Greeting).protocol == 9


RANK = info(0, "a", options={"lr": (0.1, f"from {'d' * 300}/config.json")})
SO_FAR = RunSoFar("r", None, 1, 1, 1.0, "a", 7, "10.0.0.1")
BEAT = Beat()


@pytest.mark.parametrize(
    ("usual", "wrong"),
    [
        (RANK, {"rank": -1}),
        (RANK, {"rank": 4}),
        (RANK, {"options": {"lr": 5}}),
        (RANK, {"answer_port": 70_000}),
        (RANK, {"since": 1e300}),
        (RANK, {"address": "no.address"}),
        (RANK, {"host": "a\nb"}),
        (RANK, {"host_id": "a" * 300}),
        (ready(), {"gpus": ["GPU\n1"]}),
        (ready(), {"store": {}}),
        (BEAT, {"place": "a\nb"}),
        (BEAT, {"step_seconds": 10**400}),
        (BEAT, {"samples_per_second": math.nan}),
        (BEAT, {"timeouts": {"": math.inf}}),
        (BEAT, {"calls": {"g": [1]}}),
        (BEAT, {"calls": {"g": [1, 2] * 1000}}),
        (SO_FAR, {"generation": -1}),
        (SO_FAR, {"held": ["a", 1]}),
    ],
)
def test_what_no_process_can_say_of_itself_is_refused(usual: msgspec.Struct, wrong: dict[str, object]) -> None:
    read = reader_of(type(usual))
    assert read(as_json(usual).decode()) == usual
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        read(json.dumps({**asdict(usual), **wrong}))


@pytest.mark.parametrize(
    "said",
    [
        from_worker.Attach(1, {"lr": 0.1}, {"lr": "from donn\udce9es"}, "\udcff/run", ["a\n"], None, "0.0"),
        from_worker.Result({"loss": math.nan, "largest": math.inf, "name": "\x1b[2J\udcff"}),
        from_worker.Doing(Beat(phase="training", step=7, collectives={"0": 7}), blocked=True),
        from_agent.Start(
            *({"rank": 0}, {}, "/\udcff", 1.5, None),
            program=Program(kind=SCRIPT, name="\udcff.py", arguments=("--name", "\udce9")),
            restarts=(1, 3),
        ),
    ],
    ids=lambda said: type(said).__name__,
)
def test_what_agent_and_worker_say_arrives_as_it_is(said: Any) -> None:
    """Names of files that are not Unicode, and numbers that JSON does not have, included."""
    reader = LineReader(from_agent.read if isinstance(said, from_agent.Start) else from_worker.read)
    assert list(map(repr, reader.feed(encode_local(said)))) == [repr(said)]


def test_a_text_of_another_class_arrives_as_text() -> None:
    class Version(str): ...

    said = from_worker.Result({"torch_version": Version("2.9")})
    assert from_worker.read(encode_local(said).decode()) == from_worker.Result({"torch_version": "2.9"})


@pytest.mark.parametrize(
    "line", ["[]", "{}", "beat", '{"beat":null}', '{"type":"born"}', '{"type":"born","pid":"1"}', '{"type":"stop"}']
)
def test_what_a_worker_does_not_say_is_no_message(line: str) -> None:
    with pytest.raises(Unreadable):
        list(LineReader(from_worker.read).feed(f"{line}\n".encode()))


KINDS = [
    kind for kinds in (*SENDERS, *LOCAL.values()) for kind in typing.get_args(kinds) if kind is not messages.Greeting
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_with_a_field_that_it_does_not_have_is_no_message(kind: type[messages.Message]) -> None:
    fields = {field.name: 0 for field in msgspec.structs.fields(kind)}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"type": kind.__struct_config__.tag, **fields, "another": 1}, kind)
