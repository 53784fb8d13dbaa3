"""How many drafts a request gets: by its acceptance rate and the measured cost of steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from srv.sched.draft_policy import AcceptanceRate, DraftCost, DraftHistory, allows_trial

# Up to four tokens cost the same; from then on, each token costs as much as a quarter of such a step.
STEPS = ((1, 1.0), (4, 1.0), (8, 2.0), (16, 4.0), (64, 16.0))


def counts(history: DraftHistory, share: float, rows: int, accepts: bool, limit: int = 4) -> list[int]:
    """The drafts of so many rows of at most `limit` drafts, of which all are accepted, or none."""
    drafts_of_rows = []
    for _ in range(rows):
        drafts = 0 if history.pauses(share, trial=True) else history.next_count(share, limit)
        drafts_of_rows.append(drafts)
        if drafts:
            history.record(drafts, drafts if accepts else 0)
    return drafts_of_rows


@pytest.mark.parametrize(("rows", "share"), [(1, 0.0), (2, 1 / 3), (4, 1.0), (16, 1.0), (100, 1.0)])
def test_the_share_is_what_a_draft_adds_to_the_step(rows: int, share: float) -> None:
    assert DraftCost(STEPS, 3).share(rows) == pytest.approx(share)


def test_without_measured_steps_drafts_are_free() -> None:
    assert DraftCost((), 3).share(4) == 0.0
    assert counts(DraftHistory(), 0.0, 4, accepts=False, limit=3) == [3, 3, 3, 3]


@pytest.mark.parametrize(("rows", "jumped", "pays"), [(1, 3, True), (3, 3, True), (4, 3, False), (100, 9, False)])
def test_forced_tokens_pay_while_they_cost_less_than_rows(rows: int, jumped: int, pays: bool) -> None:
    assert DraftCost(STEPS, 0).jump_pays(rows, jumped) is pays
    assert DraftCost(((1, 1.0), (4, 1.1), (16, 1.2)), 0).jump_pays(rows, jumped)  # steps are bound by memory
    assert DraftCost(STEPS[:1], 0).jump_pays(rows, jumped)  # nothing is known


def test_drafts_that_are_accepted_become_more() -> None:
    assert counts(DraftHistory(), 0.4, 8, accepts=True) == [1, 2, 4, 4, 4, 4, 4, 4]


def test_drafts_that_are_rejected_become_fewer_and_are_tried_again_more_and_more_rarely() -> None:
    drafted = counts(DraftHistory(), 0.2, 300, accepts=False)
    assert drafted[:3] == [2, 1, 1]
    tried = [row for row, drafts in enumerate(drafted) if drafts]
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps[2:] == sorted(gaps[2:])
    assert gaps[-1] > 60


def test_a_text_that_begins_to_repeat_itself_gets_its_drafts_back() -> None:
    history = DraftHistory()
    counts(history, 0.3, 50, accepts=False)
    assert counts(history, 0.3, 80, accepts=True)[-1] == 4


def test_dear_drafts_are_tried_together() -> None:
    assert all(allows_trial(step, 0.1) for step in range(20))
    assert [step for step in range(40) if allows_trial(step, 0.5)] == [0, 16, 32]
    history = DraftHistory()
    assert [history.pauses(0.8, trial) for trial in (False, False, True)] == [True, True, False]
    assert history.next_count(0.8, 4) == 1


def test_a_trial_that_does_not_fit_is_not_used_up() -> None:
    history = DraftHistory()
    counts(history, 0.8, 1, accepts=False)
    for _ in range(2):
        assert history.pauses(0.8, trial=True)
    for _ in range(3):
        assert not history.pauses(0.8, trial=True)
        assert history.next_count(0.8, limit=0) == 0
    assert history.next_count(0.8, limit=3) == 1


def test_a_new_request_is_expected_to_be_like_those_before_it() -> None:
    rate = AcceptanceRate()
    assert rate.value == 0.5
    for _ in range(200):
        rate.record(4, 0)
    assert rate.value < 0.05
    assert counts(DraftHistory(rate.value), 0.2, 64, accepts=False).index(1) > 20  # its first trial comes late
    for _ in range(400):
        rate.record(4, 4)
    assert counts(DraftHistory(rate.value), 0.2, 1, accepts=True) == [4]


def test_drafts_that_cannot_pay_are_not_tried() -> None:
    assert counts(DraftHistory(), 1.0, 20, accepts=True) == [0] * 20


def test_a_row_without_room_for_drafts_gets_none() -> None:
    assert counts(DraftHistory(), 0.0, 5, accepts=True, limit=0) == [0] * 5
