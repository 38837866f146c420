// Index scoring on a GPU: compiles selection_score.cu and selection_choice.cu for the device at run time, and launches
// their kernels on the compute stream.
#include "nvrtc.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace longstraw;

// --- kernels for one shape -----------------------------------------------------------------------------------------

// Sizes that the kernels have too.
constexpr int kTileKeys = 64, kPortableStages = 3, kHopperStages = 6, kHopperWarps = 12, kPortableWarps = 8;
constexpr int kCompactThreads = 512;

// The kernels for one shape, on this process's device.
struct Kernels {
  int heads = 0, width = 0;
  bool hopper = false;
  int processors = 0;
  void *score = nullptr, *compact = nullptr, *finish = nullptr;

  int rows_of_block() const { return hopper ? kHopperWarps : kPortableWarps; }
  unsigned stage_bytes() const {
    const int stages = hopper ? kHopperStages : kPortableStages;
    return static_cast<unsigned>(stages * kTileKeys * width * 2 + (hopper ? 1024 : 0));
  }
};

Kernels load(const char* source, int heads, int width, bool portable) {
  Kernels made;
  const int major = attribute(kMajor), minor = attribute(kMinor);
  made.heads = heads;
  made.width = width;
  made.processors = attribute(kProcessors);
  made.hopper = !portable && major == 9 && minor == 0 && heads <= 32;
  const auto code = compile(source, "selection_score.cu",
                            {architecture(made.hopper), "--std=c++17", "-DHEADS=" + std::to_string(heads),
                             "-DWIDTH=" + std::to_string(width), "-DWARPS=" + std::to_string(kPortableWarps),
                             // 64 heads fill the registers of one block.
                             std::string("-DBLOCKS=") + (heads <= 32 ? "2" : "1"),
                             std::string("-DHOPPER=") + (made.hopper ? "1" : "0")});
  void* module = load_module(code);
  made.score = function_of(module, made.hopper ? "score_wgmma" : "score");
  made.compact = function_of(module, "compact");
  made.finish = function_of(module, "finish");
  allow_shared(made.score, made.stage_bytes());
  return made;
}

// Loaded kernels by heads and width. They stay until the process ends.
struct Loaded {
  std::mutex lock;
  std::map<std::pair<int64_t, int64_t>, Kernels> kernels;
};
Loaded& loaded() {
  static auto* made = new Loaded;
  return *made;
}

// The loaded kernels of a shape; without functions if there are none.
Kernels find(int64_t heads, int64_t width) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  const auto found = all.kernels.find({heads, width});
  return found == all.kernels.end() ? Kernels{} : found->second;
}

Kernels kernels_of(int64_t heads, int64_t width) {
  const auto found = find(heads, width);
  TORCH_CHECK(found.score != nullptr, "no kernel for ", heads, " index heads of ", width, " is loaded");
  return found;
}

// --- launches ----------------------------------------------------------------------------------------------------

// As in the kernels; passed by value.
struct Segment {
  const void *query, *weight, *position, *key;
  void *candidates, *counts;
  const void* thresholds;
  long long first, step;
  int rows, begin, end, span, capacity, fresh;
};

struct Buffers {
  void *candidates, *counts, *thresholds, *scores, *positions;
  int capacity, n, rows, full, padded;
};

struct alignas(64) TensorMap {
  char opaque[128];
};

// The copy engine's view of the keys: [keys, width] bfloat16 in boxes of kTileKeys keys and 64 elements, rows of 128
// bytes permuted.
TensorMap map_of(const at::Tensor& key) {
  using Encode = int (*)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                         const uint32_t*, int, int, int, int);
  static const auto encode = driver<Encode>("cuTensorMapEncodeTiled");
  constexpr int kBfloat16 = 9, kPlain = 0, kPermuted128 = 3, kFetch256 = 3, kZeros = 0;
  const uint64_t size[2] = {static_cast<uint64_t>(key.size(1)), static_cast<uint64_t>(key.size(0))};
  const uint64_t stride[1] = {static_cast<uint64_t>(key.size(1)) * 2};
  const uint32_t box[2] = {64, kTileKeys}, each[2] = {1, 1};
  TensorMap map;
  driven_well(encode(&map, kBfloat16, 2, key.data_ptr(), size, stride, box, each, kPlain, kPermuted128, kFetch256, kZeros),
              "cuTensorMapEncodeTiled");
  return map;
}

// Keys of one block: enough blocks for eight turns of the chip, and at least 256 keys each.
int span_of(const Kernels& kernels, int64_t keys, int64_t row_blocks) {
  const int64_t parts = std::clamp<int64_t>(8 * kernels.processors / row_blocks, 1, std::max<int64_t>(keys / 256, 1));
  const int64_t each = (keys + parts - 1) / parts;
  return static_cast<int>((each + kTileKeys - 1) / kTileKeys * kTileKeys);
}

Buffers buffers_of(const at::Tensor& candidates, const at::Tensor& counts, const at::Tensor& thresholds, int n) {
  int padded = 2;
  while (padded < n) padded *= 2;
  TORCH_INTERNAL_ASSERT(candidates.is_contiguous() && candidates.size(1) >= padded);
  return {candidates.data_ptr(), counts.data_ptr(), thresholds.data_ptr(), nullptr, nullptr,
          static_cast<int>(candidates.size(1)), n, static_cast<int>(candidates.size(0)), 2 * n, padded};
}

}  // namespace

extern "C" {

// Compiles and loads the kernels for this process's device, in the place of those of the same shape. `portable` leaves
// out Hopper's own instructions.
int longstraw_index_load(const char* source, int heads, int width, int portable, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto made = load(source, heads, width, portable != 0);
    auto& all = loaded();
    const std::lock_guard<std::mutex> held(all.lock);
    all.kernels[{heads, width}] = made;
  });
}

int longstraw_index_loaded(int64_t heads, int64_t width) { return find(heads, width).score != nullptr ? 1 : 0; }

// Appends to each row's candidates the keys begin .. end, of positions first, first + step, …, that beat its threshold.
// query [t, j, i] and key [s, i] in bfloat16, weight [t, j] in float32, position [t], candidates [t, c] and
// thresholds [t] in int64, counts [t] in int32; all contiguous on the GPU. There is room for end - begin more. With
// `fresh`, there are no candidates yet.
int longstraw_index_score(at::Tensor* query, at::Tensor* weight, at::Tensor* position, at::Tensor* key, int64_t first,
                          int64_t step, int64_t begin, int64_t end, int fresh, at::Tensor* candidates,
                          at::Tensor* counts, at::Tensor* thresholds, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto kernels = kernels_of(query->size(1), query->size(2));
    for (const at::Tensor* one : {query, weight, position, key}) TORCH_CHECK(one->is_contiguous() && one->is_cuda());
    TORCH_CHECK(query->scalar_type() == at::kBFloat16 && key->scalar_type() == at::kBFloat16);
    TORCH_CHECK(weight->scalar_type() == at::kFloat && position->scalar_type() == at::kLong);
    TORCH_CHECK(key->size(1) == kernels.width && weight->size(1) == kernels.heads);
    TORCH_CHECK(reinterpret_cast<uintptr_t>(key->data_ptr()) % 16 == 0, "index keys at an odd address");
    const int64_t row_blocks = (query->size(0) + kernels.rows_of_block() - 1) / kernels.rows_of_block();
    const int span = span_of(kernels, end - begin, row_blocks);
    Segment segment{query->data_ptr(), weight->data_ptr(), position->data_ptr(), key->data_ptr(),
                    candidates->data_ptr(), counts->data_ptr(), thresholds->data_ptr(), first, step,
                    static_cast<int>(query->size(0)), static_cast<int>(begin), static_cast<int>(end), span,
                    static_cast<int>(candidates->size(1)), fresh};
    TensorMap map{};
    if (kernels.hopper) map = map_of(*key);
    void* parameters[2] = {&segment, &map};
    launch(kernels.score, static_cast<unsigned>(row_blocks), static_cast<unsigned>((end - begin + span - 1) / span),
           static_cast<unsigned>(kernels.rows_of_block() * 32), kernels.stage_bytes(), parameters);
  });
}

// Reduces rows with more than 2 n candidates to the best n, and raises their thresholds.
int longstraw_index_compact(int64_t heads, int64_t width, at::Tensor* candidates, at::Tensor* counts,
                            at::Tensor* thresholds, int n, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto kernels = kernels_of(heads, width);
    auto buffers = buffers_of(*candidates, *counts, *thresholds, n);
    const auto shared = static_cast<unsigned>(buffers.capacity) * 8;
    allow_shared(kernels.compact, shared);
    // Two blocks fit into a multiprocessor; a block looks after at most kCompactThreads rows.
    const int blocks = std::min(buffers.rows, 2 * kernels.processors);
    TORCH_INTERNAL_ASSERT(buffers.rows <= blocks * kCompactThreads);
    void* parameters[1] = {&buffers};
    launch(kernels.compact, static_cast<unsigned>(blocks), 1, kCompactThreads, shared, parameters);
  });
}

// Writes the best n of each row, scores [t, n] in float32 and positions [t, n] in int32, in order of position.
int longstraw_index_finish(int64_t heads, int64_t width, at::Tensor* candidates, at::Tensor* counts,
                           at::Tensor* thresholds, int n, at::Tensor* scores, at::Tensor* positions, char* message,
                           size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto kernels = kernels_of(heads, width);
    auto buffers = buffers_of(*candidates, *counts, *thresholds, n);
    buffers.scores = scores->data_ptr();
    buffers.positions = positions->data_ptr();
    const auto shared = static_cast<unsigned>(buffers.capacity) * 8;
    allow_shared(kernels.finish, shared);
    void* parameters[1] = {&buffers};
    launch(kernels.finish, static_cast<unsigned>(candidates->size(0)), 1, kCompactThreads, shared, parameters);
  });
}
}
