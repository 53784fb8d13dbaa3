"""Arguments that say how weights are found, read, quantized, replaced and kept."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, json_list, json_object, not_empty
from srv.args.spec import Arg

_QUANTIZATION = "weights quantized by that method are not implemented yet"
_LATER = (  # what other servers take
    *("awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "gptq_marlin", "marlin", "modelopt"),
    *("modelopt_fp4", "moe_wna16", "mxfp4", "petit_nvfp4", "qoq", "w4afp8", "w8a8_fp8"),
)
_ROUNDING = "rounding weights that way as they are loaded is not implemented yet"
_ROUNDINGS = (
    *(f"int4wo-{group}" for group in (32, 64, 128, 256)),
    *("fp8wo", "fp8dq-per_tensor", "fp8dq-per_row"),
)
_UPDATES = "replacing weights while the server runs is not implemented yet"
_REMOTE = "taking weights from another running server is not implemented yet"
_OFFLOAD = "keeping weights in host memory is not implemented yet"


class WeightsArgs(NamedTuple):
    """How weights come into memory, and in which form they stay there."""

    model_loader_extra_config: Annotated[
        str,
        Arg(
            "JSON object of settings for the loader of the format.",
            json_object(),
            planned="the loaders take no settings yet",
            metavar="JSON",
        ),
    ] = "{}"
    download_dir: Annotated[
        Path | None,
        Arg(
            "Folder for models that come from a hub.",
            planned="models are kept in the hub library's own folder (HF_HOME); naming another is not implemented yet",
        ),
    ] = None
    weight_loader_disable_mmap: Annotated[
        bool,
        Arg(
            "Read weight files instead of mapping them into memory.",
            planned="weight files are always mapped; reading them is not implemented yet",
        ),
    ] = False
    delete_ckpt_after_loading: Annotated[
        bool, Arg("Delete the model's files once it is loaded.", planned="srv deletes no model files yet")
    ] = False
    quantization: Annotated[
        Literal["gguf", "modelslim", "w8a8_int8"] | None,
        Arg(
            "Method by which the checkpoint's weights are quantized. If it is not set, the checkpoint says it.",
            planned_values=tuple((method, _QUANTIZATION) for method in _LATER),
        ),
    ] = None
    dequantize_weights: Annotated[
        bool,
        Arg("Turn the blocks of a GGUF file into plain numbers while they load; else they are multiplied as they are."),
    ] = False
    quantization_param_path: Annotated[
        Path | None,
        Arg(
            "JSON file with the scales of an 8-bit KV pool.",
            planned="KV pools whose scales come from a file are not implemented yet",
        ),
    ] = None
    torchao_config: Annotated[
        Literal["int8dq", "int8wo"] | None,
        Arg(
            "What the plain weights of layers become as they are loaded, by torchao's names; srv makes it itself: 8 "
            "bits, a scale for each output. int8dq rounds activations too, each token's by the largest of them.",
            planned_values=tuple((method, _ROUNDING) for method in _ROUNDINGS),
            metavar="METHOD",
        ),
    ] = None
    custom_weight_loader: Annotated[
        tuple[str, ...],
        Arg("Functions (module.function) that put new weights into the model.", planned=_UPDATES, metavar="FUNCTION"),
    ] = ()
    weight_version: Annotated[
        str, Arg("Name of the present weights, told to clients.", not_empty(), planned=_UPDATES, metavar="NAME")
    ] = "default"
    remote_instance_weight_loader_seed_instance_ip: Annotated[
        str | None,
        Arg("Address of a running server that sends its weights.", not_empty(), planned=_REMOTE, metavar="ADDRESS"),
    ] = None
    remote_instance_weight_loader_seed_instance_service_port: Annotated[
        int | None, Arg("Port of the server that sends its weights.", between(1, 65535), planned=_REMOTE)
    ] = None
    remote_instance_weight_loader_send_weights_group_ports: Annotated[
        str | None,
        Arg(
            "JSON list of ports over which the ranks receive weights, one a rank.",
            json_list(),
            planned=_REMOTE,
            metavar="JSON",
        ),
    ] = None
    enable_memory_saver: Annotated[
        bool,
        Arg(
            "Let clients make the server give its device memory back, and take it again.",
            planned="giving device memory back while the server runs is not implemented yet",
        ),
    ] = False
    enable_weights_host_backup: Annotated[
        bool,
        Arg(
            "Keep a copy of the weights in host memory while device memory is given back.",
            planned="giving device memory back while the server runs is not implemented yet",
        ),
    ] = False
    host_offload_gb: Annotated[
        int, Arg("Host memory that takes weights in place of the device's.", at_least(0), planned=_OFFLOAD, unit="GB")
    ] = 0
    offload_group_size: Annotated[
        int, Arg("Layers of one group for offloading; -1 offloads none.", at_least(-1), planned=_OFFLOAD, unit="layers")
    ] = -1
    offload_num_in_group: Annotated[
        int, Arg("Layers of each group that are offloaded.", at_least(1), planned=_OFFLOAD, unit="layers")
    ] = 1
    offload_prefetch_step: Annotated[
        int, Arg("How many layers ahead weights are fetched back.", at_least(1), planned=_OFFLOAD, unit="layers")
    ] = 1
    offload_mode: Annotated[
        str, Arg("Where offloaded layers live.", not_empty(), planned=_OFFLOAD, metavar="PLACE")
    ] = "host"
