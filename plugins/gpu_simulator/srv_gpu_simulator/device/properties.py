"""The results of `get_device_properties`: the fields of `torch.cuda`'s and of `torch.xpu`'s, with their names."""

from __future__ import annotations

from types import SimpleNamespace

from srv_gpu_simulator.cards import Card

_XVE_PER_CORE = 8  # vector engines (EUs) of one Xe core


def cuda_properties(card: Card, memory: int) -> SimpleNamespace:
    """Fields of `torch.cuda.get_device_properties`, also on ROCm. `gcnArchName` is the card's name for NVIDIA."""
    return SimpleNamespace(
        name=card.device_name,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.processors,
        total_memory=memory,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=1536 if card.key in ("sm86", "sm89", "sm120") else 2048,
        gcnArchName=f"{card.key}:sramecc+:xnack-" if card.vendor == "amd" else card.device_name,
        warp_size=card.warp,
        uuid=f"simulated-{card.key}-0",
        L2_cache_size=card.l2_cache,
        shared_memory_per_block=min(card.shared_memory, 48 << 10) if card.vendor == "nvidia" else card.shared_memory,
        shared_memory_per_block_optin=card.shared_memory,
        shared_memory_per_multiprocessor=card.shared_memory + (1 << 10)
        if card.vendor == "nvidia"
        else card.shared_memory,
    )


def xpu_properties(card: Card, memory: int) -> SimpleNamespace:
    """Fields of `torch.xpu.get_device_properties`; it has no `multi_processor_count`."""
    return SimpleNamespace(
        name=card.device_name,
        platform_name="simulated",
        vendor="Intel(R) Corporation",
        driver_version="simulated",
        version="simulated",
        type="gpu",
        total_memory=memory,
        max_compute_units=card.processors * _XVE_PER_CORE,
        gpu_eu_count=card.processors * _XVE_PER_CORE,
        gpu_subslice_count=card.processors,
        max_work_group_size=1024,
        max_num_sub_groups=64,
        sub_group_sizes=[16, 32],
        local_mem_size=card.shared_memory,
        last_level_cache_size=card.l2_cache,
        has_fp16=True,
        has_fp64=True,
        has_atomic64=True,
        has_bfloat16_conversions=True,
        has_subgroup_matrix_multiply_accumulate=True,
        has_subgroup_2d_block_io=True,
        is_integrated_gpu=False,
        uuid=f"simulated-{card.key}-0",
    )
