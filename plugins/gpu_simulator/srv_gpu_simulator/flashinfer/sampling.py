"""flashinfer.sampling: filters and draws from probabilities, on host views.

A draw depends on seed, offset and row, as FlashInfer's: the same request in another row of the batch gets another
token, also with a seed of its own. Without seeds they come from the device's generator when the function is called, so
a graph would draw the same numbers in each replay: a capture needs seed and offset as tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from srv_gpu_simulator.checks import Rules
from srv_gpu_simulator.device import Accelerator

Filter = Callable[[Tensor], Tensor]


class Sampling:
    """The module `flashinfer.sampling`.

    probs: [rows, vocabulary], used as float32. top_k (int), top_p and min_p (float): a number, or a tensor [rows] on
    the GPU. Samples are int32 [rows].
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def softmax(
        self, logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None
    ) -> Tensor:
        """float32 [rows, vocabulary]: the probabilities of logits / temperature."""
        rules = Rules("softmax")
        self._check_rows(rules, "logits", logits, temperature=temperature)
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)

        def kernel(out: Tensor, logits: Tensor, temperature: Tensor | float | None) -> None:
            divisor = _column(1.0 if temperature is None else temperature)
            out.copy_((logits.float() / divisor).softmax(-1))

        self._accelerator.launch("flashinfer.softmax", kernel, out, logits, temperature)
        return out

    def top_k_renorm_probs(self, probs: Tensor, top_k: Tensor | int) -> Tensor:
        """probs with all but the `top_k` largest of each row set to 0, and the rest scaled to a sum of 1."""
        return self._renormed("top_k_renorm_probs", probs, "top_k", top_k, _keep_top_k)

    def top_p_renorm_probs(self, probs: Tensor, top_p: Tensor | float) -> Tensor:
        """The same, with the smallest set of the most likely tokens whose probabilities have a sum of `top_p`."""
        return self._renormed("top_p_renorm_probs", probs, "top_p", top_p, _keep_top_p)

    def sampling_from_probs(self, probs: Tensor, indices: Tensor | None = None, **options: Any) -> Tensor:
        """One sample per row. options: see `_draw`."""
        return self._draw("sampling_from_probs", probs, indices, [], **options)

    def min_p_sampling_from_probs(
        self, probs: Tensor, min_p: Tensor | float, indices: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Samples of tokens with at least `min_p` times the largest probability of their row."""
        return self._draw("min_p_sampling_from_probs", probs, indices, [("min_p", min_p, _keep_min_p)], **options)

    def top_k_top_p_sampling_from_probs(
        self,
        probs: Tensor,
        top_k: Tensor | int,
        top_p: Tensor | float,
        indices: Tensor | None = None,
        filter_apply_order: str = "top_k_first",
        **options: Any,
    ) -> Tensor:
        """Samples after top-k and top-p: one after the other, or both on the same probabilities ("joint")."""
        rules = Rules("top_k_top_p_sampling_from_probs")
        orders = ("top_k_first", "joint")
        known = filter_apply_order in orders
        rules.require(known, "filter_apply_order", repr(filter_apply_order), f"must be one of {', '.join(orders)}")
        joint = filter_apply_order == "joint"
        filters = [("top_k", top_k, _keep_top_k), ("top_p", top_p, _keep_top_p)]
        return self._draw(rules.function, probs, indices, filters, joint=joint, **options)

    def _check_rows(self, rules: Rules, name: str, values: Tensor, **parameters: Tensor | float | None) -> None:
        rules.on_device(**{name: values})
        rules.dims(name, values, 2)
        for parameter, value in parameters.items():
            if isinstance(value, Tensor):
                rules.on_device(**{parameter: value})
                rules.shape(parameter, value, values.shape[:1])

    def _renormed(self, function: str, probs: Tensor, name: str, value: Tensor | float, keep: Any) -> Tensor:
        self._check_rows(Rules(function), "probs", probs, **{name: value})
        out = torch.empty(probs.shape, dtype=torch.float32, device=probs.device)

        def kernel(out: Tensor, probs: Tensor, value: Tensor | float) -> None:
            probs = probs.float()
            out.copy_(_normed(probs * keep(probs, value)))

        self._accelerator.launch(f"flashinfer.{function}", kernel, out, probs, value)
        return out

    def _draw(
        self,
        function: str,
        probs: Tensor,
        indices: Tensor | None,
        filters: list[tuple[str, Tensor | float, Any]],
        *,
        joint: bool = False,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
        check_nan: bool = False,
        seed: Tensor | int | None = None,
        offset: Tensor | int | None = None,
    ) -> Tensor:
        """Draw one token per row.

        seed, offset: both numbers, or both tensors of int64 [1] or [rows] on the GPU; drawn if left out. indices: int32
        or int64 [samples], the row of probs for each sample.
        """
        rules = Rules(function)
        if indices is None:
            self._check_rows(rules, "probs", probs, **{name: value for name, value, _ in filters})
        else:
            rules.on_device(probs=probs, indices=indices)
            rules.dims("probs", probs, 2)
            rules.dtype("indices", indices.dtype, (torch.int32, torch.int64))
        if check_nan:
            rules.require(not bool(probs.isnan().any()), "probs", "not a number", "must have no NaN")
        rows = probs.shape[0] if indices is None else indices.shape[0]
        seed, offset = self._seeds(rules, rows, generator, seed, offset)
        dtype = torch.int32 if indices is None else indices.dtype
        samples = torch.empty(rows, dtype=dtype, device=probs.device)
        values = [value for _, value, _ in filters]
        keeps = [keep for _, _, keep in filters]

        def kernel(samples: Tensor, probs: Tensor, indices: Tensor | None, values: Any, seed: Any, offset: Any) -> None:
            chosen = probs.float() if indices is None else probs.float()[indices.long()]
            weights = chosen
            for keep, value in zip(keeps, values, strict=True):
                weights = weights * keep(chosen if joint else weights, value)
                weights = weights if joint else _normed(weights)
            samples.copy_(_inverse(weights, _uniform(rows, seed, offset)))

        launch = self._accelerator.launch
        launch(f"flashinfer.{function}", kernel, samples, probs, indices, values, seed, offset)
        return samples

    def _seeds(
        self,
        rules: Rules,
        rows: int,
        generator: torch.Generator | None,
        seed: Tensor | int | None,
        offset: Tensor | int | None,
    ) -> tuple[Tensor | int, Tensor | int]:
        own_generator = self._accelerator.generator
        rules.require(
            generator in (None, own_generator), "generator", "another one", "must be the device's, or left out"
        )
        if seed is None or offset is None:
            rules.require(seed is None and offset is None, "seed", "without offset", "both must be given, or neither")
            self._accelerator.recorder.refuse(rules.function, "pass seed and offset as tensors, or sample afterwards")
            return int(torch.randint(1 << 62, (), generator=own_generator)), 0
        tensors = isinstance(seed, Tensor)
        rules.require(tensors == isinstance(offset, Tensor), "seed", "of another kind", "both tensors, or both numbers")
        if isinstance(seed, Tensor) and isinstance(offset, Tensor):
            for name, value in (("seed", seed), ("offset", offset)):
                rules.on_device(**{name: value})
                rules.dtype(name, value.dtype, (torch.int64, torch.uint64))
                fits = value.dim() == 1 and len(value) in (1, rows)
                rules.require(fits, name, f"of shape {tuple(value.shape)}", f"must have shape (1,) or ({rows},)")
        else:
            self._accelerator.recorder.refuse(rules.function, "pass seed and offset as tensors, or sample afterwards")
        return seed, offset


def _column(value: Tensor | float) -> Any:
    return value[:, None] if isinstance(value, Tensor) else value


def _normed(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def _keep_top_k(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """bool: the `top_k` largest of each row, and those equal to the smallest of them."""
    count = top_k.long() if isinstance(top_k, Tensor) else torch.full(probs.shape[:1], top_k)
    ordered = probs.sort(-1, descending=True).values
    smallest = ordered.gather(1, (count.clamp(1, probs.shape[1]) - 1)[:, None])
    return probs >= smallest


def _keep_top_p(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """bool: the most likely tokens before whose addition the sum is below `top_p`, and those equal to the last."""
    ordered = probs.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    count = (before < _column(top_p)).sum(-1, keepdim=True).clamp(min=1)
    return probs >= ordered.gather(1, count - 1)


def _keep_min_p(probs: Tensor, min_p: Tensor | float) -> Tensor:
    return probs >= probs.amax(-1, keepdim=True) * _column(min_p)


def _uniform(rows: int, seed: Tensor | int, offset: Tensor | int) -> Tensor:
    """float64 [rows] in [0, 1), from seed, offset and the row."""
    generator = torch.Generator()
    seeds = seed.expand(rows).tolist() if isinstance(seed, Tensor) else [seed] * rows
    offsets = offset.expand(rows).tolist() if isinstance(offset, Tensor) else [offset] * rows
    draws = []
    for row, (one, at) in enumerate(zip(seeds, offsets, strict=True)):
        generator.manual_seed(hash((one, at, row)) & ((1 << 63) - 1))
        draws.append(torch.rand((), dtype=torch.float64, generator=generator))
    return torch.stack(draws)


def _inverse(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative probability of its row exceeds `uniform` times the sum."""
    sums = probs.double().cumsum(-1)
    return (sums <= (uniform * sums[:, -1])[:, None]).sum(-1).clamp(max=probs.shape[1] - 1)
