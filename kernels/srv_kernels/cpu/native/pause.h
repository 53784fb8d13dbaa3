// The processor's hint that this thread spins.
#pragma once

namespace srv {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace srv
