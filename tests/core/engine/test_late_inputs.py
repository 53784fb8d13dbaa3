"""Steps of two phases in the whole engine: masks that depend on the token of the step before, with overlap on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine_small import Small, engine, greedy, make_small, message
from torch import Tensor

from srv.sched.late import LateInputMaker, LateInputs, LateRow
from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec

VOCAB = 97
LATE = "late"  # the namespace of requests whose tokens are masked
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}


def allowed_after(token: int) -> list[int]:
    """The tokens that may follow `token`: no model would take one of these in a hundred by itself."""
    return [each for each in range(VOCAB) if each % 5 == (token + 1) % 5]


class Walk:
    """Late inputs that allow only `allowed_after` the last token."""

    def __init__(self) -> None:
        self.steps = 0

    def concerns(self, request: RequestSpec) -> bool:
        return request.namespace == LATE

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        self.steps += 1
        masks = []
        for row in rows:
            bits = sum(1 << token for token in allowed_after([*row.request.tokens, *row.output][-1]))
            masks.append((row.slot, bits.to_bytes(-(-VOCAB // 8), "little")))
        return LateInputs(tuple(masks))


class WalkingEngine(CheckedEngine):
    def late_inputs(self) -> LateInputMaker:
        return Walk()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"), head_dim=16)


def walked(small: Small, prompt: list[int], count: int) -> list[int]:
    def change(logits: Tensor, output: list[int]) -> Tensor:
        allowed = allowed_after([*prompt, *output][-1])
        masked = torch.full_like(logits, float("-inf"))
        masked[allowed] = logits[allowed]
        return masked

    return greedy(small.model, prompt, count, change)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "flags", [{}, {"chunked_prefill_size": 7}, {**DRAFTS, "disable_graphs": True}, DRAFTS], ids=str
)
def test_masks_of_the_token_before_are_applied(small: Small, overlap: bool, flags: dict[str, object]) -> None:
    prompts = small.prompts[2:7]
    late = [message(f"late {n}", prompt, 14, namespace=LATE) for n, prompt in enumerate(prompts)]
    free = [message(f"free {n}", prompt, 14) for n, prompt in enumerate(prompts)]
    with engine(small, 16, 64, overlap, kind=WalkingEngine, **flags) as served:
        alone = served.generate(late)
        mixed = served.generate([each for pair in zip(late, free, strict=True) for each in pair])
    expected = [walked(small, prompt, 14) for prompt in prompts]
    assert [result.tokens for result in alone] == expected
    assert [result.tokens for result in mixed[::2]] == expected
    assert [result.tokens for result in mixed[1::2]] == small.tokens[2:7]


def test_the_last_mask_of_a_request_is_not_applied_to_the_next_one_in_its_slot(small: Small) -> None:
    with engine(small, 16, 64, kind=WalkingEngine, max_running_requests=1) as served:
        late = served.generate([message("late", small.prompts[3], 5, namespace=LATE)])
        free = served.generate([message("free", small.prompts[4], 14)])
    assert late[0].tokens == walked(small, small.prompts[3], 5)
    assert free[0].tokens == small.tokens[4]


def test_two_steps_are_in_flight(small: Small) -> None:
    """While the host makes masks, the next forward pass is already submitted: every step is planned with one before."""
    requests = [message("a", small.prompts[3], 14, namespace=LATE), message("b", small.prompts[4], 14)]
    with engine(small, 16, 64, kind=WalkingEngine) as served:
        for request in requests:
            served.send(request)
        planned: list[int] = []
        submit = served._engine.executor.submit
        served._engine.executor.submit = lambda plan: (planned.append(len(served.loop._in_flight)), submit(plan))[1]  # type: ignore[method-assign]
        served.run([request.id for request in requests])
    assert planned[1:] == [1] * (len(planned) - 1)


def test_seeded_sampling_is_the_same_with_overlap(small: Small) -> None:
    results = []
    for overlap in (True, False):
        with engine(small, 16, 64, overlap, kind=WalkingEngine) as served:
            given = [
                message(f"{n}", small.prompts[n], 14, namespace=LATE if n % 2 else "", temperature=1.0, seed=n)
                for n in range(6)
            ]
            results.append([result.tokens for result in served.generate(given)])
    assert results[0] == results[1]
