"""Device code that the platforms cuda, rocm and xpu share; not a platform itself.

    accelerator       the torch module, graphs, pinned memory and libraries of one kind of GPU, real or simulated
    simulator         which GPU the environment asks to simulate; torch-free, as is facts
    facts             backend specs and capabilities that all three platforms have
    platform          `srv.platform.interface.Platform` over an `Accelerator`
    step              the device tensors of one step's attention
    *_attention       attention backends; *_sampling: sampling backends
    graphs, ops, communicator

A module here names no vendor's torch module: it comes with the `Accelerator`.
"""
