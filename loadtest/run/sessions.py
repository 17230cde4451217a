"""The turns of sessions: when each may leave, and with what history. Pure bookkeeping: answers and times come in, turns
come out.

A turn that does not finish ends its session: there is no whole answer to go on from. Turns that therefore never leave
are counted in `not_sent`. Only sessions under way are kept.
"""

from collections import deque
from typing import NamedTuple

from penstock_loadtest.planned import Message, Planned


class Turn(NamedTuple):
    planned: Planned
    due_s: float
    history: tuple[Message, ...]
    """The messages before this turn, the system message first."""


class _Session:
    def __init__(self) -> None:
        self.history: tuple[Message, ...] = ()
        self.free_s: float | None = None  # end of the last answer; None: a turn is under way
        self.is_over = False
        self.parked: deque[Planned] = deque()


class Sessions:
    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self.not_sent = 0
        self.parked = 0

    def arrive(self, planned: Planned) -> Turn | None:
        """Take a request in the plan's order. Returns its turn if it may be sent at `due_s`, and None if it waits for
        the answer before it or is never sent."""
        if planned.session is None or (planned.turn == 0 and planned.is_last_turn):
            return Turn(planned, planned.at_s, ())
        session = self._sessions.get(planned.session)
        if session is None:  # its first turn, or the first that the plan has of it
            self._sessions[planned.session] = _Session()
            return Turn(planned, planned.at_s, ())
        if session.is_over:
            self.not_sent += 1
            if planned.is_last_turn:
                del self._sessions[planned.session]
            return None
        session.parked.append(planned)
        self.parked += 1
        return self._next(session)

    def finish_turn(self, planned: Planned, *, is_finished: bool, answer: str, end_s: float) -> Turn | None:
        """Conclude a turn. Returns the session's next one, if the plan has come to it."""
        session = self._sessions.get(planned.session) if planned.session is not None else None
        if session is None or planned.session is None:
            return None
        if planned.is_last_turn:
            del self._sessions[planned.session]
            return None
        if not is_finished:
            self._end(planned.session, session)
            return None
        session.history += _make_messages(planned, answer, is_first=not session.history)
        session.free_s = end_s
        return self._next(session)

    def drop(self, planned: Planned) -> None:
        """Give up a turn that was returned here, and those after it."""
        session = self._sessions.get(planned.session) if planned.session is not None else None
        if session is None or planned.session is None:
            return
        self.not_sent += 1
        if planned.is_last_turn:
            del self._sessions[planned.session]
        else:
            self._end(planned.session, session)

    def abandon(self, *, waiting: int) -> None:
        """Give up all turns: those parked here, and the `waiting` ones that were returned and have not left yet."""
        self.not_sent += self.parked + waiting
        self.parked = 0
        self._sessions.clear()

    def _next(self, session: _Session) -> Turn | None:
        if session.free_s is None or not session.parked:
            return None
        planned = session.parked.popleft()
        self.parked -= 1
        due_s = max(planned.at_s, session.free_s + planned.think_s)
        session.free_s = None
        return Turn(planned, due_s, session.history)

    def _end(self, name: str, session: _Session) -> None:
        self.not_sent += len(session.parked)
        self.parked -= len(session.parked)
        if any(planned.is_last_turn for planned in session.parked):
            del self._sessions[name]
        else:
            session.is_over = True
            session.parked.clear()
            session.history = ()


def _make_messages(planned: Planned, answer: str, *, is_first: bool) -> tuple[Message, ...]:
    """What a turn adds to the history; nothing to that of completions, whose prompts are whole."""
    if planned.endpoint != "chat" or not isinstance(planned.prompt, str):
        return ()
    system = (Message("system", planned.system),) if is_first and planned.system is not None else ()
    return (*system, Message("user", planned.prompt), Message("assistant", answer))
