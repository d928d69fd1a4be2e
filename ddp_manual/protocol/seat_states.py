"""The seat of each rank: who is awaited, who is here, who works, and who is left out."""

from __future__ import annotations

from enum import Enum


class Seat(Enum):
    """The state of a rank's seat: the others wait for a process that takes an empty seat, and while it loads torch.

    The last four are left out: the others go on without that rank, until a process that has come to its seat is ready.
    """

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    WORKING = "working"
    LEFT_OUT = "left out"
    LEFT_OUT_TO_STOP = "left out as long as a rank is about to stop the run"
    LOADING_TO_RETURN = "left out, loading"
    READY_TO_RETURN = "left out, ready"


LEFT_OUT = {Seat.LEFT_OUT, Seat.LEFT_OUT_TO_STOP, Seat.LOADING_TO_RETURN, Seat.READY_TO_RETURN}
# Seat -> next seat when a process has come (TAKEN), has loaded torch (LOADED), loads it anew, or is gone (GIVEN_UP).
TAKEN = {
    Seat.EMPTY: Seat.LOADING,
    Seat.LEFT_OUT: Seat.LOADING_TO_RETURN,
    Seat.LEFT_OUT_TO_STOP: Seat.LOADING_TO_RETURN,
}
LOADED = {Seat.LOADING: Seat.READY, Seat.LOADING_TO_RETURN: Seat.READY_TO_RETURN}
BEGUN_ANEW = {Seat.READY: Seat.LOADING, Seat.WORKING: Seat.LOADING, Seat.READY_TO_RETURN: Seat.LOADING_TO_RETURN}
GIVEN_UP = {Seat.LOADING_TO_RETURN: Seat.LEFT_OUT, Seat.READY_TO_RETURN: Seat.LEFT_OUT}
