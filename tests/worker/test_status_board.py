"""The board on which ranks note their steps."""

from __future__ import annotations

from nanocore.worker.executors.status_board import StatusBoard


def test_ranks_that_have_not_done_a_step_are_behind_it() -> None:
    fd = StatusBoard.create(3)
    engine, ranks = StatusBoard(fd, 3), [StatusBoard(fd, 3) for _ in range(3)]
    for rank, board in enumerate(ranks):
        board.begin(rank, 7)
    ranks[0].finish(0, 7)
    ranks[1].finish(1, 6)
    assert engine.behind(7) == [(1, 7), (2, 7)]
    assert engine.behind(6) == [(2, 7)]
    ranks[2].finish(2, 7)
    ranks[1].finish(1, 7)
    assert engine.behind(7) == []


def test_a_rank_that_has_not_begun_is_at_the_step_it_did_last() -> None:
    board = StatusBoard(StatusBoard.create(2), 2)
    board.begin(0, 4)
    board.finish(0, 4)
    board.begin(0, 5)
    board.begin(1, 4)
    board.finish(1, 4)
    assert board.behind(5) == [(0, 5), (1, 4)]
