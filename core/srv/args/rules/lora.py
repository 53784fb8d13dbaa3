"""Rules for LoRA adapters: their sizes must be known at start-up, and the limits must allow all adapters."""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, ResolutionContext


def _lora_enabled(context: ResolutionContext) -> str | None:
    if not context["lora_paths"] or context["enable_lora"]:
        return None
    return "requests cannot use adapters (enable_lora is false)"


def _sizes_known(context: ResolutionContext) -> str | None:
    if not context["enable_lora"] or context["lora_paths"]:
        return None
    missing = [name for name in ("max_lora_rank", "lora_target_modules") if not context[name]]
    return f"no adapters are loaded at start-up, and {' and '.join(missing)} must be set" if missing else None


def _limit_suffices(context: ResolutionContext) -> str | None:
    limit, adapters = context["max_loaded_loras"], context["lora_paths"] or ()
    if limit is None:
        return None
    if limit < context["max_loras_per_batch"]:
        return f"one step may use {context['max_loras_per_batch']} adapters (max_loras_per_batch)"
    return f"{len(adapters)} adapters are loaded at start-up (lora_paths)" if limit < len(adapters) else None


DEFAULTS: tuple[Default, ...] = (
    Default(
        "enable_lora",
        lambda context: True if context["lora_paths"] else None,
        "lora_paths names adapters",
        reads=("lora_paths",),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "lora_paths", "excluded", _lora_enabled, "Leave enable_lora out, or set it to true.", reads=("enable_lora",)
    ),
    Constraint(
        "enable_lora",
        "other_missing",
        _sizes_known,
        "Set both, or name adapters with lora_paths.",
        reads=("lora_paths", "max_lora_rank", "lora_target_modules"),
    ),
    Constraint(
        "max_loaded_loras",
        "too_few",
        _limit_suffices,
        "Set it to at least that number, or leave it out.",
        reads=("max_loras_per_batch", "lora_paths"),
    ),
)
