// The kernel calls of a step, captured to be replayed without Python.
//
// A call is stored with its arguments. Its pointers must stay valid; the memory that they point to may change.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace srv {

class CapturedGraph {
public:
    void add(std::function<void()> call) { calls_.push_back(std::move(call)); }

    void replay() const {
        for (const auto& call : calls_) call();
    }

    int64_t size() const { return static_cast<int64_t>(calls_.size()); }

private:
    std::vector<std::function<void()>> calls_;
};

}  // namespace srv
