"""What the contents of messages are made of: structs that are checked as they are read, and bounds for their fields."""

from __future__ import annotations

import functools
import ipaddress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ddp_manual.wire import LONGEST_NAME

# Cached because the ranks of a host share an address, and every rank looks at rank 0's.
ip_address = functools.lru_cache(maxsize=4096)(ipaddress.ip_address)

# A number of seconds or samples; JSON brings numbers of any size.
_LARGEST = 1e15
_ONE_LINE = r"\A[^\n]*\Z"  # all other characters that cannot be shown are escaped when a message is read

Name = Annotated[str, Meta(max_length=LONGEST_NAME, pattern=_ONE_LINE)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=_LARGEST)]
TimeOut = Annotated[float, Meta(gt=0, le=_LARGEST)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]
Option = tuple[Any, str]
"""The value of an option that ranks must agree on, and where it comes from, such as a file."""
Moment = tuple[Count, Count]
"""The generation and the step of a state that is held: see ``held_memory``."""


class Checked(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a message tells of something. Fields that are missing, unknown, of the wrong type or out of bounds are an
    error (``msgspec.ValidationError``) when it is read."""
