"""Rules for parallelism: divisibility of sizes, and combinations that are not supported."""

from __future__ import annotations

from srv.dist.mesh import Mesh, all_ranks, mesh_of
from srv.dist.placing import device_index
from srv.models.facts.sharding import Divisions, divisions
from srv.platform.facts import Constraint, Default, ResolutionContext
from srv.quantization.registry import method_of

_READ_OF_MODEL = (
    "model_impl",
    "dequantize_weights",
    "ep_size",
    "dp_size",
    "enable_dp_attention",
)


def _machines_divide(context: ResolutionContext) -> str | None:
    ranks, machines = context["tp_size"] * context["pp_size"], context["nnodes"]
    if ranks % machines == 0:
        return None
    return f"{ranks} ranks (tp_size x pp_size) cannot be distributed evenly over {machines} machines"


def _rank_exists(context: ResolutionContext) -> str | None:
    rank, machines = context["node_rank"], context["nnodes"]
    return None if rank < machines else f"with {machines} machines (nnodes) it must be between 0 and {machines - 1}"


def _mesh(context: ResolutionContext) -> Mesh:
    """Without what divides the output layer, which has no further condition."""
    return mesh_of(lambda name: None if name == "enable_dp_lm_head" else context[name])


def _divisions(context: ResolutionContext) -> Divisions | str | None:
    """What the model says of several ranks; None if there is only one, or no model."""
    if context["tp_size"] == 1 or context.model is None:
        return None
    if context["model_impl"] == "transformers":
        return "the layers of transformers cannot be sharded, only native ones (model_impl is transformers)"
    return divisions(context.model, in_blocks=not context["dequantize_weights"])


def _model_divides(context: ResolutionContext) -> str | None:
    """Whether a model that can be sharded can be over `tp_size` ranks."""
    sizes = _divisions(context)
    return _obstacles(sizes, _mesh(context)) if isinstance(sizes, Divisions) and len(sizes.legal_ranks()) > 1 else None


def _obstacles(sizes: Divisions, mesh: Mesh) -> str | None:
    if not (obstacles := sizes.obstacles(mesh)):
        return None
    return f"{'; '.join(obstacles)} (this model allows {', '.join(map(str, sizes.legal_ranks()))})"


def _model_never_divides(context: ResolutionContext) -> str | None:
    """Why no number of ranks is possible but one."""
    sizes = _divisions(context)
    if isinstance(sizes, str):
        return f"{sizes}; with --dequantize-weights it can be divided" if _dequantized_divides(context) else sizes
    return _obstacles(sizes, Mesh(context["tp_size"])) if sizes is not None and len(sizes.legal_ranks()) == 1 else None


def _dequantized_divides(context: ResolutionContext) -> bool:
    """Whether as many ranks can share the weights once the loader has dequantized them."""
    model = context.model
    method = None if model is None or context["model_impl"] == "transformers" else method_of(model)
    if model is None or method is None or not method.dequantizable or context["dequantize_weights"]:
        return False
    sizes = divisions(model, in_blocks=False)
    return isinstance(sizes, Divisions) and not sizes.obstacles(Mesh(context["tp_size"]))


def _enough_devices(context: ResolutionContext) -> str | None:
    ranks, devices = context["tp_size"], context.device.count
    if "host_memory" in context.capabilities or ranks <= devices:
        return None
    return f"each rank needs a device of its own, but there {_are(devices)}"


def _enough_for_replicas(context: ResolutionContext) -> str | None:
    ranks, devices, own = all_ranks(context.__getitem__), context.device.count, context["tp_size"]
    if "host_memory" in context.capabilities or ranks <= devices or own > devices:  # the latter is tp_size's fault
        return None
    return f"{context['dp_size']} replicas have {ranks} ranks (tp_size is {own}), but there {_are(devices)}"


def _no_base_in_host_memory(context: ResolutionContext) -> str | None:
    return None if context["base_device_id"] == 0 else _no_devices(context)


def _no_step_in_host_memory(context: ResolutionContext) -> str | None:
    return None if context["device_id_step"] == 1 else _no_devices(context)


def _no_devices(context: ResolutionContext) -> str | None:
    if "host_memory" not in context.capabilities:
        return None
    return "all ranks of this platform compute in host memory: there are no numbered devices"


def _base_exists(context: ResolutionContext) -> str | None:
    """Why the first rank has no device, or without a step, which is then not at fault, the last one."""
    base, devices = context["base_device_id"], context.device.count
    if base == 0 or "host_memory" in context.capabilities:
        return None
    if base >= devices:
        return f"there {_are(devices)}, and the largest index is {devices - 1}"
    return _last_exists(context) if context["device_id_step"] == 1 else None


def _step_fits(context: ResolutionContext) -> str | None:
    devices = context.device.count
    if context["device_id_step"] == 1 or context["base_device_id"] >= devices:
        return None
    return None if "host_memory" in context.capabilities else _last_exists(context)


def _last_exists(context: ResolutionContext) -> str | None:
    base, step, ranks = context["base_device_id"], context["device_id_step"], all_ranks(context.__getitem__)
    last, devices = device_index(base, step, ranks - 1), context.device.count
    if last < devices or ranks > devices:  # too many ranks are the fault of tp_size
        return None
    placed = f"rank {ranks - 1} would get device {last} (base_device_id {base} + {ranks - 1} x device_id_step {step})"
    return f"{placed}, but there {_are(devices)}, and the largest index is {devices - 1}"


def _are(devices: int) -> str:
    return "is one device" if devices == 1 else f"are {devices} devices"


def _node_of_each_rank(context: ResolutionContext) -> str | None:
    nodes, ranks = context["numa_node"], all_ranks(context.__getitem__)
    if nodes is None or len(nodes) == ranks:
        return None
    return f"the number of its nodes is {len(nodes)}, that of ranks {ranks} (tp_size x dp_size)"


def _pipeline_exclusions(context: ResolutionContext) -> str | None:
    if context["pp_size"] == 1:
        return None
    if not context["disable_overlap_schedule"]:
        return "pipeline stages cannot overlap with scheduling (disable_overlap_schedule is false)"
    if context["speculative_algorithm"] is not None:
        return f"a pipeline cannot verify drafts (speculative_algorithm is {context['speculative_algorithm']})"
    return None


def _replicas_on_one_machine(context: ResolutionContext) -> str | None:
    if context["dp_size"] == 1 or context["nnodes"] == 1 or context["enable_dp_attention"]:
        return None
    return f"replicas on {context['nnodes']} machines need enable_dp_attention"


def _dp_attention_divides(context: ResolutionContext) -> str | None:
    if not context["enable_dp_attention"]:
        return None
    ranks, replicas = context["tp_size"], context["dp_size"]
    if replicas == 1:
        return "there is only one replica (dp_size is 1)"
    return None if ranks % replicas == 0 else f"tp_size {ranks} is not divisible by dp_size {replicas}"


def _dp_attention_excludes(context: ResolutionContext) -> str | None:
    if not context["enable_dp_attention"]:
        return None
    for argument, off, clause in (
        ("speculative_algorithm", None, "replicas do not agree on drafts"),
        ("enable_torch_compile", False, "the function is compiled for the tokens of one replica"),
        ("enable_piecewise_graphs", False, "pieces are captured for the tokens of one replica"),
        ("expert_distribution_recorder_mode", None, "the tokens of all replicas would be counted for each"),
        ("is_embedding", False, "embeddings are computed by one replica alone"),
    ):
        if context[argument] != off:
            return f"{clause} ({argument} is {str(context[argument]).lower()})"
    return None


DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_overlap_schedule",
        lambda context: True if context["pp_size"] > 1 else None,
        "pipeline stages cannot overlap with scheduling",
        reads=("pp_size",),
    ),
    Default(
        "schedule_conservativeness",
        lambda context: 0.3 if context["enable_dp_attention"] else None,
        "with data-parallel attention each replica has its own pool and few requests to fill it",
        reads=("enable_dp_attention",),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "tp_size",
        "not_divisible",
        _model_divides,
        "Choose a number of ranks that the model allows, or leave it at 1.",
        reads=_READ_OF_MODEL,
    ),
    Constraint(
        "tp_size",
        "not_divisible",
        _model_never_divides,
        "Leave it at 1, or set --dequantize-weights if the reason says so.",
        reads=("model_impl", "dequantize_weights"),
    ),
    Constraint(
        "nnodes",
        "not_divisible",
        _machines_divide,
        "Choose a number of ranks that is a multiple of nnodes.",
        reads=("tp_size", "pp_size"),
    ),
    Constraint("node_rank", "rank_missing", _rank_exists, "Number the machines from 0 on.", reads=("nnodes",)),
    Constraint(
        "numa_node",
        "not_one_per_rank",
        _node_of_each_rank,
        "Name one node for each rank, or leave it out.",
        reads=("tp_size", "dp_size", "enable_dp_attention"),
    ),
    Constraint(
        "pp_size",
        "excluded",
        _pipeline_exclusions,
        "Leave the other argument out, or set pp_size to 1.",
        reads=("disable_overlap_schedule", "speculative_algorithm"),
    ),
    Constraint(
        "dp_size",
        "excluded",
        _replicas_on_one_machine,
        "Start one server per machine, or set enable_dp_attention.",
        reads=("nnodes", "enable_dp_attention"),
    ),
    Constraint(
        "enable_dp_attention",
        "not_divisible",
        _dp_attention_divides,
        "Set dp_size above 1, and tp_size to a multiple of it.",
        reads=("tp_size", "dp_size"),
    ),
    Constraint(
        "enable_dp_attention",
        "excluded",
        _dp_attention_excludes,
        "Leave one of the two out.",
        reads=(
            "speculative_algorithm",
            "enable_torch_compile",
            "enable_piecewise_graphs",
            "expert_distribution_recorder_mode",
            "is_embedding",
        ),
    ),
)

# Constraints that apply only if a platform is known.
DEVICE_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("tp_size", "too_few_devices", _enough_devices, "Choose at most one rank per device."),
    Constraint(
        "dp_size",
        "too_few_devices",
        _enough_for_replicas,
        "Choose fewer replicas or ranks, so that each rank has a device.",
        reads=("tp_size", "enable_dp_attention"),
    ),
    Constraint("base_device_id", "no_device_indices", _no_base_in_host_memory, "Leave it out."),
    Constraint("device_id_step", "no_device_indices", _no_step_in_host_memory, "Leave it out."),
    Constraint(
        "base_device_id",
        "too_few_devices",
        _base_exists,
        "Choose a smaller index or fewer ranks, or leave it out.",
        reads=("tp_size", "dp_size", "enable_dp_attention", "device_id_step"),
    ),
    Constraint(
        "device_id_step",
        "too_few_devices",
        _step_fits,
        "Choose a smaller step, a smaller base_device_id or fewer ranks, or leave it out.",
        reads=("base_device_id", "tp_size", "dp_size", "enable_dp_attention"),
    ),
)
