"""The open sessions and their requests, by everything that they are looked up by.

Belongs to the io thread, through its front desk. Whoever reads the dictionaries finds them in
agreement; only the table's methods change them. A client's number and a request's handle are never
used again, so what still names a closed session or an ended request finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanocore.engine_core.io.session import Backlog, Session


class SessionTable:
    """by_peer: by routing id. by_client: by number. slow: those with a backlog, by number.

    request_ids: by handle, of all samples that have not ended; a session has its own by id.
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
        """Forget an open session, its requests and its backlog; returns the samples' handles."""
        del self.by_peer[session.routing_id], self.by_client[session.client]
        self.slow.pop(session.client, None)
        handles = [handle for own in session.requests.values() for handle in own]
        for handle in handles:
            del self.request_ids[handle]
        session.requests = {}
        return handles

    def add_request(self, session: Session, request_id: str, handles: Sequence[int]) -> None:
        """Note an accepted request, so that it can be aborted by its id and named by its handles.

        handles: of its samples.
        """
        session.requests[request_id] = [*handles]
        self.request_ids.update(dict.fromkeys(handles, request_id))

    def owns(self, session: Session, handle: int) -> bool:
        """Whether this is a sample of the session, and has not ended."""
        request_id = self.request_ids.get(handle)
        return request_id is not None and handle in session.requests.get(request_id, ())

    def end_request(self, session: Session, handle: int) -> None:
        """Forget a sample, if it has not ended before; with its last one a request's id is free."""
        request_id = self.request_ids.pop(handle, None)
        if request_id is not None:
            session.requests[request_id].remove(handle)
            if not session.requests[request_id]:
                del session.requests[request_id]

    def hold_back(self, session: Session, now_s: float) -> Backlog:
        """The client is slow from here on: what is for it waits, and is merged, in a backlog."""
        session.backlog = Backlog(session.client, now_s)
        self.slow[session.client] = session
        return session.backlog

    def catch_up(self, session: Session) -> None:
        """The client is slow no more: nothing waits for it, and its backlog goes."""
        session.backlog = None
        del self.slow[session.client]
