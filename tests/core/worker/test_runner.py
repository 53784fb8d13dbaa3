"""A launched step: its staging memory, whatever becomes of its results."""

from __future__ import annotations

import pytest
import torch

from srv.models.base import ModelInputs
from srv.platform.streams import HostStream
from srv.platform.transfers import StepCopies
from srv.sched.plan import Plan
from srv.worker.batch import Inputs
from srv.worker.runner import LaunchedStep


def test_a_step_whose_results_cannot_be_read_gives_its_memory_back() -> None:
    released: list[bool] = []
    tokens = torch.zeros(0, dtype=torch.int64)
    inputs = Inputs(ModelInputs(tokens, tokens), [], [], None, sampled=[0], scores=[], vectors={})
    copies = StepCopies(HostStream().record(), lambda: released.append(True))
    step = LaunchedStep(Plan(step=1, starts=(), rows=(), ends=()), inputs, None, (), None, copies, way="eager")
    with pytest.raises(ValueError, match="zip"):
        step.collect()
    assert released == [True]
