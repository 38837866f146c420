// Shared by the files of this folder: which kernels there are, and how they are started.
#pragma once

#include "../nvrtc.h"

#include <algorithm>

namespace longstraw::fused {

enum Which {
  kGateForward,
  kGateBackward,
  kNormForward,
  kNormBackward,
  kHeadsForward,
  kHeadsBackward,
  kMerge,
  kRound,
  kWiden,
  kAdam,
  kRaise,
  kAddPart,
  kKernels
};

constexpr int kThreads = 256;

// Starts x by y blocks, where there are any. `argument` is the kernel's only parameter.
void start_raw(Which which, int64_t x, int64_t y, int threads, void* argument);

inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Tensors of one launch over several, as in sums.cu.
constexpr size_t kTensors = 32;
struct Casts {
  const void* from[kTensors];
  void* to[kTensors];
  long long count[kTensors];
  float factor[kTensors];
};

// Blocks for each of several tensors, the largest of `most` elements.
inline int64_t blocks_of(int64_t most) { return std::clamp<int64_t>(parts(most, 4 * kThreads), most > 0 ? 1 : 0, 512); }

}  // namespace longstraw::fused
