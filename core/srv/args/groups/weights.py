"""Arguments of weights: how they are loaded, quantized, updated and offloaded."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import at_least, between, json_list, json_object, not_empty
from srv.args.spec import Arg
from srv.quantization.registry import CHECKPOINT_METHODS, ONLINE_METHODS, further_names

_QUANTIZATION = "this quantization method is not implemented yet"
_OTHER_METHODS = (  # methods that other servers support
    *("awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "gptq_marlin", "marlin", "modelopt"),
    *("modelopt_fp4", "moe_wna16", "mxfp4", "petit_nvfp4", "qoq", "w4afp8", "w8a8_fp8"),
)
_ONLINE_QUANTIZATION = "this method of online quantization is not implemented yet"
_OTHER_ONLINE_METHODS = (
    *(f"int4wo-{group}" for group in (32, 64, 128, 256)),
    *("fp8wo", "fp8dq-per_tensor", "fp8dq-per_row"),
)
_UPDATES = "updating weights while the server runs is not implemented yet"
_REMOTE = "loading weights from another running server is not implemented yet"
_OFFLOAD = "offloading weights to host memory is not implemented yet"


class WeightsArgs(NamedTuple):
    """How weights are loaded, and in which form they are kept in memory."""

    model_loader_extra_config: Annotated[
        str,
        Arg(
            "JSON object of settings for the weight loader.",
            json_object(),
            planned="the weight loaders have no settings yet",
            metavar="JSON",
        ),
    ] = "{}"
    download_dir: Annotated[
        Path | None,
        Arg(
            "Folder for models from a hub.",
            planned="models are stored in the hub library's own folder (HF_HOME); another folder is not supported yet",
        ),
    ] = None
    weight_loader_disable_mmap: Annotated[
        bool,
        Arg(
            "Read weight files instead of memory-mapping them.",
            planned="weight files are always memory-mapped; reading them is not implemented yet",
        ),
    ] = False
    delete_ckpt_after_loading: Annotated[
        bool,
        Arg("Delete the model's files after they are loaded.", planned="deleting model files is not implemented yet"),
    ] = False
    quantization: Annotated[
        str | None,
        Arg(
            "Quantization method of the checkpoint's weights; read from the checkpoint if not set.",
            choices=tuple(CHECKPOINT_METHODS),
            further_choices=further_names,
            planned_values=tuple((method, _QUANTIZATION) for method in _OTHER_METHODS),
        ),
    ] = None
    dequantize_weights: Annotated[
        bool,
        Arg("Dequantize GGUF weights while they are loaded, instead of computing with the quantized blocks."),
    ] = False
    quantization_param_path: Annotated[
        Path | None,
        Arg(
            "JSON file with the scales of an 8-bit KV pool.",
            planned="reading KV scales from a file is not implemented yet",
        ),
    ] = None
    torchao_config: Annotated[
        str | None,
        Arg(
            "Online quantization of unquantized linear weights to int8, with one scale per output channel, while they "
            "are loaded: int8wo is weight-only, int8dq also quantizes activations, per token. The names are torchao's; "
            "the implementation is srv's own.",
            choices=tuple(ONLINE_METHODS),
            further_choices=further_names,
            planned_values=tuple((method, _ONLINE_QUANTIZATION) for method in _OTHER_ONLINE_METHODS),
            metavar="METHOD",
        ),
    ] = None
    custom_weight_loader: Annotated[
        tuple[str, ...],
        Arg("Functions (module.function) that load new weights into the model.", planned=_UPDATES, metavar="FUNCTION"),
    ] = ()
    weight_version: Annotated[
        str,
        Arg(
            "Version label of the weights, which is reported to clients.", not_empty(), planned=_UPDATES, metavar="NAME"
        ),
    ] = "default"
    remote_instance_weight_loader_seed_instance_ip: Annotated[
        str | None,
        Arg(
            "Address of a running server from which weights are loaded.",
            not_empty(),
            planned=_REMOTE,
            metavar="ADDRESS",
        ),
    ] = None
    remote_instance_weight_loader_seed_instance_service_port: Annotated[
        int | None, Arg("Port of the server from which weights are loaded.", between(1, 65535), planned=_REMOTE)
    ] = None
    remote_instance_weight_loader_send_weights_group_ports: Annotated[
        str | None,
        Arg(
            "JSON list of ports over which the ranks receive weights, one per rank.",
            json_list(),
            planned=_REMOTE,
            metavar="JSON",
        ),
    ] = None
    enable_memory_saver: Annotated[
        bool,
        Arg(
            "Let clients make the server release its device memory, and allocate it again.",
            planned="releasing device memory while the server runs is not implemented yet",
        ),
    ] = False
    enable_weights_host_backup: Annotated[
        bool,
        Arg(
            "Keep a copy of the weights in host memory while device memory is released.",
            planned="releasing device memory while the server runs is not implemented yet",
        ),
    ] = False
    host_offload_gb: Annotated[
        int, Arg("Size of the weights that are offloaded to host memory.", at_least(0), planned=_OFFLOAD, unit="GB")
    ] = 0
    offload_group_size: Annotated[
        int, Arg("Layers per offloading group; -1 disables offloading.", at_least(-1), planned=_OFFLOAD, unit="layers")
    ] = -1
    offload_num_in_group: Annotated[
        int, Arg("Layers of each group that are offloaded.", at_least(1), planned=_OFFLOAD, unit="layers")
    ] = 1
    offload_prefetch_step: Annotated[
        int,
        Arg("Number of layers whose weights are prefetched ahead.", at_least(1), planned=_OFFLOAD, unit="layers"),
    ] = 1
    offload_mode: Annotated[
        str, Arg("Where offloaded layers are kept.", not_empty(), planned=_OFFLOAD, metavar="PLACE")
    ] = "host"
