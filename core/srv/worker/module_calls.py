"""What debugging does with the output of a model's modules: dumps, forward hooks, and the search for the first NaN.

    module.forward ──► output ──► hooks ──► NaN search ──► dump ──► the next module

Each wraps `forward` of the modules that it concerns, as `srv.worker.markers` does; without these arguments nothing is
wrapped, and nothing is paid. Modules run only in eager steps, so that graphs and compilation are refused beside them
(`srv.args.rules.debugging`), but for the NaN search, which then sees the other steps only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from srv.args.groups.debug import DebugArgs
from srv.errors import ModelError
from srv.models.base import CausalLM
from srv.platform.forward_hooks import AfterModule, make_hook, read_hooks
from srv.sched.plan import Plan
from srv.worker.tensor_dump import TensorDump

logger = logging.getLogger(__name__)


class ModuleCalls:
    """What the arguments ask for, of one rank. Wraps the modules of `model`."""

    def __init__(self, debug: DebugArgs, model: CausalLM, rank: int) -> None:
        modules = model.marked_modules()
        self.dump = TensorDump(debug, rank) if debug.debug_tensor_dump_output_folder is not None else None
        self._nan = NanSearch() if debug.enable_nan_detection else None
        for wanted in read_hooks(debug.forward_hooks) if debug.forward_hooks is not None else ():
            chosen = _matching(modules, wanted.modules, wanted.hook)
            _wrap(chosen, make_hook(wanted))
            logger.info("the forward hook %s is called after %d modules", wanted.hook, len(chosen))
        if self._nan is not None:
            _wrap(modules, self._nan.after)
        if self.dump is not None:
            _wrap(modules, self.dump.after)

    @contextmanager
    def step(self, plan: Plan) -> Iterator[None]:
        """Around the launch of a step."""
        if self.dump is not None:
            self.dump.begin(plan)
        if self._nan is not None:
            self._nan.begin()
        try:
            yield
        finally:
            if self.dump is not None:
                self.dump.end()
            if self._nan is not None:
                self._nan.report(plan.step)


def module_calls(debug: DebugArgs, model: CausalLM, rank: int) -> ModuleCalls | None:
    """None if no argument asks for anything."""
    wanted = debug.debug_tensor_dump_output_folder or debug.enable_nan_detection or debug.forward_hooks
    return ModuleCalls(debug, model, rank) if wanted else None


class NanSearch:
    """Finds the first module of a step whose output has a NaN. The flags stay on the device until the step's end."""

    def __init__(self) -> None:
        self._flags: list[tuple[str, torch.Tensor]] | None = None  # None outside of steps, as while graphs are captured

    def begin(self) -> None:
        self._flags = []

    def after(self, name: str, inputs: tuple[Any, ...], output: Any) -> None:
        if self._flags is None or torch.compiler.is_compiling():
            return
        for tensor in tensors_of(output):
            if tensor.is_floating_point():
                self._flags.append((name, tensor.isnan().any()))

    def report(self, step: int) -> None:
        """Log the first module; one read of the device."""
        flags, self._flags = self._flags, None
        if not flags:
            return
        found = torch.stack([flag for _, flag in flags]).tolist()
        if True in found:
            name = flags[found.index(True)][0]
            logger.error("NaN in step %d: the first module whose output has one is %s", step, name)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of a module's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, tuple | list):
        return [tensor for each in output for tensor in tensors_of(each)]
    return []


def _matching(modules: Mapping[str, nn.Module], patterns: tuple[str, ...], hook: str) -> dict[str, nn.Module]:
    found = {name: each for name, each in modules.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not found:
        some = ", ".join(list(modules)[:5])
        raise ModelError(
            "no_such_module",
            f"forward hook {hook}",
            f"no module is called {' or '.join(patterns)}; the model has {some}, ...",
            "Change target_modules of --forward-hooks",
        )
    return found


def _wrap(modules: Mapping[str, nn.Module], after: AfterModule) -> None:
    for name, module in modules.items():
        module.forward = _followed(module.forward, name, after)


def _followed(forward: Callable[..., Any], name: str, after: AfterModule) -> Callable[..., Any]:
    def followed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        changed = after(name, args, output)
        return output if changed is None else changed

    return followed
