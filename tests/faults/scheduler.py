"""Faults of the scheduler: requests, plans, retraction and the waiting queue."""

from fault import Fault

_SCHEDULER = "tests/core/sched/test_scheduler.py"

FAULTS = (
    Fault(
        name="lease-kept-on-abort",
        file="core/srv/sched/scheduler.py",
        text="        elif request.in_flight:\n            request.state = State.ENDING\n        else:",
        planted="        elif request.in_flight or reason is FinishReason.ABORT:\n"
        "            request.state = State.ENDING\n        else:",
        effect="Each aborted request keeps its slot and its pages, until the server can accept no more requests.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="chunk-budget-not-spent",
        file="core/srv/sched/planner.py",
        text="        step.budget -= count if is_prompt else drafts\n",
        planted="",
        effect="A step computes more prompt tokens than --chunked-prefill-size, and runs out of activation memory.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="earliest-request-is-retracted",
        file="core/srv/sched/planner.py",
        text="for one in reversed(self._running) if",
        planted="for one in tuple(self._running) if",
        effect="When pages run out, the request that has waited longest loses its pages, again and again.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="one-token-too-many",
        file="core/srv/sched/request.py",
        text="if len(self.output) >= max_output:",
        planted="if len(self.output) > max_output:",
        effect="A request does not end at max_tokens.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="whole-prompt-is-a-hit",
        file="core/srv/sched/request.py",
        text="limit = len(self.start_tokens) - 1\n",
        planted="limit = len(self.start_tokens)\n",
        effect="A repeated prompt whose length is a multiple of the page size has no position left to sample from.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="failed-kv-is-shared",
        file="core/srv/sched/scheduler.py",
        text="        request.kv_invalid |= result.error is not None\n",
        planted="",
        effect="After a failed step, later requests reuse KV that was never written, and generate nonsense.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="output-lost-by-retraction",
        file="core/srv/sched/request.py",
        text="self.start_tokens = self.prompt + tuple(self.output)",
        planted="self.start_tokens = self.prompt",
        effect="A retracted request forgets its output when it resumes.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="bypasses-are-not-counted",
        file="core/srv/sched/queue.py",
        text="            other.times_bypassed += 1\n",
        planted="            other.times_bypassed += 0\n",
        effect="Under --schedule-policy lpm, a request without a cached prefix can wait for ever.",
        tests=("tests/core/sched/test_queue.py",),
    ),
    Fault(
        name="prefix-producer-without-namespace",
        file="core/srv/sched/sharing.py",
        text="        if other.spec.namespace != request.spec.namespace:\n            continue\n",
        planted="",
        effect="A request waits for the same prompt of another tenant, whose pages it will never share.",
        tests=("tests/core/sched/test_sharing.py",),
    ),
    Fault(
        name="late-row-releases-twice",
        file="core/srv/sched/scheduler.py",
        text="        request.drop(row)\n        if request.in_flight:\n            return None\n",
        planted="        request.drop(row)\n",
        effect="With two steps in flight, a request that ends early frees its pages while a step writes to them.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="rejected-drafts-stay-bound",
        file="core/srv/sched/request.py",
        text="        self.bound -= rejected\n",
        planted="",
        effect="With speculative decoding, rows begin behind the accepted tokens, and output ends early.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="rejected-drafts-are-published",
        file="core/srv/sched/request.py",
        text="self.confirmed = known - 1 if row.sample else row.computed + row.scheduled",
        planted="self.confirmed = row.computed + row.scheduled",
        effect="With speculative decoding, the KV of a rejected draft is shared as that of the token in its place.",
        tests=(_SCHEDULER,),
    ),
    Fault(
        name="drafts-outside-the-budget",
        file="core/srv/sched/planner.py",
        text="min(drafts, step.draft_budget, step.budget, ",
        planted="min(drafts, ",
        effect="With speculative decoding, a step computes more tokens than the memory for activations is meant for.",
        tests=(_SCHEDULER,),
    ),
)
