// Memory that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <new>

namespace pacpu {

// Grows to the largest call seen; 64-byte aligned, not initialised.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { release(); }

    float* at_least(size_t count) {
        if (count > count_) {
            release();
            data_ = static_cast<float*>(::operator new(count * sizeof(float), alignment));
            count_ = count;
        }
        return data_;
    }

private:
    static constexpr std::align_val_t alignment{64};

    void release() {
        if (data_) ::operator delete(data_, alignment);
        data_ = nullptr;
        count_ = 0;
    }

    float* data_ = nullptr;
    size_t count_ = 0;
};

}  // namespace pacpu
