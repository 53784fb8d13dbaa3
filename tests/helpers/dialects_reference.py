"""Published flags of other engines, with their published defaults, which the tables of dialects must cover."""

from __future__ import annotations

# Every row of RTP-LLM's page of server arguments, in its order: flag and default. Two flags occur twice there.
RTP_LLM_PAGE: tuple[tuple[str, str], ...] = (
    ("--tp-size", "None"),
    ("--ep-size", "None"),
    ("--dp-size", "None"),
    ("--world-size", "None"),
    ("--world-rank", "None"),
    ("--local-world-size", "None"),
    ("--enable_ffn_disaggregate", "None"),
    ("--concurrency-with-block", "False"),
    ("--concurrency-limit", "32"),
    ("--enable-fmha", "True"),
    ("--enable-trt-fmha", "True"),
    ("--enable-paged-trt-fmha", "True"),
    ("--enable-open-source-fmha", "True"),
    ("--enable-paged-open-source-fmha", "True"),
    ("--enable-trtv1-fmha", "True"),
    ("--fmha-perf-instrument", "False"),
    ("--fmha-show-params", "False"),
    ("--disable-flash-infer", "False"),
    ("--enable-xqa", "True"),
    ("--reuse-cache", "False"),
    ("--multi-task-prompt", "None"),
    ("--multi-task-prompt-str", "None"),
    ("--deep-gemm-num-sm", "None"),
    ("--arm-gemm-use-kai", "False"),
    ("--enable-stable-scatter-add", "False"),
    ("--enable-multi-block-mode", "True"),
    ("--rocm-hipblaslt-config", "gemm_config.csv"),
    ("--ft-disable-custom-ar", "True"),
    ("--device-reserve-memory-bytes", "0"),
    ("--host-reserve-memory-bytes", "4GB"),
    ("--overlap-math-sm-count", "0"),
    ("--overlap-comm-type", "0"),
    ("--m-split", "0"),
    ("--enable-comm-overlap", "True"),
    ("--enable-layer-micro-batch", "0"),
    ("--not-use-default-stream", "False"),
    ("--use-deepep-moe", "False"),
    ("--use-deepep-internode", "False"),
    ("--use-deepep-low-latency", "True"),
    ("--use-deepep-p2p-low-latency", "False"),
    ("--deep-ep-num-sm", "0"),
    ("--eplb_mode", "NONE"),
    ("--balance_method", "mix"),
    ("--redundant_expert", "0"),
    ("--eplb_update_time", "5000"),
    ("--eplb_balance_layer_per_step", "1"),
    ("--eplb_force_repack", "False"),
    ("--eplb_stats_window_size", "10"),
    ("--eplb_control_step", "100"),
    ("--eplb_test_mode", "False"),
    ("--fake_balance_expert", "False"),
    ("--max-batch-size", "0"),
    ("--enable-flashinfer-sample-kernel", "True"),
    ("--ft-nvtx", "False"),
    ("--py-inference-log-response", "False"),
    ("--trace-memory", "False"),
    ("--trace-malloc-stack", "False"),
    ("--enable-device-perf", "False"),
    ("--ft-core-dump-on-exception", "False"),
    ("--ft-alog-conf-path", "None"),
    ("--log-level", "INFO"),
    ("--gen-timeline-sync", "False"),
    ("--torch-cuda-profiler-dir", ""),
    ("--sp-model-type", ""),
    ("--sp-type", ""),
    ("--sp-min-token-match", "2"),
    ("--sp-max-token-match", "2"),
    ("--tree-decode-config", ""),
    ("--gen-num-per-cycle", "1"),
    ("--force-stream-sample", "False"),
    ("--force-score-context-attention", "True"),
    ("--use-local", "False"),
    ("--remote-rpc-server-ip", "None"),
    ("--decode-cm2-config", "None"),
    ("--remote-vit-server-ip", "None"),
    ("--multimodal-part-cm2-config", "None"),
    ("--cache-store-rdma-mode", "False"),
    ("--wrr-available-ratio", "80"),
    ("--rank-factor", "0"),
    ("--use-batch-decode-scheduler", "False"),
    ("--max-context-batch-size", "1"),
    ("--scheduler-reserve-resource-ratio", "5"),
    ("--enable-fast-gen", "False"),
    ("--fast-gen-context-budget", "None"),
    ("--enable-partial-fallback", "False"),
    ("--batch-decode-scheduler-batch-size", "1"),
    ("--load-balance", "False"),
    ("--step-records-time-range", "60000000"),
    ("--step-records-max-size", "1000"),
    ("--disable-pdl", "False"),
    ("--enable-3fs", "False"),
    ("--max-lora-model-size", "-1"),
    ("--gen-timeline-sync", "False"),
    ("--torch-cuda-profiler-dir", ""),
)

# Every flag of SGLang's server in two releases, and on two pages that describe them.
_SGLANG = """
--model-path --model --tokenizer-path --tokenizer-mode --tokenizer-worker-num --skip-tokenizer-init
--load-format --model-loader-extra-config --trust-remote-code --context-length --is-embedding
--enable-multimodal --revision --model-impl --host --port --skip-server-warmup --warmups --nccl-port --dtype
--quantization --quantization-param-path --kv-cache-dtype --mem-fraction-static --max-running-requests
--max-queued-requests --max-total-tokens --chunked-prefill-size --max-prefill-tokens --schedule-policy
--schedule-conservativeness --page-size --hybrid-kvcache-ratio --swa-full-tokens-ratio
--disable-hybrid-swa-memory --device --tensor-parallel-size --tp-size --pipeline-parallel-size --pp-size
--max-micro-batch-size --stream-interval --stream-output --random-seed --constrained-json-whitespace-pattern
--watchdog-timeout --dist-timeout --download-dir --base-gpu-id --gpu-id-step --sleep-on-idle --log-level
--log-level-http --log-requests --log-requests-level --crash-dump-folder --show-time-cost --enable-metrics
--enable-metrics-for-all-schedulers --bucket-time-to-first-token --bucket-inter-token-latency
--bucket-e2e-request-latency --collect-tokens-histogram --prompt-tokens-buckets --generation-tokens-buckets
--gc-warning-threshold-secs --decode-log-interval --enable-request-time-stats-logging --kv-events-config
--api-key --served-model-name --weight-version --chat-template --completion-template --file-storage-path
--enable-cache-report --reasoning-parser --tool-call-parser --tool-server --data-parallel-size --dp-size
--load-balance-method --prefill-round-robin-balance --dist-init-addr --nccl-init-addr --nnodes --node-rank
--json-model-override-args --preferred-sampling-params --enable-lora --max-lora-rank --lora-target-modules
--lora-paths --max-loras-per-batch --max-loaded-loras --lora-backend --attention-backend
--prefill-attention-backend --decode-attention-backend --sampling-backend --grammar-backend
--mm-attention-backend --speculative-algorithm --speculative-draft-model-path --speculative-draft-model
--speculative-draft-model-revision --speculative-num-steps --speculative-eagle-topk
--speculative-num-draft-tokens --speculative-accept-threshold-single --speculative-accept-threshold-acc
--speculative-token-map --speculative-attention-mode --expert-parallel-size --ep-size --ep --moe-a2a-backend
--moe-runner-backend --flashinfer-mxfp4-moe-precision --enable-flashinfer-allreduce-fusion --deepep-mode
--ep-num-redundant-experts --ep-dispatch-algorithm --init-expert-location --enable-eplb --eplb-algorithm
--eplb-rebalance-num-iterations --eplb-rebalance-layers-per-chunk --eplb-min-rebalancing-utilization-threshold
--expert-distribution-recorder-mode --expert-distribution-recorder-buffer-size
--enable-expert-distribution-metrics --deepep-config --moe-dense-tp-size --max-mamba-cache-size
--mamba-ssm-dtype --enable-hierarchical-cache --hicache-ratio --hicache-size --hicache-write-policy
--hicache-io-backend --hicache-mem-layout --hicache-storage-backend --hicache-storage-prefetch-policy
--hicache-storage-backend-extra-config --enable-lmcache --enable-double-sparsity --ds-channel-config-path
--ds-heavy-channel-num --ds-heavy-token-num --ds-heavy-channel-type --ds-sparse-decode-threshold
--cpu-offload-gb --offload-group-size --offload-num-in-group --offload-prefetch-step --offload-mode
--disable-radix-cache --cuda-graph-max-bs --cuda-graph-bs --disable-cuda-graph --disable-cuda-graph-padding
--enable-profile-cuda-graph --enable-cudagraph-gc --enable-nccl-nvls --enable-symm-mem
--disable-flashinfer-cutlass-moe-fp4-allgather --enable-tokenizer-batch-encode --disable-outlines-disk-cache
--disable-custom-all-reduce --enable-mscclpp --disable-overlap-schedule --enable-mixed-chunk
--enable-dp-attention --enable-dp-lm-head --enable-two-batch-overlap --tbo-token-distribution-threshold
--enable-torch-compile --torch-compile-max-bs --torchao-config --enable-nan-detection --enable-p2p-check
--triton-attention-reduce-in-fp32 --triton-attention-num-kv-splits --num-continuous-decode-steps
--delete-ckpt-after-loading --enable-memory-saver --allow-auto-truncate --enable-custom-logit-processor
--flashinfer-mla-disable-ragged --disable-shared-experts-fusion --disable-chunked-prefix-cache
--disable-fast-image-processor --enable-return-hidden-states --scheduler-recv-interval --numa-node
--debug-tensor-dump-output-folder --debug-tensor-dump-input-file --debug-tensor-dump-inject
--debug-tensor-dump-prefill-only --disaggregation-mode --disaggregation-transfer-backend
--disaggregation-bootstrap-port --disaggregation-decode-tp --disaggregation-decode-dp
--disaggregation-prefill-pp --disaggregation-ib-device --num-reserved-decode-tokens --custom-weight-loader
--weight-loader-disable-mmap --enable-pdmux --sm-group-num --enable-ep-moe --enable-deepep-moe
--enable-flashinfer-cutlass-moe --enable-flashinfer-trtllm-moe --enable-triton-kernel-moe
--enable-flashinfer-mxfp4-moe --prefill-max-requests --enable-priority-scheduling
--schedule-low-priority-values-first --priority-scheduling-preemption-threshold --pp-max-micro-batch-size
--constrained-json-disable-any-whitespace --soft-watchdog-timeout --mm-process-config --crash-on-nan
--tokenizer-metrics-custom-labels-header --tokenizer-metrics-allowed-custom-labels --enable-trace
--oltp-traces-endpoint --sampling-defaults --lora-eviction-policy --max-lora-chunk-size --nsa-prefill-backend
--nsa-decode-backend --fp8-gemm-backend --disable-flashinfer-autotune --speculative-moe-runner-backend
--speculative-moe-a2a-backend --speculative-ngram-min-match-window-size
--speculative-ngram-max-match-window-size --speculative-ngram-min-bfs-breadth
--speculative-ngram-max-bfs-breadth --speculative-ngram-match-type --speculative-ngram-branch-length
--speculative-ngram-capacity --elastic-ep-backend --mooncake-ib-device --mamba-full-memory-ratio
--mamba-scheduler-strategy --mamba-track-interval --multi-item-scoring-delimiter --radix-eviction-policy
--enable-torch-symm-mem --enable-single-batch-overlap --enable-torch-compile-debug-mode
--enable-piecewise-cuda-graph --piecewise-cuda-graph-tokens --piecewise-cuda-graph-max-tokens
--triton-attention-split-tile-size --enable-weights-cpu-backup --keep-mm-feature-on-device
--enable-layerwise-nvtx-marker --enable-attn-tp-input-scattered --enable-nsa-prefill-context-parallel
--forward-hooks --enable-dynamic-batch-tokenizer --dynamic-batch-tokenizer-batch-size
--dynamic-batch-tokenizer-batch-timeout --disaggregation-decode-enable-offload-kvcache
--disaggregation-decode-polling-interval --remote-instance-weight-loader-seed-instance-ip
--remote-instance-weight-loader-seed-instance-service-port
--remote-instance-weight-loader-send-weights-group-ports --pdmux-config-path --enable-deterministic-inference
--config --tokenizer-metrics-allowed-customer-labels --load-watch-interval --enable-flashinfer-cutedsl-moe
"""
SGLANG_FLAGS = tuple(_SGLANG.split())
