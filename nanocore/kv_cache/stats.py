"""Prefix-cache statistics: totals since the start, and the hit rate of recent requests."""

from __future__ import annotations

from collections import Counter, deque

WINDOW_REQUESTS = 1000


class PrefixCacheStats:
    """Tokens looked up and found: totals, and the hit rate of recent requests.

    First admissions only: to find one's own blocks again says nothing of the workload.

    lost_tokens: by group, tokens that the primary group had and this one had let go of.
    """

    def __init__(self, window_requests: int = WINDOW_REQUESTS) -> None:
        self.queries = 0
        self.hits = 0
        self.lost_tokens: Counter[str] = Counter()
        self._window: deque[tuple[int, int]] = deque(maxlen=window_requests)

    def record(
        self, num_queries: int, num_hits: int, num_lost: int = 0, lost_group: str = ""
    ) -> None:
        """Count a request's first admission. num_lost: tokens not found because of this group."""
        if num_lost:
            self.lost_tokens[lost_group] += num_lost
        self.queries += num_queries
        self.hits += num_hits
        self._window.append((num_queries, num_hits))

    @property
    def hit_rate(self) -> float:
        """Share of tokens found, 0 to 1, over the most recent requests."""
        recent = list(self._window)  # at once: the io thread asks while the step loop counts
        num_queries = sum(queries for queries, _ in recent)
        return sum(hits for _, hits in recent) / num_queries if num_queries else 0.0
