"""A state machine over the whole scheduler: every request gets its outputs in any order of events.

Requests arrive, are aborted or finished, steps are submitted and applied one or two deep, drafts are accepted or not,
rows wait for late inputs, rows and steps fail, pages run out, and one rank or several compute the steps. The driver
checks integrity after every call, and the fake executor checks every plan; the model here knows the expected outputs of
each request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
from fake_ranks import FakeRanks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sched_driver import END, Driver, embedding, followed, limits, message

from srv.io.messages import Output
from srv.memory.groups import PageGroup
from srv.sched.scheduler import Limits
from srv.testing.fake_executor import FakeExecutor, expected_tokens, expected_vectors, kv_cells_of
from srv.types import FinishReason, Pooling, RequestSpec

CONTEXT = 40
LIMITS = st.builds(
    limits,
    max_running_requests=st.sampled_from([1, 3, 5]),
    max_queued_requests=st.sampled_from([None, None, 3]),
    chunked_prefill_size=st.sampled_from([-1, 1, 3, 16, 512]),
    max_prefill_tokens=st.sampled_from([4, 30]),
    context_length=st.just(CONTEXT),
    conservativeness=st.sampled_from([0.01, 0.01, 1.0]),
    policy=st.sampled_from(["fcfs", "lpm"]),
    prefix_cache=st.booleans(),
    depth=st.sampled_from([1, 2]),
    drafts=st.sampled_from([0, 0, 1, 3]),
    device_lengths=st.sampled_from([True, True, False]),
    save_interval=st.sampled_from([1, 3, 256]),
)
# Two tokens and few first pages, so that prompts share prefixes; sometimes a prompt that shares nothing.
PROMPTS = st.one_of(
    st.builds(
        lambda stem, tail: stem + tail,
        st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], [1]]),
        st.lists(st.integers(1, 2), max_size=12),
    ),
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
# Equal prompts that arrive together, like those of a request with n > 1.
SIBLINGS = st.builds(lambda prompt, count: [prompt] * count, PROMPTS, st.integers(2, 5))


@dataclass
class Expectation:
    prompt: list[int]
    tokens: list[int]  # the expected output, up to the token that ends it
    scores: list[float]
    vectors: bytes
    embedding: bool = False
    finished_by_client: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        given=LIMITS,
        pool=st.integers(40, 60),
        page_sizes=st.sampled_from([(1,), (2,), (4,), (2, 2), (1, 4)]),
        windows=st.sampled_from([(None, None), (None, None), (None, 3), (None, 9), (5, None), (4, 7)]),
        failing=st.booleans(),
        ranks=st.sampled_from([1, 1, 3]),
        snapshots=st.sampled_from([None, None, 0, 2, 7]),
    )
    def start(
        self,
        given: Limits,
        pool: int,
        page_sizes: tuple[int, ...],
        windows: tuple[int | None, int | None],
        failing: bool,
        ranks: int,
        snapshots: int | None,
    ) -> None:
        if snapshots is not None:  # models with recurrent states have no drafts
            given = replace(given, drafts=0)

        def fails(number: int, one_in: int) -> bool:
            return failing and number * 2654435761 % 2**32 // 65536 % one_in == 0

        groups = [PageGroup(pool // size + 3 * number, size, windows[number]) for number, size in enumerate(page_sizes)]

        def rank() -> FakeExecutor:
            return FakeExecutor(
                groups,
                row_error=lambda step, slot: fails(step * 8 + slot + 1, 60),
                step_error=lambda step: fails(step + 1, 25),
                snapshots=snapshots,
            )

        executor = rank() if ranks == 1 else FakeRanks(rank, ranks)
        self.driver = Driver(given, executor=executor, groups=groups, snapshots=snapshots)
        self.expected: dict[str, Expectation] = {}
        self.refused = 0

    @rule(
        prompts=st.one_of(st.lists(PROMPTS, min_size=1, max_size=4), SIBLINGS),
        max_tokens=st.one_of(st.integers(0, 30), st.just(30)),
        stops=st.sampled_from([(), (), (), tuple(range(10))]),
        ignore_eos=st.booleans(),
        scores_from=st.sampled_from([None, None, None, 0, 5]),
        namespace=st.sampled_from(["", "", "tenant"]),
        hidden_states=st.sampled_from([False, False, False, True]),
        late=st.sampled_from([False, False, True]),
        group=st.sampled_from(["", "together"]),
        owner=st.sampled_from(["", "", "another key"]),
    )
    def add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        stops: tuple[int, ...],
        ignore_eos: bool,
        scores_from: int | None,
        namespace: str,
        hidden_states: bool,
        late: bool,
        group: str,
        owner: str,
    ) -> None:
        group = group and f"{group} {len(self.expected)}"
        for prompt in prompts:
            name = self.next_name()
            spec = message(
                name,
                prompt,
                max_tokens,
                namespace + "late" * late,
                stop_token_ids=stops,
                ignore_eos=ignore_eos,
                prompt_logprobs=None if scores_from is None else 0,
                prompt_logprobs_start=scores_from or 0,
                hidden_states=hidden_states,
            )
            accepted = self.accepted(msgspec.structs.replace(spec, group=group, owner=owner))
            if not accepted:
                continue
            count = min(max_tokens, CONTEXT - len(prompt))
            tokens = followed(prompt, count) if late else expected_tokens(prompt, count)
            ends = [place for place, token in enumerate(tokens) if token in stops or (token == END and not ignore_eos)]
            places = () if scores_from is None else range(max(scores_from, 1), len(prompt))
            scores = [-float(place) for place in places]
            tokens = tokens[: ends[0] + 1] if ends else tokens
            vectors = expected_vectors(kv_cells_of(prompt + tokens[:-1])) if hidden_states else b""
            self.expected[name] = Expectation(prompt, tokens, scores, vectors)

    @rule(
        prompts=st.one_of(st.lists(PROMPTS, min_size=1, max_size=4), SIBLINGS),
        pooling=st.sampled_from(Pooling),
        namespace=st.sampled_from(["", "", "tenant"]),
    )
    def embed(self, prompts: list[list[int]], pooling: Pooling, namespace: str) -> None:
        for prompt in prompts:
            name = self.next_name()
            if self.accepted(embedding(name, prompt, pooling, namespace)):
                cells = kv_cells_of(prompt)
                pooled = cells[-1] if pooling is Pooling.LAST else sum(cells)
                self.expected[name] = Expectation(prompt, [], [], expected_vectors([pooled]), embedding=True)

    def next_name(self) -> str:
        return f"r{len(self.expected) + self.refused}"

    def accepted(self, request: RequestSpec) -> bool:
        output = self.driver.add(request)
        if output is None:
            return True
        self.refused += 1
        assert output.error is not None
        assert output.error[0] in ("exceeds_pool", "queue_full")
        return False

    def alive(self) -> list[str]:
        return [
            name
            for name, one in self.expected.items()
            if not one.finished_by_client and not any(sent.finish for sent in self.driver.outputs.get(name, []))
        ]

    @precondition(lambda self: self.alive())
    @rule(which=st.integers(0, 99), together=st.integers(1, 3))
    def abort(self, which: int, together: int) -> None:
        names = self.alive()
        self.driver.abort([names[(which + step) % len(names)] for step in range(together)])

    @precondition(lambda self: self.alive())
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        names = self.alive()
        name = names[which % len(names)]
        self.expected[name].finished_by_client = True
        self.driver.scheduler.finish(name)

    @rule()
    def submit(self) -> None:
        self.driver.submit()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def land(self) -> None:
        self.driver.apply()

    @rule(steps=st.integers(1, 15))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.submit()
            if self.driver.in_flight:
                self.driver.apply()

    @rule()
    def flush(self) -> None:
        running = self.driver.scheduler.stats().running
        assert self.driver.scheduler.flush() is (running == 0)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for name, one in self.expected.items():
            self.check(name, one, self.driver.outputs.get(name, []))
        stats = self.driver.scheduler.stats()
        assert stats.finished + stats.aborted == len(self.expected)
        assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
        assert self.driver.scheduler.flush()
        assert self.driver.scheduler.stats().pages_free == stats.pages_total

    def check(self, name: str, one: Expectation, sent: list[Output]) -> None:
        tokens = [token for output in sent for token in output.tokens]
        scores = [score.logprob for output in sent for score in output.prompt_logprobs or ()]
        reasons = [output.finish for output in sent if output.finish]
        vectors = b"".join(output.vectors or b"" for output in sent)
        assert vectors == one.vectors[: len(vectors)], "hidden states depend on how they were scheduled"
        assert tokens == one.tokens[: len(tokens)], "tokens depend on how they were scheduled"
        assert scores == one.scores[: len(scores)], "a prompt position was scored twice or out of order"
        if one.finished_by_client:
            assert reasons == []
            return
        assert len(reasons) == 1, f"{name} has {len(reasons)} ends"
        assert sent[-1].finish
        if reasons[0] in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == one.tokens
            assert scores == one.scores
            assert vectors == one.vectors
            assert one.embedding or (sent[-1].stop_token is None) == (reasons[0] is FinishReason.LENGTH)


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_better_prefix_matches_starve_no_request() -> None:
    """Requests with a cached prompt keep arriving; a request without a cached prefix still finishes."""
    driver = Driver(limits(policy="lpm", max_running_requests=2, depth=2), [40])
    hot = list(range(12))
    driver.add(message("warming", hot, max_tokens=1))
    driver.run()
    driver.add(message("hot", hot, max_tokens=3))
    driver.add(message("cold", hot[::-1], max_tokens=3))
    for number in range(200):
        driver.add(message(f"hot {number}", hot, max_tokens=3))
        driver.submit()
        driver.submit()
        driver.apply()
        if any(output.finish for output in driver.outputs.get("cold", [])):
            break
    assert driver.tokens("cold") == expected_tokens(hot[::-1], 3)
    overtaking = [name for name in driver.outputs if name.startswith("hot ")]
    assert 20 < len(overtaking) < 40


def test_newcomers_do_not_starve_a_retracted_request() -> None:
    """In a pool for one and a half requests, the older of two always advances while short ones keep arriving."""
    driver = Driver(limits(conservativeness=0.01, depth=2, max_running_requests=4), [30], page_size=1)
    driver.add(message("first", [1, 2, 3], max_tokens=24))
    driver.add(message("second", [4, 5, 6], max_tokens=24))
    for number in range(400):
        driver.add(message(f"short {number}", [7, number % 40], max_tokens=4))
        driver.submit()
        driver.submit()
        driver.apply()
        if "second" in driver.outputs and driver.outputs["second"][-1].finish:
            break
    assert driver.tokens("second") == expected_tokens([4, 5, 6], 24)
    assert driver.scheduler.stats().retractions > 0
    assert len(driver.plans) < 150
