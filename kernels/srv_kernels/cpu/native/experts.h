// A mixture of experts, composed of kernels: see experts.cpp.
#pragma once

#include "kernels.h"

namespace srv {

// The kernels that it is composed of.
struct ExpertKernels {
    void (*linear)(Type, const LinearArgs&);
    void (*gguf_linear)(Type, const GgufLinearArgs&);
    void (*gate)(Type, const GateArgs&);
    void (*combine)(Type, const CombineArgs&);
};

void run_experts(const ExpertKernels& kernels, Type type, const ExpertsArgs& args);

}  // namespace srv
