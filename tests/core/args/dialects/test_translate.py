"""Whole command lines of other engines: their translation, refusals with reasons, and never a traceback."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml
from dialects_reference import RTP_LLM_PAGE
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from srv.args.cli import add_arguments
from srv.args.config import ARGUMENTS
from srv.args.dialects import DIALECTS, DialectRow, Translation, read_dialect, translate
from srv.args.parser import Parser
from srv.args.sources import gather
from srv.args.yaml import read_text

GIB = 2**30
SAMPLES = ("true", "false", "0", "1", "2", "8", "mtp", "info", "a", '{"a": "/x"}', "4GB")


def line(words: str) -> list[str]:
    return words.split()


def memory(device: str | None) -> int | None:
    return 64 * GIB


def one(dialect: str, *words: str) -> Translation:
    """A translation without refusals."""
    translation = translate(dialect, words, memory)
    assert translation.rejections == ()
    return translation


def values(dialect: str, *words: str) -> dict[str, object]:
    return one(dialect, *words).values


def codes(dialect: str, *words: str) -> list[str]:
    return [rejection.code for rejection in translate(dialect, words).rejections]


def parsed_by_srv(words: list[str]) -> dict[str, object]:
    """The values that `srv` parses from these words, all of which must be known."""
    parser = Parser(prog="srv launch")
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args(words, argparse.Namespace())
    assert unknown == []
    parsed = gather(namespace, {})
    assert parsed.rejections == ()
    return {
        statement.argument: ARGUMENTS[statement.argument].kind.dump(statement.value) for statement in parsed.statements
    }


@every("flag", sorted({flag for flag, _ in RTP_LLM_PAGE}))
def test_every_row_of_the_page_is_translated_or_refused_with_a_remedy(flag: str) -> None:
    row = read_dialect("rtp-llm").by_flag[flag.replace("_", "-")]
    accepted = 0
    for text in (*SAMPLES, *row.values):
        translation = translate("rtp-llm", [flag, text], memory)
        accepted += not translation.rejections
        for rejection in translation.rejections:
            assert rejection.code not in ("unknown_flag", "missing_value")
            assert rejection.reason
            assert rejection.remedy.endswith((".", ".)"))
    assert accepted or row.refused


@every("flag", sorted({flag for flag, _ in RTP_LLM_PAGE}))
def test_both_spellings_of_a_flag_are_one(flag: str) -> None:
    stem = flag.removeprefix("--")
    spelled = ["--" + stem.replace("-", "_"), "--" + stem.replace("_", "-")]
    outcomes = [translate("rtp-llm", [name, "1"], memory) for name in spelled]
    assert outcomes[0].words == outcomes[1].words
    assert [rejection.code for rejection in outcomes[0].rejections] == [
        rejection.code for rejection in outcomes[1].rejections
    ]


@every(("flag", "default"), [pair for pair in RTP_LLM_PAGE if pair[1] != "None"])
def test_defaults_of_rtp_llm_are_never_refused(flag: str, default: str) -> None:
    assert translate("rtp-llm", [flag, default], memory).rejections == ()


SWITCHES = [
    ("rtp-llm", "--reuse-cache", "disable_radix_cache", True),
    ("rtp-llm", "--ft-disable-custom-ar", "disable_custom_all_reduce", False),
    ("rtp-llm", "--check-nan", "enable_nan_detection", False),
    ("vllm", "--enable-prefix-caching", "disable_radix_cache", True),
    ("vllm", "--async-scheduling", "disable_overlap_schedule", True),
    ("vllm", "--disable-log-requests", "log_requests", True),
    ("vllm", "--enable-lora", "enable_lora", False),
    ("sglang", "--enable-overlap-schedule", "disable_overlap_schedule", True),
    ("sglang", "--disable-cuda-graph-padding", "disable_graph_padding", False),
]


@every(("dialect", "flag", "argument", "turned"), SWITCHES)
def test_negations_of_switches(dialect: str, flag: str, argument: str, turned: bool) -> None:
    negated = "--no-" + flag.removeprefix("--")
    for words, meant in (([flag], True), ([flag, "true"], True), ([f"{flag}=0"], False), ([negated], False)):
        assert values(dialect, *words) == {argument: meant is not turned}, words


@every("dialect", DIALECTS)
def test_every_switch_of_a_dialect_can_be_negated(dialect: str) -> None:
    """If a switch is repeated with opposite values, the last one wins."""
    for row in read_dialect(dialect).rows:
        if row.takes == "switch" and row.to and row.conversion in ("same", "opposite"):
            on, off = (values(dialect, row.name, text)[row.to] for text in ("true", "false"))
            assert {on, off} == {True, False}
            again = one(dialect, row.name, "true", row.name, "false")
            assert again.values == {row.to: off}
            assert any("more than once" in note for note in again.notes)


def test_long_command_line_of_rtp_llm(tmp_path: Path) -> None:
    words = line(
        "python -m rtp_llm.start_server --checkpoint_path /models/m --tp_size 4 --dp_size 2 --ep_size 0 --world_size 8"
        " --local_world_size 4 --world_rank 4 --concurrency_limit 64 --reuse_cache 1 --max_batch_size 48"
        " --device_reserve_memory_bytes -6871947673 --enable_fast_gen 1 --fast_gen_context_budget 4096"
        " --sp_type mtp --gen_num_per_cycle 3 --eplb_mode ALL --redundant_expert 16 --use_deepep_moe=True"
        " --use_deepep_low_latency False --log_level WARN --m_split 0 --rank_factor 1 --load_balance 1"
    )
    translation = one("rtp-llm", *words)
    assert translation.command == (
        "srv launch --model-path /models/m --tp-size 4 --dp-size 2 --ep-size 8 --nnodes 2 --node-rank 1"
        " --max-queued-requests 16 --max-running-requests 48 --mem-fraction-static 0.9 --chunked-prefill-size 4096"
        " --speculative-algorithm NEXTN --speculative-num-steps 3 --enable-eplb --enable-expert-distribution-metrics"
        " --ep-num-redundant-experts 16 --moe-a2a-backend deepep --deepep-mode normal --log-level warning"
        " --load-balance-method shortest_queue"
    )
    assert "\n".join(translation.notes) == (
        "--ep_size 0: ep_size = 8 (= 4 x 2)\n"
        "--world_size 8: dp_size = 2 (8 devices, 4 per replica)\n"
        "--local_world_size 4: nnodes = 2 (8 devices, 4 per node)\n"
        "--world_rank 4: node_rank = 1 (start srv once per node, not once per rank)\n"
        "--concurrency_limit 64: max_queued_requests = 16 (48 requests run, the others wait)\n"
        "--reuse_cache true: disable_radix_cache = false\n"
        "--device_reserve_memory_bytes -6871947673: mem_fraction_static = 0.9 (of 64.00 GiB; the fraction is for"
        " weights and KV pool; the temporary memory of a step is additional)\n"
        "--enable_fast_gen true: this is the default of srv\n"
        "--sp_type mtp: speculative_algorithm = NEXTN\n"
        "--eplb_mode ALL: enable_eplb = true, enable_expert_distribution_metrics = true\n"
        "--use_deepep_moe true: moe_a2a_backend = deepep\n"
        "--use_deepep_low_latency false: deepep_mode = normal\n"
        "--log_level WARN: log_level = warning\n"
        "--m_split 0: no setting is needed\n"
        "--rank_factor 1: load_balance_method = shortest_queue\n"
        "--load_balance true: --rank-factor determines it\n"
        "without --host, RTP-LLM has 0.0.0.0 and srv 127.0.0.1: set --host 0.0.0.0 to keep it\n"
        "without --port, RTP-LLM has 8088 and srv 30000: set --port 8088 to keep it"
    )
    # only a file can set a switch to its default false
    assert {**parsed_by_srv(translation.words), "disable_radix_cache": False} == translation.values
    written = yaml.safe_dump(translation.values)
    statements, rejections = read_text(written, tmp_path / "serve.yaml")
    assert rejections == []
    assert {
        statement.argument: ARGUMENTS[statement.argument].kind.dump(statement.value) for statement in statements
    } == translation.values


def test_command_line_of_vllm() -> None:
    draft = '{"method": "eagle3", "model": "x/draft", "num_speculative_tokens": 3}'
    translation = one(
        "vllm",
        *("vllm", "serve", "x/model", "-tp", "4", "-q", "awq", "--max-model-len", "32K", "-O3", "--enforce-eager"),
        *("--gpu-memory-utilization=0.85", "--enable-expert-parallel", "--no-enable-prefix-caching"),
        *("--num-gpu-blocks-override", "100", "--block-size", "32", "--speculative-config", draft),
        *("--master-addr", "10.0.0.1", "--cudagraph-capture-sizes", "1", "2", "4", "--scheduling-policy", "priority"),
        *("--otlp-traces-endpoint", "h:1", "--served-model-name", "m", "--swap-space", "4"),
    )
    assert parsed_by_srv(translation.words) == translation.values
    assert translation.values == {
        "model_path": "x/model",
        "tp_size": 4,
        "quantization": "awq",
        "context_length": 32768,
        "disable_graphs": True,
        "mem_fraction_static": 0.85,
        "ep_size": 4,
        "disable_radix_cache": True,
        "max_total_tokens": 3200,
        "page_size": 32,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "x/draft",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "dist_init_addr": "10.0.0.1:29501",
        "graph_batch_sizes": [1, 2, 4],
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        "oltp_traces_endpoint": "h:1",
        "enable_trace": True,
        "served_model_name": "m",
    }


def test_command_line_of_sglang() -> None:
    translation = one(
        "sglang",
        *line("python -m sglang.launch_server --model-path m --tp 4 --cuda-graph-max-bs 32 --disable-cuda-graph"),
        *line("--enable-ep-moe --schedule-heuristic lpm --tool-call-parser qwen25 --config more.yaml"),
        *line("--custom-weight-loader a.b c.d --hybrid-kvcache-ratio --chunked-prefill-size -1 --dtype half"),
    )
    assert translation.values == {
        "model_path": "m",
        "tp_size": 4,
        "graph_max_batch_size": 32,
        "disable_graphs": True,
        "ep_size": 4,
        "schedule_policy": "lpm",
        "tool_call_parser": "qwen",
        "custom_weight_loader": ["a.b", "c.d"],
        "hybrid_kvcache_ratio": 0.5,
        "chunked_prefill_size": -1,
        "dtype": "float16",
    }
    assert translation.passthrough == ("--config", "more.yaml")
    assert "--cuda-graph-max-bs: called --graph-max-batch-size in srv" in translation.notes
    assert any(note.startswith("--enable-ep-moe: deprecated") for note in translation.notes)
    assert "--config" in translation.words


@every(
    ("dialect", "flag", "nearest"),
    [
        ("rtp-llm", "--reuse-cach", "--reuse-cache"),
        ("vllm", "--max-num-seq", "--max-num-seqs"),
        ("sglang", "--mem-fraction-statics", "--mem-fraction-static"),
        ("sglang", "--schedule-heuristics", "--schedule-heuristic"),
    ],
)
def test_unknown_flag_names_the_nearest_of_its_engine(dialect: str, flag: str, nearest: str) -> None:
    (rejected,) = translate(dialect, [flag, "1"]).rejections
    assert rejected.code == "unknown_flag"
    assert rejected.remedy == f"Did you mean {nearest}?"
    assert rejected.what == flag


def test_arguments_of_srv_may_be_mixed_in() -> None:
    translation = one("rtp-llm", "--device", "npu:a3", "--tp_size", "2", "--no-enable-metrics")
    assert translation.words == ["--device", "npu:a3", "--tp-size", "2", "--no-enable-metrics"]
    assert "--device, --no-enable-metrics: an argument of srv itself, used unchanged" in translation.notes


def test_defaults_that_differ_are_noted_unless_they_are_set() -> None:
    """SGLang's address is that of srv; the other engines listen on every network."""
    assert one("sglang", "--model", "x/m").notes == ("--model: called --model-path in srv",)
    assert one("vllm", "x/m", "--host", "10.0.0.1", "--port", "8000").notes == ()
    (note,) = one("vllm", "x/m", "--host", "0.0.0.0").notes
    assert note == "without --port, vLLM has 8000 and srv 30000: set --port 8000 to keep it"


def test_kv_both_is_refused_between_servers_and_noted_for_a_cache_tier() -> None:
    pages = '{"kv_connector": "%s", "kv_role": "kv_both"}'
    refused = translate("vllm", ["x/m", "--kv-transfer-config", pages % "NixlConnector"])
    assert [rejection.code for rejection in refused.rejections] == ["no_equivalent_value"]
    assert "kv_role" in refused.rejections[0].reason
    kept = one("vllm", "x/m", "--kv-transfer-config", pages % "LMCacheConnectorV1")
    assert kept.values["enable_lmcache"] is True
    assert "key kv_role: LMCache both stores and loads pages" in kept.notes[0]


def test_memory_is_that_of_the_device_on_the_command_line() -> None:
    devices: list[str | None] = []

    def remember(device: str | None) -> int:
        devices.append(device)
        return 64 * GIB

    words = ["--device", "npu:a3", "--device-reserve-memory-bytes", str(32 * GIB)]
    assert translate("rtp-llm", words, remember).values["mem_fraction_static"] == 0.5
    assert translate("rtp-llm", ["--tp-size", "2"], remember).values == {"tp_size": 2}
    assert devices == ["npu:a3"]


def test_flags_that_contradict_each_other_are_refused_together() -> None:
    (rejected,) = translate("rtp-llm", ["--dp_size", "4", "--world_size", "2"]).rejections
    assert str(rejected) == (
        "--world_size (set by command line, as RTP-LLM): it sets dp_size = 2, but --dp_size sets dp_size = 4."
        " Leave out one of the two. [contradiction]"
    )


def test_texts_of_refusals() -> None:
    words = line("--enable-trt-fmha false --m_split 2 --device_reserve_memory_bytes 1GB --eplb_mode SOME --tp_size")
    assert "\n".join(str(rejection) for rejection in translate("rtp-llm", words).rejections) == (
        "--tp_size (set by command line, as RTP-LLM): no value follows it. Write its value after it, or leave it out."
        " [missing_value]\n"
        "--enable-trt-fmha = false (set by command line, as RTP-LLM): srv has no equivalent value. Instead of excluding"
        " a backend, select the one for prefill: --prefill-attention-backend NAME (`srv plan` lists them)."
        " [no_equivalent_value]\n"
        "--m_split = 2 (set by command line, as RTP-LLM): the kernel decides into how many parts a matrix product is"
        " split. Leave it out; --enable-two-batch-overlap overlaps the two halves of a batch. [no_equivalent]\n"
        "--device_reserve_memory_bytes = 1GB (set by command line, as RTP-LLM): mem_fraction_static is a fraction of"
        " the device memory, and the device is not known. Name the device (--device NAME:PROFILE,memory=64GiB), or set"
        " --mem-fraction-static instead. [needs_device_memory]\n"
        "--eplb_mode = SOME (set by command line, as RTP-LLM): srv has no equivalent value."
        " Values that can be translated: none, stats, eplb, all. [no_equivalent_value]"
    )


def test_malformed_command_lines() -> None:
    assert codes("rtp-llm", "stray") == ["unexpected_word"]
    assert codes("vllm", "model", "stray") == ["unexpected_word"]
    assert codes("rtp-llm", "--reuse-cache", "maybe") == ["unexpected_word"]
    assert codes("rtp-llm", "--reuse-cache=maybe") == ["bad_value"]
    assert codes("vllm", "--served-model-name", "--port", "1") == ["missing_value"]
    assert codes("vllm", "--no-port") == ["unknown_flag"]


def test_secrets_are_in_no_note_and_no_refusal() -> None:
    translation = translate("vllm", ["--api-key", "sk-secret", "sk-other", "--enable-log-requests"])
    assert "secret" not in str(translation.notes) + str(translation.rejections)
    translation = translate("vllm", ["--api-key", "sk-secret"])
    assert "secret" not in str(translation.notes)
    assert translation.words == ["--api-key", "sk-secret"]


def test_values_are_not_validated() -> None:
    translation = one("rtp-llm", "--tp_size", "many", "--concurrency_limit", "-3")
    assert translation.values == {"tp_size": "many", "max_running_requests": -3}
    assert translation.words == ["--tp-size", "many", "--max-running-requests=-3"]


@every("word", ["\udcff", "a\0b"])
def test_words_that_are_not_valid_text(word: str) -> None:
    assert codes("rtp-llm", "--tp-size", word) == ["bad_text"]


def test_invalid_text_in_json_is_refused() -> None:
    assert codes("vllm", "--speculative-config", '{"model": "\\ud800"}') == ["bad_text"]
    assert codes("vllm", "--lora-modules", '{"a": "\\u0000"}') == ["bad_text"]


def flags_of(dialect: str) -> list[str]:
    return [flag for row in read_dialect(dialect).rows for flag in row.flags] + [
        "--page-size",
        "--config",
        "--no-x",
        "-O3",
    ]


JSON_KEYS = sorted({key for row in read_dialect("vllm").rows for key in row.fields})
JSON_TEXT = st.dictionaries(
    st.sampled_from([*JSON_KEYS, "other"]), st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))
).map(json.dumps)
WORDS = st.one_of(
    st.sampled_from([flag for dialect in DIALECTS for flag in flags_of(dialect)]),
    st.sampled_from(["true", "0", "-1", "8", "4GB", "1e400", "nan", "", "-", "--", "=", "{", "[]", "a=b", "9" * 30]),
    st.text(max_size=8),
    JSON_TEXT,
)


@settings(max_examples=300, deadline=None)
@given(dialect=st.sampled_from(DIALECTS), words=st.lists(WORDS, max_size=12))
def test_no_command_line_causes_a_traceback(dialect: str, words: list[str]) -> None:
    translation = translate(dialect, words, memory)
    translation.command.encode()
    yaml.safe_dump(translation.values)
    for rejected in translation.rejections:
        assert rejected.reason
        assert rejected.remedy
        str(rejected).encode()
    for note in translation.notes:
        note.encode()


def arguments(row: DialectRow) -> list[str]:
    return [row.name] if row.takes == "switch" else [row.name, "1"]


@every("dialect", DIALECTS)
def test_srv_knows_every_translated_flag(dialect: str) -> None:
    parser = Parser(prog="srv launch")
    add_arguments(parser)
    for row in read_dialect(dialect).rows:
        for words in (arguments(row), [row.name, *list(row.values)[:1]]):
            translation = translate(dialect, words, memory)
            assert parser.parse_known_args(translation.words, argparse.Namespace())[1] == [], row.name


def test_positional_argument_is_the_model() -> None:
    """As in vLLM, at any position; a second one is refused."""
    read = translate("vllm", ["--tensor-parallel-size", "2", "x/m", "--port=1"])
    assert read.values == {"tp_size": 2, "model_path": "x/m", "port": 1}
    (refused,) = translate("vllm", ["x/m", "--port=1", "x/n"]).rejections
    assert (refused.code, refused.what) == ("unexpected_word", "x/n")
