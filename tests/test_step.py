"""What one step decides, with workers that are there in name only."""

import numpy as np
import pytest

pytest.importorskip("ray")

from jaxcode.cluster.members import Member, Members  # noqa: E402
from jaxcode.cluster.plans import Report  # noqa: E402
from jaxcode.cluster.step import Step  # noqa: E402
from jaxcode.cluster.wire import Header  # noqa: E402
from jaxcode.codes import fractional_repetition  # noqa: E402

CODE, STEP, ROWS = fractional_repetition(4, 1), 7, 8


def step_with(doing):
    """Step 7, answered by the workers that are idle; the others are at (what, of which step)."""
    members = Members.__new__(Members)  # without Ray
    members.all = [Member(i, handle=object(), doing="idle", step=STEP) for i in range(4)]
    for index, (what, about) in doing.items():
        members[index].doing, members[index].about = what, about
    step = Step(STEP, CODE, members, {}, None, ROWS, 0, 1.0, None)
    for i in set(range(4)) - set(doing):
        header = Header(STEP, i, int(CODE.block[i]), 0, "float32", 40, i)
        step.reports[i] = Report(header, {int(CODE.block[i]): (ROWS, 1.0, None)}, 0, True, 0.1)
    return step


@pytest.mark.parametrize(
    ("doing", "takes_part"),
    [
        (("computing", STEP), True),  # it is about to answer, and fetches its share with the others
        (("computing", STEP - 1), False),  # a straggler since the step before
        (("following", None), False),
        (("resting", None), False),
    ],
)
def test_who_is_given_a_share_to_fetch(doing, takes_part):
    step = step_with({1: doing})
    survivors = np.array([True, False, True, True])
    plan = step._make_plan(survivors)
    other = next(i for i in plan.headers if CODE.block[i] != CODE.block[1])
    assert (1 in plan.pullers[other]) == takes_part
    assert (1 in plan.there) == takes_part
    assert 1 not in plan.headers  # its message is not there
    assert set(plan.headers) == set(np.flatnonzero(plan.weights.any(axis=0)))


@pytest.mark.parametrize(
    ("doing", "cure"),
    [
        ({}, r"worker 0 \(not finite\).*: all answered, so look at what they send"),
        ({1: ("computing", STEP)}, r"worker 1 \(comp.*: allow a longer deadline"),
    ],
)
def test_what_is_advised_where_a_step_cannot_be_decoded(doing, cure):
    step = step_with(doing)
    step.members.failure = ""
    step.rejected = dict.fromkeys(step.reports, "not finite")
    with pytest.raises(TimeoutError, match=cure):
        step._give_up(step._usable())
