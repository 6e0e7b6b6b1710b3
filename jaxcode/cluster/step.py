"""One step: ask everybody, decide as soon as it can be decided, and see that all take it alike."""

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import ray
from jaxtyping import Bool

from jaxcode.cluster.actor import Outcome
from jaxcode.cluster.members import Member, Members, WorkerError
from jaxcode.cluster.plans import Plan, Report, agreeing, transfers, values_of, weights_of
from jaxcode.cluster.transfer import Store
from jaxcode.code import Code

Undecodable = Literal["approximate", "skip", "raise"]
# After enough replicas have a step, the others get so much longer than those took, and no more:
# who is then not there follows later.
PATIENCE, LEAST_PATIENCE = 1.0, 0.1
# How long to let a replica rest that could not catch up.
RETRY_SECONDS = 0.3
# A worker that runs for so long has its restarts forgiven.
FORGIVEN_SECONDS = 600.0


class Step:
    """One step of training, from asking for messages to a state that is decided.

    Args:
        number: of the step.
        code: who computes what.
        members: the workers.
        past: plans of earlier steps, for those who are behind.
        commit: names the state that the last step decided.
        rows: of a partition.
        attempts: plans made so far: no two of the whole training have the same name.
        usual: seconds that recent steps waited.
        master: None, or what makes of messages the payload to send back.
    """

    def __init__(
        self,
        number: int,
        code: Code,
        members: Members,
        past: dict[int, Plan],
        commit: tuple[int, int] | None,
        rows: int,
        attempts: int,
        usual: float,
        master: Callable[[Plan, Store], tuple[Any, dict[int, str], tuple[int, int]]] | None,
    ):
        self.number, self.code, self.members = number, code, members
        self._past, self._commit, self._rows, self._master = past, commit, rows, master
        self.started = time.monotonic()
        # Who comes back while the others compute would be late, and the next time again: it sits
        # out, unless the step takes much longer than it should.
        self._rest = self.started + 0.5 * usual, self.started + 2 * usual
        self.decodable_at: float | None = None
        self.reports: dict[int, Report] = {}
        self.arrivals: dict[int, float] = {}
        self.rejected: dict[int, str] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.late: list[tuple[Member, int, float]] = []
        self.plan: Plan | None = None
        self.driver_bytes = (0, 0)
        self.disagreed: set[int] = set()
        self._done: set[int] = set()
        self._accused: dict[int, set[int]] = {}
        self.attempts, self._raised, self._seconds = attempts, 0, 0.0
        self._known: dict[bytes, bool] = {}
        self._store = Store()

    def run(self, seconds: float, on_undecodable: Undecodable) -> bool:
        """Take the step; False if it was skipped.

        Raises:
            TimeoutError: too few answered in time; names those waited for.
            WorkerError: nobody can go on, because of this exception.
        """
        limit, self._seconds = self.started + seconds, seconds
        approximate = False
        while True:
            self._ask_everybody()
            survivors = self._survivors(approximate=approximate)
            if survivors is not None and self._settle(survivors, limit):
                return True
            if survivors is not None:
                self._listen(0.01)  # for those who can take part
                self._check_time(limit)
                continue
            over = time.monotonic() >= limit or not self._hope()
            if over and not approximate:
                heard = self._usable()
                if on_undecodable == "raise" or not heard.any():
                    self._give_up(heard)
                if on_undecodable == "skip":
                    return self._skip()
                approximate = True
                continue
            self._listen(min(limit, self._next_chance()) - time.monotonic())

    def _ask_everybody(self) -> None:
        """Give each idle worker what it needs most: a state, what it missed, or this step."""
        now = time.monotonic()
        for member in self.members:
            if member.doing == "resting" and now >= member.rest_until and member.handle is None:
                task = self.members.start(member, self.number).configure.remote(
                    self.code, self._rows, int(self._master is not None)
                )
                member.assign("starting", task)
            if member.doing != "idle" or now < member.rest_until:
                continue
            if member.step < self.number:
                self._bring_up(member)
            elif member.index not in self.reports and not self._rest[0] < now < self._rest[1]:
                task = member.handle.compute.remote(self.number, self._commit)
                member.assign("computing", task, self.number)

    def _bring_up(self, member: Member) -> None:
        """Have a worker that is behind follow the plans it missed, or take over a state."""
        missed = [self._past.get(step) for step in range(max(member.step, 0), self.number)]
        if member.step >= 0 and all(plan is not None for plan in missed):
            plans = [self._reachable(plan) for plan in missed if plan is not None]
            task = member.handle.exchange.remote(
                plans, None, self.members.news(member), at_once=True
            )
            member.assign("following", task, (self.number, len(plans)))
            return
        donors = [m for m in self.members if m.step == self.number and m.handle is not None]
        if not donors:
            return
        donor = donors[member.restarts % len(donors)]
        task = member.handle.adopt.remote(donor.handle, self._commit)
        member.assign("following", task)

    def _exchange(self, member: Member, plan: Plan) -> Any:
        return member.handle.exchange.remote([plan], self._commit, self.members.news(member))

    def _reachable(self, plan: Plan) -> Plan:
        """A past plan, with the workers that have it now and are there."""
        there = [m.index for m in self.members if m.handle is not None and m.step > plan.step]
        return plan._replace(there=tuple(there))

    def _listen(self, timeout: float) -> None:
        """Wait for somebody to finish something, and note what it means."""
        for member, result, error in self.members.wait(timeout):
            doing, about = member.doing, member.about
            if error is not None:
                self._lost(member, error)
                continue
            member.doing = "idle"
            if doing == "starting":
                member.step = 0
            elif doing == "computing":
                self._reported(member, about, result)
            elif doing == "exchanging":
                self._exchanged(member, about, result)
            elif isinstance(result, Outcome):  # it followed the plans it had missed
                step, plans = about
                member.step = step if result.done == plans else -1
            else:  # it took over a state
                member.step = result
                member.rest_until = 0.0 if result >= 0 else time.monotonic() + RETRY_SECONDS
        if self._raised > self.code.num_stragglers:  # no accident of one worker
            raise WorkerError(self.members.failure)

    def _lost(self, member: Member, error: Exception) -> None:
        self._done.discard(member.index)
        self.members.failed(member, error)
        if isinstance(error, ray.exceptions.RayTaskError):
            self._raised += 1

    def _reported(self, member: Member, step: int, report: Report) -> None:
        if step != self.number:
            self.late.append((member, step, time.monotonic()))
            return
        reason = self._wrong(member.index, report)
        if reason:
            self.rejected[member.index] = reason
        if time.monotonic() - member.born > FORGIVEN_SECONDS:
            member.restarts = 0
        self.reports[member.index] = report
        self.arrivals[member.index] = time.monotonic() - self.started

    def _wrong(self, worker: int, report: Report) -> str | None:
        """Why a report's message cannot be used, judged by its header."""
        head = report.header
        if head.step != self.number:
            return "step"
        if head.sender != worker:
            return "sender"
        return None if report.finite else "not finite"

    def _usable(self) -> Bool[np.ndarray, " workers"]:
        """Whose messages are there and right, as far as is known."""
        arrived = np.zeros(self.code.num_workers, bool)
        for worker in self.reports:
            arrived[worker] = worker not in self.rejected
        integers = {i: report.integers for i, report in self.reports.items()}
        return agreeing(self.code, integers, arrived)

    def _survivors(self, *, approximate: bool) -> Bool[np.ndarray, " workers"] | None:
        usable = self._usable()
        if self._decodes(usable) or (approximate and usable.any()):
            if self.decodable_at is None:
                self.decodable_at = time.monotonic()
            return usable
        return None

    def _hope(self) -> bool:
        """Whether those who have not answered could still make the step decodable."""
        possible = self._usable()
        for member in self.members:
            unheard = member.index not in self.reports
            possible[member.index] |= unheard and member.doing != "gone"
        return self._decodes(possible)

    def _next_chance(self) -> float:
        """When somebody may be asked who now rests."""
        now = time.monotonic()
        times = [self._rest[1], *(member.rest_until for member in self.members)]
        return min((x for x in times if x > now), default=np.inf)

    def _settle(self, survivors: Bool[np.ndarray, " workers"], limit: float) -> bool:
        """Have everybody follow one plan; False if its messages turned out not to be there."""
        began = time.monotonic()
        plan = self._make_plan(survivors)
        if plan is None:
            return False
        self._done, self._accused = set(), {}
        enough_at: float | None = None
        failed_before = dict(self.rejected)
        while True:
            for member in self.members:
                if member.doing == "idle" and member.step == self.number:
                    if member.index not in self._done and not self._refused(member, plan):
                        task = self._exchange(member, plan)
                        member.assign("exchanging", task, plan)
            self._judge(plan)
            if self.rejected != failed_before:
                return False
            # Those at an earlier plan of this step are given this one as soon as they are through.
            busy = [
                m for m in self.members if m.doing == "exchanging" and m.about.step == plan.step
            ]
            if not busy and not self._done:
                return False
            enough = self._enough()
            now = time.monotonic()
            if enough and enough_at is None:
                enough_at = now
            if not busy or (enough_at is not None and now >= self._patience(began, enough_at)):
                return True
            if not enough:
                self._check_time(limit)
            end = self._patience(began, enough_at) if enough_at is not None else now + 0.5
            self._listen(end - now)
            for member in self.members:  # those who are behind go on catching up
                if member.doing == "idle" and member.step < self.number:
                    if now >= member.rest_until:
                        self._bring_up(member)

    def _check_time(self, limit: float) -> None:
        """Fetching may take as long again as answering."""
        if time.monotonic() >= limit + (limit - self.started):
            names = ", ".join(m.describe() for m in self.members if m.index not in self._done)
            raise TimeoutError(
                f"step {self.number} needs its messages to be fetched; waited for {names}: check "
                "the links, or allow a longer deadline"
            )

    def _judge(self, plan: Plan) -> None:
        """Whether a message that some could not fetch is to blame, or those who could not."""
        for sender, accusers in self._accused.items():
            pullers = set(plan.pullers.get(sender, ()))
            if pullers & self._done:
                continue  # others have it
            waiting = [m for m in self.members if m.index in pullers and m.doing == "exchanging"]
            if len(accusers) > 1 or not waiting or self.members[sender].handle is None:
                self.rejected.setdefault(sender, "lost")

    def _patience(self, began: float, enough_at: float) -> float:
        return enough_at + max(PATIENCE * (enough_at - began), LEAST_PATIENCE)

    def _enough(self) -> bool:
        """Whether the next step could be decoded from those who have this one."""
        done = np.zeros(self.code.num_workers, bool)
        done[sorted(self._done)] = True
        return self._decodes(done)

    def _decodes(self, survivors: Bool[np.ndarray, " workers"]) -> bool:
        """Whether these answers decode; asked often, of few patterns."""
        pattern = survivors.tobytes()
        if pattern not in self._known:
            self._known[pattern] = bool(self.code.is_decodable(survivors))
        return self._known[pattern]

    def _refused(self, member: Member, plan: Plan) -> bool:
        outcome = self.outcomes.get(member.index)
        return member.about is plan and outcome is not None and not outcome.done

    def _make_plan(self, survivors: Bool[np.ndarray, " workers"]) -> Plan | None:
        for other in self.reports:
            if not survivors[other]:  # in the minority of those who had answered by now
                self.disagreed.add(other)
        weights, recovered_from = weights_of(self.code, survivors)
        if not weights.any():
            self._give_up(survivors)
        self.attempts += 1
        used = [int(i) for i in np.flatnonzero(np.any(weights != 0, axis=0))]
        ready = [m.index for m in self.members if m.step == self.number and m.handle is not None]
        ready = [i for i in ready if self.members[i].doing in ("idle", "exchanging")]
        # Who is about to answer fetches its share too: else one link would serve it all once more.
        coming = [
            m.index for m in self.members if m.doing == "computing" and m.about == self.number
        ]
        taking_part = sorted({*ready, *coming})
        holders, pullers = transfers(self.code, used, self.reports, taking_part)
        counted = {i: self.reports[i] for i in np.flatnonzero(recovered_from).tolist()}
        examples = values_of(self.code, counted)[0]
        there = [i for i in {*taking_part, *used} if self.members[i].handle is not None]
        headers = {i: self.reports[i].header for i in used}
        weights = weights * (self._rows / examples)
        self.plan = Plan(
            self.number, self.attempts, weights, headers, holders, pullers, {}, there=tuple(there)
        )
        if self._master is not None:
            handles = {i: self.members[i].handle for i in there}
            recovered, failed, moved = self._master(
                self.plan._replace(handles=handles), self._store
            )
            taken, given = self.driver_bytes
            self.driver_bytes = taken + moved[0], given + moved[1] * len(ready)
            if failed:
                self.rejected.update(failed)
                self.plan = self.plan._replace(headers={})
                return None
            self.plan = self.plan._replace(recovered=recovered)
        return self.plan

    def _exchanged(self, member: Member, plan: Plan, outcome: Outcome) -> None:
        self.outcomes[member.index] = outcome
        if plan is not self.plan:
            return
        if outcome.done:
            self._done.add(member.index)
            return
        if not outcome.failed:  # it is not where it should be
            member.step = -1
        for worker, reason in outcome.failed.items():
            if reason == "lost":
                self._accused.setdefault(worker, set()).add(member.index)
            else:
                self.rejected.setdefault(worker, reason)

    def _skip(self) -> bool:
        """Go on without an update."""
        self.attempts += 1
        weights = np.zeros((self.code.num_fragments, self.code.num_workers))
        self.plan = plan = Plan(self.number, self.attempts, weights, {}, {}, {}, {})
        self._done = set()
        ready = [m for m in self.members if m.doing == "idle" and m.step == self.number]
        for member in ready:
            task = self._exchange(member, plan)
            member.assign("exchanging", task, plan)
        while any(m.doing == "exchanging" and m.about is plan for m in ready):
            self._listen(1.0)
        if not self._done:
            self._give_up(self._usable())
        return False

    def _give_up(self, heard: Bool[np.ndarray, " workers"]) -> None:
        absent = [m for m in self.members if m.index not in self.reports]
        names = [m.describe() for m in absent]
        names += [f"worker {i} ({why})" for i, why in sorted(self.rejected.items())]
        if self.members.failure and all(m.doing in ("gone", "resting") for m in absent):
            raise WorkerError(
                f"step {self.number} cannot be decoded from {int(heard.sum())} of "
                f"{self.code.num_workers} workers; without {', '.join(names)}. The last failure: "
                f"{self.members.failure}"
            )
        cure = 'allow a longer deadline, more stragglers, or on_undecodable="approximate"'
        if not absent:
            cure = "all answered, so look at what they send; NaN in all of them is the loss's own"
        raise TimeoutError(
            f"step {self.number} needs answers that decode within {self._seconds:g} s; got "
            f"{int(heard.sum())} of {self.code.num_workers}, and waited for {', '.join(names)}: "
            f"{cure}"
        )

    def finish(self) -> None:
        """Note who has the new state."""
        for index in self._done:
            if self.members[index].handle is not None:
                self.members[index].step = self.number + 1
