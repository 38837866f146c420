// What the two halves of the boundary share: the count of live bytes, messages, and what the GPU's allocator says.
#pragma once

#include <cstddef>
#include <cstdint>

namespace longstraw {

constexpr int kDevice = 0;  // graphs, scratch, stages, weights
constexpr int kHost = 1;    // page slabs and saved hidden states

// Counts bytes in (or out, if negative).
void count(int tag, int64_t bytes);

// Copies an error's words, cut to the capacity.
void keep(const char* what, char* message, size_t capacity);

// Whether this process drives a GPU; its allocator's count then stands for the device's bytes.
bool drives_gpu();
void gpu_bytes(int64_t* live, int64_t* peak) noexcept;
void gpu_forget_peak() noexcept;

}  // namespace longstraw
