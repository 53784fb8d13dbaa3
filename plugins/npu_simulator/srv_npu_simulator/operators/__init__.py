"""The operators of torch_npu that the NPU platform calls: schemas, validation, and references in plain torch.

    schemas           every operator: schema and reference
    kernel            check placement, run the reference on host views, record for a graph
    checks            error messages, and rules that many operators share
    attention         the fused attention; attention_call, _rules and _masks define the calls that it accepts
    norms, rotary, cache, quantised, sampling    the others

References see only host views, never the device.
"""
