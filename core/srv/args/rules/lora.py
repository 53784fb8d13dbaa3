"""Rules of LoRA adapters: enough must be known before the first one is loaded, and room must be left for all."""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, Seen


def _adapters_wanted(seen: Seen) -> str | None:
    if not seen["lora_paths"] or seen["enable_lora"]:
        return None
    return "requests may name no adapter (enable_lora is false)"


def _room_is_known(seen: Seen) -> str | None:
    if not seen["enable_lora"] or seen["lora_paths"]:
        return None
    missing = [name for name in ("max_lora_rank", "lora_target_modules") if not seen[name]]
    return f"without adapters at the start, nothing else tells {' and '.join(missing)}" if missing else None


def _room_for_all(seen: Seen) -> str | None:
    most, adapters = seen["max_loaded_loras"], seen["lora_paths"] or ()
    if most is None:
        return None
    if most < seen["max_loras_per_batch"]:
        return f"one step may use {seen['max_loras_per_batch']} adapters (max_loras_per_batch)"
    return f"{len(adapters)} adapters are to be loaded (lora_paths)" if most < len(adapters) else None


DEFAULTS: tuple[Default, ...] = (
    Default(
        "enable_lora",
        lambda seen: True if seen["lora_paths"] else None,
        "adapters are to be loaded",
        reads=("lora_paths",),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "lora_paths", "excluded", _adapters_wanted, "Leave enable_lora out, or set it to true.", reads=("enable_lora",)
    ),
    Constraint(
        "enable_lora",
        "other_missing",
        _room_is_known,
        "Give both, or adapters to load with lora_paths.",
        reads=("lora_paths", "max_lora_rank", "lora_target_modules"),
    ),
    Constraint(
        "max_loaded_loras",
        "too_few",
        _room_for_all,
        "Give at least that many, or leave it out.",
        reads=("max_loras_per_batch", "lora_paths"),
    ),
)
