"""What is configured for all replicas together, as one of them has it. Torch-free."""

from __future__ import annotations

from srv.args.config import Config
from srv.dist.mesh import mesh_of


def of_replica(config: Config) -> Config:
    """The configuration of one replica: with data-parallel attention, the limits of requests count all replicas."""
    replicas, schedule = mesh_of(config.get).replicas, config.schedule
    if replicas == 1:
        return config
    chunk = schedule.chunked_prefill_size
    own = schedule._replace(
        max_running_requests=max(1, schedule.max_running_requests // replicas),
        chunked_prefill_size=chunk if chunk < 0 else max(1, chunk // replicas),
    )
    return config._replace(schedule=own)
