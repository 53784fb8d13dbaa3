"""Arguments of weights: how they are loaded, quantized, updated and offloaded."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import at_least, at_least_or, json_object
from srv.args.spec import Arg
from srv.quantization.registry import CHECKPOINT_METHODS, ONLINE_METHODS, SYNONYMS, further_names, undocumented_names

_QUANTIZATION = "this quantization method is not implemented yet"
_OTHER_METHODS = ("petit_nvfp4", "qoq", "w4afp8")  # that other servers support
_ONLINE_QUANTIZATION = "this method of online quantization is not implemented yet"
_OTHER_ONLINE_METHODS = (
    *(f"int4wo-{group}" for group in (32, 64, 128, 256)),
    *("fp8dq-per_tensor", "fp8dq-per_row"),
)
_UPDATES = "updating weights while the server runs is not implemented yet"
_REMOTE = "loading weights from another running server is not implemented yet"


class WeightsArgs(NamedTuple):
    """How weights are loaded, and in which form they are kept in memory."""

    model_loader_extra_config: Annotated[
        str,
        Arg(
            "JSON object of settings for the weight loader: with enable_multithread_load true, num_threads (8 if not"
            " set) threads convert and copy tensors at a time.",
            json_object(),
            metavar="JSON",
        ),
    ] = "{}"
    download_dir: Annotated[
        Path | None,
        Arg("Folder to which models from a hub are downloaded, and in which they are found; if not set, HF_HOME."),
    ] = None
    weight_loader_disable_mmap: Annotated[
        bool,
        Arg("Read each tensor from the weight files instead of mapping the files into memory."),
    ] = False
    delete_ckpt_after_loading: Annotated[
        bool,
        Arg(
            "Delete the model's safetensors files when the engine is ready, so that the next start needs them again."
            " Other files stay."
        ),
    ] = False
    quantization: Annotated[
        str | None,
        Arg(
            "Quantization method of the checkpoint's weights; read from the checkpoint if not set. fp8 and w8a8_int8 "
            "quantize the linear weights of an unquantized checkpoint while they are loaded, with one scale per output "
            "channel; w8a8_int8 also quantizes activations, per token, as --torchao-config int8dq does. The names that "
            "other servers have for kernels (awq_marlin, gptq_marlin, marlin, moe_wna16, w8a8_fp8, modelopt_fp8, "
            "modelopt_fp4) mean the method whose weights they read.",
            choices=tuple(CHECKPOINT_METHODS),
            further_choices=undocumented_names,
            synonyms=tuple(SYNONYMS.items()),
            planned_values=tuple((method, _QUANTIZATION) for method in _OTHER_METHODS),
        ),
    ] = None
    dequantize_weights: Annotated[
        bool,
        Arg(
            "Dequantize the weights of a quantized checkpoint while they are loaded, by the formula of its format in "
            "float32, rounded once to --dtype, instead of computing with the quantized ones."
        ),
    ] = False
    quantization_param_path: Annotated[
        Path | None,
        Arg(
            "JSON file with the scales of a KV pool of 8-bit floats, one per layer for keys and values "
            "(kv_cache.scaling_factor by rank and layer); they override those of the checkpoint.",
            metavar="FILE",
        ),
    ] = None
    calculate_kv_scales: Annotated[
        bool,
        Arg(
            "Calculate the scales of a KV pool of 8-bit floats at start, from the keys and values of a fixed sequence "
            "of tokens; they override those of the checkpoint.",
        ),
    ] = False
    torchao_config: Annotated[
        str | None,
        Arg(
            "Online quantization of unquantized linear weights to 8 bits, with one scale per output channel, while "
            "they are loaded: int8wo and fp8wo are weight-only, int8dq also quantizes activations, per token. The "
            "names are torchao's; the implementation is srv's own.",
            choices=tuple(ONLINE_METHODS),
            further_choices=further_names,
            planned_values=tuple((method, _ONLINE_QUANTIZATION) for method in _OTHER_ONLINE_METHODS),
            metavar="METHOD",
        ),
    ] = None
    custom_weight_loader: Annotated[
        tuple[str, ...],
        Arg(
            "Weight loaders of installed packages, by the names of their entry points, which together give all weights "
            "of the model in place of its files. They run in each worker. Paths and modules are not accepted.",
            metavar="NAME",
        ),
    ] = ()
    weight_version: Annotated[
        str,
        Arg("Version label of the weights, which is reported to clients.", planned=_UPDATES, metavar="NAME"),
    ] = "default"
    remote_instance_weight_loader_seed_instance_ip: Annotated[
        str | None,
        Arg(
            "Address of a running server from which weights are loaded.",
            planned=_REMOTE,
            metavar="ADDRESS",
        ),
    ] = None
    remote_instance_weight_loader_seed_instance_service_port: Annotated[
        int | None, Arg("Port of the server from which weights are loaded.", planned=_REMOTE)
    ] = None
    remote_instance_weight_loader_send_weights_group_ports: Annotated[
        str | None,
        Arg(
            "JSON list of ports over which the ranks receive weights, one per rank.",
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
        int,
        Arg(
            "Layers with up to this size of weights, as the device would hold them, are kept in host memory, evenly"
            " spread over the model, and copied to buffers on the device before they are needed.",
            at_least(0),
            unit="GiB",
        ),
    ] = 0
    offload_group_size: Annotated[
        int,
        Arg(
            "Layers per group, of each of which the last --offload-num-in-group are kept in host memory.",
            at_least_or(1, -1, "none are"),
            unit="layers",
        ),
    ] = -1
    offload_num_in_group: Annotated[
        int,
        Arg(
            "Layers of each group that are kept in host memory.",
            at_least(1),
            only_with=("offload_group_size",),
            unit="layers",
        ),
    ] = 1
    offload_prefetch_step: Annotated[
        int,
        Arg(
            "Number of layers in host memory whose weights are copied to the device ahead of the one that computes;"
            " there is one buffer more than that.",
            at_least(1),
            only_with=("host_offload_gb", "offload_group_size"),
            unit="layers",
        ),
    ] = 1
    offload_mode: Annotated[
        str,
        Arg(
            "Where offloaded layers are kept; host: in page-locked memory of this process.",
            planned="layers are kept in page-locked host memory so far, and nowhere else",
            metavar="PLACE",
        ),
    ] = "host"
