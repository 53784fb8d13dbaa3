"""Arguments for several devices or replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from srv.args.checks import at_least
from srv.args.spec import Arg


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelArgs:
    """How a model is spread over devices."""

    tp_size: Annotated[
        int,
        Arg(
            "Devices that share each layer (tensor parallelism).",
            at_least(1),
            planned="tensor parallelism is not implemented yet",
            metavar="RANKS",
            aliases=("tensor_parallel_size", "tp"),
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Arg(
            "Replicas of the model (data parallelism).",
            at_least(1),
            planned="data parallelism is not implemented yet",
            metavar="REPLICAS",
            aliases=("data_parallel_size", "dp"),
        ),
    ] = 1
    pp_size: Annotated[
        int,
        Arg(
            "Devices that share the layers among them (pipeline parallelism).",
            at_least(1),
            planned="pipeline parallelism is not implemented yet",
            metavar="STAGES",
            aliases=("pipeline_parallel_size", "pp"),
        ),
    ] = 1
