"""An engine on the device in its asynchronous mode: what is not in order, or is overwritten too early, gives other
tokens. And no step copies from or to ordinary host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from test_toy_engine import EAGER, PLAIN, Small, messages
from test_toy_engine import paged_engine as engine

from srv.platform.transfers import Transfers
from srv.types import Pooling, PoolingParams, RequestSpec
from srv_toy_device.device import Accelerator
from srv_toy_device.platform import ToyPlatform

DRAFTS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def asynchronous(toy: Accelerator) -> Iterator[None]:
    toy.synchronize()
    toy.deferral.enabled = True
    yield
    toy.synchronize()
    toy.deferral.enabled = False


@pytest.mark.parametrize("flags", [(), (EAGER,), (PLAIN,), DRAFTS, ("--chunked-prefill-size", "5")], ids=str)
def test_tokens_are_those_of_the_host_and_no_step_uses_ordinary_memory(
    toy: Accelerator, small: Small, flags: tuple[str, ...]
) -> None:
    with engine(small, *flags) as served:
        before = toy.pageable_copies
        results = served.generate(messages(small))
        assert toy.pageable_copies == before
    assert [result.tokens for result in results] == small.tokens


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "seed": 3, "top_p": 0.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": ((3, 2.0),)},
        {"logprobs": 3, "prompt_logprobs": 2, "min_tokens": 4},
    ],
    ids=lambda params: next(iter(params)),
)
@pytest.mark.parametrize("flags", [(), DRAFTS], ids=["plain", "drafts"])
def test_sampling_is_the_same_as_in_order_and_uses_no_ordinary_memory(
    toy: Accelerator, small: Small, params: dict[str, Any], flags: tuple[str, ...]
) -> None:
    runs = []
    for enabled in (True, False):
        toy.synchronize()
        toy.deferral.enabled = enabled
        with engine(small, *flags) as served:
            before = toy.pageable_copies
            results = served.generate(messages(small, **params))
            if enabled:
                assert toy.pageable_copies == before
        runs.append([(result.tokens, result.logprobs) for result in results])
    assert runs[0] == runs[1]


def test_embeddings_use_no_ordinary_memory(toy: Accelerator, small: Small) -> None:
    ask = PoolingParams(pooling=Pooling.MEAN)
    requests = [RequestSpec(id=str(at), tokens=tuple(prompt), params=ask) for at, prompt in enumerate(small.prompts)]
    with engine(small, "--chunked-prefill-size", "5") as served:
        before = toy.pageable_copies
        vectors = [result.vectors for result in served.generate(requests)]
        assert toy.pageable_copies == before
    assert all(vectors)


def _same_memory_again(self: Transfers) -> None:
    """A ring of one slot, which does not wait for its event."""
    self._arena.reset()


def test_memory_that_is_reused_too_early_gives_other_tokens(
    toy: Accelerator, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes the comparisons above worth something."""
    keep: Callable[..., Any] = Transfers.end

    def end(self: Transfers) -> Any:
        arena = self._arena
        copies = keep(self)
        self._arena = arena
        return copies

    monkeypatch.setattr(Transfers, "begin", _same_memory_again)
    monkeypatch.setattr(Transfers, "end", end)
    with pytest.raises((AssertionError, RuntimeError, IndexError)), engine(small) as served:
        assert [result.tokens for result in served.generate(messages(small))] == small.tokens
    _drain(toy)


def _drain(toy: Accelerator) -> None:
    """Run what is still enqueued, which may have wrong indices."""
    done = False
    while not done:
        with suppress(IndexError):
            toy.synchronize()
            done = True


def test_a_step_that_cannot_begin_leaves_no_slot_behind(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is planned before the failure is known; with the wrong pages it would read outside its tables."""
    begin, calls = Transfers.begin, iter(range(100))

    def fail_once(self: Transfers) -> None:
        if next(calls) == 2:
            raise RuntimeError("the device reports an error")
        begin(self)

    monkeypatch.setattr(Transfers, "begin", fail_once)
    with engine(small, EAGER) as served:
        failed = served.generate(messages(small))
        again = served.generate(messages(small))
    assert any(result.error for result in failed)
    assert [result.tokens for result in again] == small.tokens


# ---- the copies themselves


def test_what_is_copied_to_the_host_is_kept_until_then(toy: Accelerator) -> None:
    platform = ToyPlatform(toy)
    transfers = Transfers(platform, platform.device(0))
    transfers.begin()
    host = transfers.download(torch.ones(4, device="toy") + 1)  # nobody else keeps it
    copies = transfers.end()
    toy.synchronize()  # overwrites memory that was freed
    copies.wait()
    assert host.tolist() == [2.0] * 4
    copies.release()


def test_a_step_has_its_memory_until_its_results_were_read(toy: Accelerator) -> None:
    platform = ToyPlatform(toy)
    transfers = Transfers(platform, platform.device(0))
    steps = []
    for number in range(4):
        transfers.begin()
        uploaded = transfers.upload(torch.full((1000,), float(number)))
        steps.append((transfers.download(uploaded * 2), transfers.end()))
    addresses = {host.data_ptr() for host, _ in steps}
    assert len(addresses) == 4  # none has been released
    for number, (host, copies) in enumerate(steps):
        copies.wait()
        assert host.eq(2.0 * number).all()
        copies.release()
    transfers.begin()
    again = transfers.download(transfers.upload(torch.zeros(1000)))
    assert again.data_ptr() in addresses
    transfers.end().wait()


def test_a_step_takes_more_memory_as_it_needs_it(toy: Accelerator) -> None:
    platform = ToyPlatform(toy)
    transfers = Transfers(platform, platform.device(0))
    transfers.begin()
    sources = [torch.arange(size, dtype=torch.int64) for size in (3, 1 << 18, 0, 5, 1 << 17)]
    uploaded = [transfers.upload(source) for source in sources]
    flags = transfers.upload(torch.tensor([True, False, True]))
    transfers.end().wait()
    assert [tensor.cpu().tolist() for tensor in uploaded] == [source.tolist() for source in sources]
    assert flags.cpu().tolist() == [True, False, True]


def test_uploads_outside_steps_are_not_overwritten(toy: Accelerator) -> None:
    platform = ToyPlatform(toy)
    transfers = Transfers(platform, platform.device(0))
    outside = transfers.upload(torch.tensor([1, 2, 3]))
    transfers.begin()  # waits for it
    inside = transfers.upload(torch.tensor([4, 5, 6]))
    transfers.end().wait()
    assert (outside.cpu().tolist(), inside.cpu().tolist()) == ([1, 2, 3], [4, 5, 6])
