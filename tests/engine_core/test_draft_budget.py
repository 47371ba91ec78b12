"""How many drafts a step computes, as chances of drafts and times of steps are learned."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.drafting.proposer import Proposals
from nanocore.engine_core.policy.draft_budget import DecodeTimes, DraftBudget

NUM_DRAFTS = 4
SURE, UNSURE = 1, 2


def proposals(*classes: int, num_drafts: int = NUM_DRAFTS) -> Proposals:
    """A row for each class of evidence, with so many drafts of it."""
    evidence = np.repeat(np.array(classes, np.uint8)[:, None], NUM_DRAFTS, axis=1)
    counts = np.full(len(classes), num_drafts)
    return Proposals(counts, np.zeros((len(classes), NUM_DRAFTS), np.int32), evidence)


def rows(count: int) -> NDArray[np.int64]:
    return np.arange(count)


class Machine:
    """A budget whose steps take what `seconds` says of their tokens."""

    def __init__(self, token_s: float, num_rows: int = 8, max_step_drafts: int = 16) -> None:
        self.budget = DraftBudget(num_rows, max_step_drafts)
        self.token_s = token_s

    def run(self, num_rows: int, num_drafts: int, times: int = 1) -> None:
        for _ in range(times):
            num_tokens = num_rows + num_drafts
            seconds = 1.0 + self.token_s * num_tokens
            self.budget.times.observe(num_tokens, num_drafts > 0, 0, seconds)

    def know_all_sizes(self, num_rows: int = 1) -> None:
        for num_drafts in (*range(9), *range(9)):
            self.run(num_rows, num_drafts, 8)

    def teach(self, kind: int, right: int, times: int = 50) -> None:
        """Drafts of a class turn out to be right, up to so many of a row, in other rows."""
        evidence = proposals(kind).evidence
        for _ in range(times):
            self.budget.learn(np.array([7]), evidence, np.array([NUM_DRAFTS]), np.array([right]))
        self.budget.begin(7)

    def choose(self, *classes: int, budget: int = 100, num_drafts: int = NUM_DRAFTS) -> list[int]:
        offered, count = proposals(*classes, num_drafts=num_drafts), len(classes)
        return self.budget.choose(rows(count), offered, budget, count, 0).tolist()


def test_all_are_tried_while_nothing_is_known() -> None:
    assert Machine(0.1).choose(SURE, UNSURE) == [NUM_DRAFTS, NUM_DRAFTS]


def test_on_a_machine_with_time_to_spare_every_draft_pays() -> None:
    machine = Machine(0.001)
    machine.know_all_sizes()
    machine.teach(UNSURE, right=1)
    assert machine.choose(UNSURE)[0] > 0
    machine.teach(SURE, right=NUM_DRAFTS)
    assert machine.choose(SURE) == [NUM_DRAFTS]


def test_where_each_token_takes_time_only_likely_drafts_pay() -> None:
    machine = Machine(0.25)
    machine.know_all_sizes()
    machine.teach(UNSURE, right=0)
    machine.teach(SURE, right=NUM_DRAFTS)
    assert machine.choose(UNSURE) == [0]
    assert machine.choose(SURE) == [NUM_DRAFTS]
    assert machine.choose(SURE, UNSURE, SURE)[1] == 0


def test_nothing_pays_where_a_step_takes_its_tokens_time() -> None:
    machine = Machine(1000.0)
    machine.know_all_sizes()
    machine.teach(SURE, right=NUM_DRAFTS - 1)
    assert machine.choose(SURE, SURE) == [0, 0]


def test_what_does_not_adapt_computes_what_was_proposed() -> None:
    machine = Machine(1000.0)
    machine.budget = DraftBudget(8, 6, is_adaptive=False)
    machine.know_all_sizes()
    machine.teach(SURE, right=0)
    assert machine.choose(SURE) == [NUM_DRAFTS]
    assert sum(machine.choose(SURE, SURE)) == 6


def test_the_budget_goes_to_the_likeliest_drafts_of_all_rows() -> None:
    machine = Machine(0.0)
    machine.teach(UNSURE, right=1)
    machine.teach(SURE, right=NUM_DRAFTS)
    assert machine.choose(UNSURE, SURE, UNSURE, budget=NUM_DRAFTS) == [0, NUM_DRAFTS, 0]
    assert machine.choose(UNSURE, SURE, UNSURE, budget=NUM_DRAFTS + 2) == [1, NUM_DRAFTS, 1]


def test_a_step_has_no_more_than_its_limit() -> None:
    machine = Machine(0.0, max_step_drafts=5)
    assert sum(machine.choose(SURE, SURE, SURE)) == 5


def test_a_row_that_was_wrong_is_trusted_less_than_others_until_it_has_another_request() -> None:
    machine = Machine(0.25)
    machine.know_all_sizes(num_rows=2)
    machine.teach(SURE, right=NUM_DRAFTS, times=500)
    evidence = proposals(SURE).evidence
    for _ in range(10):
        machine.budget.learn(np.array([0]), evidence, np.array([NUM_DRAFTS]), np.array([0]))
    assert machine.choose(SURE, SURE) == [0, NUM_DRAFTS]
    machine.budget.begin(0)
    assert machine.choose(SURE, SURE) == [NUM_DRAFTS, NUM_DRAFTS]


def test_what_was_never_right_is_tried_again_after_long() -> None:
    machine = Machine(0.25)
    machine.know_all_sizes()
    machine.teach(UNSURE, right=0)
    tries = [machine.choose(UNSURE) for _ in range(5000)]
    assert tries[0] == [0]
    assert tries[-1] != [0]


def test_steps_that_were_slow_once_are_forgotten() -> None:
    """Another program took the machine while drafts were tried."""
    machine = Machine(0.01)
    machine.run(1, 0, times=32)
    machine.token_s = 100.0
    machine.run(1, 3, times=32)
    machine.teach(SURE, right=NUM_DRAFTS - 1)
    assert machine.choose(SURE) == [0]
    machine.token_s = 0.01
    machine.run(1, 0, times=1000)
    assert machine.choose(SURE)[0] > 0


def test_times_are_a_line_that_bends_upwards() -> None:
    times = DecodeTimes(64)
    for _ in range(2):
        for num_tokens in (1, 2, 4, 8, 12, 16, 24, 32):
            for _ in range(16):
                times.observe(num_tokens, False, 0, 2.0 + max(num_tokens - 8, 0))
    found = [times.predict(n, 0, 0)[0] for n in (1, 4, 8, 16, 32)]
    np.testing.assert_allclose(found, [2, 2, 2, 10, 26], rtol=1e-6)


def test_drafts_have_a_cost_of_their_own_and_context_another() -> None:
    times = DecodeTimes(64)
    for _ in range(2):
        for num_tokens, context in ((1, 100), (2, 400), (4, 200), (8, 900)):
            for has_drafts in (False, True):
                for _ in range(16):
                    seconds = 2.0 + 0.5 * num_tokens + 0.3 * has_drafts + 0.001 * context
                    times.observe(num_tokens, has_drafts, context, seconds)
    np.testing.assert_allclose(times.predict(2, 2, 300), [3.3, 4.1, 4.6], rtol=1e-6)


def test_no_step_is_predicted_before_one_was_seen_and_none_counts_that_took_no_time() -> None:
    times = DecodeTimes(8)
    times.observe(1, False, 0, 0.0)
    assert not times.predict(1, 4, 100).any()


def test_of_more_tokens_than_are_tabled_each_costs_what_the_last_ones_do() -> None:
    times = DecodeTimes(10)
    for num_tokens in (1, 2, 4, 8, 1, 2, 4, 8):
        for _ in range(16):
            times.observe(num_tokens, False, 0, 1.0 + num_tokens)
    np.testing.assert_allclose(times.predict(1000, 2, 0), [1001, 1002, 1003], rtol=1e-6)
