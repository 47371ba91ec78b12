"""Resume: a request that has changed its engine, as its caller is told of it."""

from __future__ import annotations

import msgspec


class Resume(msgspec.Struct, gc=False):
    """Times are seconds of the client's monotonic clock.

    num_output_tokens: had come before, of all samples. is_exact: there were none, or both engines
    have promised the same bits (`ModelCard.numerics_fingerprint`), so what follows is what would
    have come undisturbed; if not, it is what this engine makes of the tokens so far.
    engine_instance: the new engine. lost_s: when the loss was noticed; reached_s: when an engine
    was there again; next_s: when the next token or the end came, None until then.
    """

    num_output_tokens: int
    is_exact: bool
    engine_instance: str
    lost_s: float
    reached_s: float
    next_s: float | None = None

    @property
    def gap_s(self) -> float | None:
        """From the loss to the next token."""
        return None if self.next_s is None else self.next_s - self.lost_s
