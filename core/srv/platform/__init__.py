"""The platform contract, version 2.

The modules of the first list are torch-free:

    facts          device facts, defaults, contributions, constraints, backend specs: data
    capabilities   the closed vocabulary of what a platform can do
    manifest       what a plugin's entry point gives: pure data and pure functions
    checks         checks that a manifest follows the contract
    recorded       the recorded interfaces of contract versions (interfaces/*.json), and how they differ
    import_wall    refuses imports of torch while a manifest is imported
    patches        detects plugins that patch core
    installed      reads the entry points of installed distributions
    registry       discovery of plugins through entry points
    host           facts about installed packages, for probes
    sensors        what devices report of themselves, for the doctor and for metrics
    pci            cards on the PCI bus, for probes
    probe          runs a plugin's probe in a child process (probe_child)
    choose         platform selection: command line > environment > config file > automatic
    doctor         examines one platform in a child process (doctor_child); results are `finding`s
    environment    checks the Python environment for `srv doctor`
    placeholder    stands in for device code that is not implemented yet
    layers         which layers of a model an attention backend cannot compute
    extensions     objects of one type from other distributions, such as architectures
    hook_plugins   loads and calls plugins with hooks (found_by_stevedore)
    streams        streams and events

    interface      the live objects that `create` returns
    contract       creates a live platform from a manifest and checks it
    ops            binds a platform's op implementations to the callables that layers hold
    transfers      copies between host and device, through staging memory of the step
    operands       checks what collective operations are given
    process_group  communicators over torch.distributed's process groups
    expert_exchange   sends rows to the ranks of their experts, and results back
    pools          allocates the pools of cache groups
    page_copies    copies pages between pools
    diagnosis      checks that a platform's `diagnose` may return
"""

API_VERSION = (2, 1)

OLDEST_API = (2, 1)
"""The oldest contract version whose plugins are accepted. A new major version keeps its predecessor's last one."""
