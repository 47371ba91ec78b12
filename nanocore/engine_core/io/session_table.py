"""The open sessions and their requests, by everything that they are looked up by.

Belongs to the io thread, through its front desk. Whoever reads the dictionaries finds them in
agreement; only the table's methods change them. A client's number and a request's handle are never
used again, so what still names a closed session or an ended request finds nothing.
"""

from __future__ import annotations

from nanocore.engine_core.io.session import Backlog, Session


class SessionTable:
    """by_peer: by routing id. by_client: by number. slow: those with a backlog, by number.

    request_ids: by handle, of all requests that have not ended; a session has its own by id.
    """

    def __init__(self) -> None:
        self.by_peer: dict[bytes, Session] = {}
        self.by_client: dict[int, Session] = {}
        self.slow: dict[int, Session] = {}
        self.request_ids: dict[int, str] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self.by_peer)

    def has(self, session: Session) -> bool:
        """Whether the session has not been closed."""
        return self.by_client.get(session.client) is session

    def open(self, routing_id: bytes, now_s: float) -> Session:
        """Open a session for a peer, which must have none; its client number is new."""
        self._num_opened += 1
        session = Session(routing_id, self._num_opened, now_s)
        self.by_peer[routing_id] = self.by_client[session.client] = session
        return session

    def close(self, session: Session) -> list[int]:
        """Forget an open session, its requests and its backlog; returns the requests' handles."""
        del self.by_peer[session.routing_id], self.by_client[session.client]
        self.slow.pop(session.client, None)
        handles = list(session.requests.values())
        for handle in handles:
            del self.request_ids[handle]
        session.requests = {}
        return handles

    def add_request(self, session: Session, request_id: str, handle: int) -> None:
        """Note an accepted request, so that it can be aborted by its id and named by its handle."""
        session.requests[request_id] = handle
        self.request_ids[handle] = request_id

    def end_request(self, session: Session, handle: int) -> None:
        """Forget a request, whose id can be used again; nothing if it has ended before."""
        request_id = self.request_ids.pop(handle, None)
        if request_id is not None:
            session.requests.pop(request_id)

    def hold_back(self, session: Session, now_s: float) -> Backlog:
        """The client is slow from here on: what is for it waits, and is merged, in a backlog."""
        session.backlog = Backlog(now_s)
        self.slow[session.client] = session
        return session.backlog

    def catch_up(self, session: Session) -> None:
        """The client is slow no more: nothing waits for it, and its backlog goes."""
        session.backlog = None
        del self.slow[session.client]
