// A step's kernel calls, recorded to be run without their callers.
//
// A call is kept with its arguments as they were: pointers must stay good, and what they point to may change.
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
