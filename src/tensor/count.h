// Shared by the CPU and GPU parts of the boundary: byte counts, error messages, the GPU allocator's numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace longstraw {

constexpr int kDevice = 0;  // graphs, scratch, stages, weights
constexpr int kHost = 1;    // page slabs and saved hidden states

// Adds to the count of live bytes; a negative number subtracts.
void count(int tag, int64_t bytes);

// Copies an error message, truncated to `capacity`.
void keep(const char* what, char* message, size_t capacity);

// Whether this process uses a GPU. If so, the GPU allocator's numbers are the device bytes.
bool drives_gpu();
void gpu_bytes(int64_t* live, int64_t* peak) noexcept;
void gpu_forget_peak() noexcept;

}  // namespace longstraw
