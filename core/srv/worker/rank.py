"""The worker of one rank: it owns the rank's platform, device, model, KV pool, backends and runner.

It is made from the engine's `EngineSpec` and prepared in three steps (load, measure, allocate), so that the engine can
compute one memory budget from the measurements of all ranks in between. It must not know the scheduler, nor in which
process it runs.
"""

from __future__ import annotations

from srv.commands import Answer, Command, ReadMemory, StartProfile, StopProfile
from srv.dist.group import RankGroup
from srv.dist.mesh import rank_on_host
from srv.executor.protocol import Allocation, Launched, RankMemory
from srv.executor.spec import EngineSpec
from srv.io.memory_lines import ACTIVATIONS
from srv.planning.budget import Budget
from srv.sched.late import LateInputs
from srv.sched.plan import Plan
from srv.worker.allocate import allocate
from srv.worker.expert_counts import ExpertRecorder
from srv.worker.load import LoadedRank, leave_groups, load
from srv.worker.module_calls import module_calls
from srv.worker.profiler import RankProfiler
from srv.worker.runner import Runner
from srv.worker.start import RankStart

NO_RECORDER = "the server was started without --expert-distribution-recorder-mode"


class RankWorker:
    """One rank of the engine that `spec` describes. Implements `srv.executor.protocol.Worker`.

    `group`: the ranks that the model is sharded over, of which this is one. `loaded` exists once `load` has returned,
    and `runner` once `allocate` has.
    """

    loaded: LoadedRank
    runner: Runner

    def __init__(self, spec: EngineSpec, group: RankGroup = RankGroup()) -> None:  # noqa: B008 - immutable
        self._spec, self._group = spec, group
        self.start = RankStart(spec)
        self._number = rank_on_host(spec.config.get, spec.replica, group)  # which its files are named by
        self._profiler = RankProfiler(self._number)
        self._recorder: ExpertRecorder | None = None

    def load(self) -> None:
        self.loaded = load(self._spec, self._group, self.start)
        self._calls = module_calls(self._spec.config.debug, self.loaded.model, self._number)

    def measure(self) -> RankMemory:
        loaded = self.loaded
        memory = loaded.platform.memory(loaded.device)
        return RankMemory(str(loaded.device), memory.free, memory.total, loaded.weight_bytes)

    def allocate(self, budget: Budget) -> Allocation:
        self.runner, self._recorder, allocation = allocate(self.loaded, budget, self.start)
        return allocation

    # A thread of its own may launch steps, and the current device is that of a thread: `use` selects it.

    def launch(self, plan: Plan) -> Launched | None:
        with self.start.guard(ACTIVATIONS), self.loaded.transfers.streams.compute.use():
            if self._calls is None:
                return self.runner.launch(plan)
            with self._calls.step(plan):
                return self.runner.launch(plan)

    def sample(self, step: int, late: LateInputs) -> Launched:
        with self.start.guard(ACTIVATIONS), self.loaded.transfers.streams.compute.use():
            return self.runner.sample(step, late)

    def control(self, command: Command) -> Answer:
        if isinstance(command, ReadMemory):
            return Answer(peak_bytes=self.start.peak_of_steps())
        if isinstance(command, StartProfile | StopProfile):
            return self._profiler.run(command)
        return Answer(error=NO_RECORDER) if self._recorder is None else self._recorder.run(command)

    def close(self) -> None:
        """Leave the group. Only ranks in processes of their own need it."""
        loaded = getattr(self, "loaded", None)
        if loaded is not None:
            leave_groups(loaded.groups)
