"""torch_npu's operators, those that the NPU platform calls: schemas, refusal rules, references in plain torch.

    schemas           every operator: schema and reference
    kernel            check placement, run the reference on host views, record for a graph
    checks            how a refusal reads, and the rules that many operators share
    attention         the fused attention; attention_call, _rules and _masks say which calls it takes
    norms, rotary, cache, quantised, sampling    the others

References see host views only, and never the device.
"""
