"""How many drafts a step computes, as chances of drafts and times of steps are learned."""

from __future__ import annotations

import numpy as np
import pytest
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
            self.budget.times.observe(num_tokens, int(num_drafts > 0), 0, seconds)

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
                times.observe(num_tokens, 0, 0, 2.0 + max(num_tokens - 8, 0))
    found = [times.predict(n, np.zeros(1), 0)[0] for n in (1, 4, 8, 16, 32)]
    np.testing.assert_allclose(found, [2, 2, 2, 10, 26], rtol=1e-6)


def test_drafts_have_a_cost_of_their_own_and_context_another() -> None:
    times = DecodeTimes(64)
    for _ in range(2):
        for num_tokens, context in ((1, 100), (2, 400), (4, 200), (8, 900)):
            for num_passes in (0, 1, 3):
                for _ in range(16):
                    seconds = 2.0 + 0.5 * num_tokens + 0.3 * num_passes + 0.001 * context
                    times.observe(num_tokens, num_passes, context, seconds)
    found = times.predict(2, np.array([0, 1, 1, 2]), 300)
    np.testing.assert_allclose(found, [3.3, 4.1, 4.6, 5.4], rtol=1e-6)


def test_no_step_is_predicted_before_one_was_seen_and_none_counts_that_took_no_time() -> None:
    times = DecodeTimes(8)
    times.observe(1, 0, 0, 0.0)
    assert not times.predict(1, np.arange(5), 100).any()


def test_of_more_tokens_than_are_tabled_each_costs_what_the_last_ones_do() -> None:
    times = DecodeTimes(10)
    for num_tokens in (1, 2, 4, 8, 1, 2, 4, 8):
        for _ in range(16):
            times.observe(num_tokens, 0, 0, 1.0 + num_tokens)
    np.testing.assert_allclose(times.predict(1000, np.zeros(3), 0), [1001, 1002, 1003], rtol=1e-6)


@pytest.mark.parametrize(("pass_s", "num_drafts"), [(0.02, NUM_DRAFTS), (0.4, 1), (0.8, 0)])
def test_each_further_draft_of_a_row_costs_a_pass(pass_s: float, num_drafts: int) -> None:
    """A draft is right half of the time; rows share a pass."""
    budget = DraftBudget(8, 16, has_passes=True)
    for num_passes in (*range(4), *range(4)):
        for _ in range(8):
            budget.observe(3, np.full(3, num_passes), 0, 1.0 + pass_s * num_passes)
    offered = proposals(SURE, SURE, SURE)
    for _ in range(50):
        budget.learn(np.array([7]), offered.evidence[:1], np.array([2]), np.array([1]))
    budget.begin(7)
    assert budget.choose(rows(3), offered, 100, 3, 0).tolist() == [num_drafts] * 3


def test_where_every_step_had_drafts_one_without_is_tried() -> None:
    machine = Machine(0.0)
    machine.run(1, 3, times=8)
    assert machine.choose(SURE) == [0]
    machine.run(1, 0)
    assert machine.choose(SURE) == [NUM_DRAFTS]


def test_drafts_are_tried_in_some_steps_before_it_counts_what_they_take() -> None:
    """The first of them may have been held up."""
    machine = Machine(0.001)
    machine.run(1, 0, times=8)
    machine.token_s = 100.0
    machine.run(1, 3)
    assert machine.choose(UNSURE) == [NUM_DRAFTS]
    machine.token_s = 0.001
    for _ in range(3):
        machine.run(1, 3)
    assert machine.choose(UNSURE)[0] > 0
