// The gated delta rule on a GPU: compiles the CUDA text of this folder for the device at run time, and launches it.
#include "../nvrtc.h"

#include <array>
#include <map>
#include <mutex>

namespace {

using namespace longstraw;

struct Kernel {
  const char* name;
  unsigned threads, shared;
};

// Bytes of tiles of 64 rows of 128 and of 64, of the transposes, of a state, and of a stage of row tiles, as the kernels
// have them.
constexpr unsigned kWide = 64 * 136 * 2, kNarrow = 64 * 72 * 2, kColumns = 128 * 72 * 2, kWhole = 128 * 136 * 2;
constexpr unsigned kSmallStage = kWide + 2 * kNarrow + 1280, kLargeStage = kSmallStage + kWide + kNarrow;
constexpr unsigned kSent = 2 * (kWide + 2 * kNarrow);

// In the order of `Kernel` in compiled.rs.
constexpr std::array<Kernel, 7> kRule = {{
    {"prepare", 128, 2 * kWide + 64 * 72 * 4},
    {"forward", 256, 3 * kLargeStage + 2 * kNarrow},
    {"states", 256, 3 * kSmallStage + kSent},
    {"map", 256, 3 * kSmallStage},
    {"dstates", 256, 2 * kLargeStage + kSent},
    {"pull", 256, 3 * kLargeStage},
    {"gradient", 512, 3 * kWide + 2 * kColumns + 2 * kWhole + 3 * kNarrow + 19 * 256 + 64},
}};
constexpr std::array<Kernel, 2> kConvolution = {{{"convolve", 128, 0}, {"convolve_gradient", 128, 0}}};

// Functions by number of taps; those of the rule have the number 0. They stay until the process ends.
struct Loaded {
  std::mutex lock;
  std::map<int, std::vector<void*>> functions;
};
Loaded& loaded() {
  static auto* made = new Loaded;
  return *made;
}

bool is_loaded(int taps) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  return all.functions.count(taps) > 0;
}

template <size_t N>
void load(int taps, const char* source, const char* name, const std::array<Kernel, N>& kernels) {
  if (is_loaded(taps)) return;
  void* module = load_module(compile(source, name, {architecture(false), "--std=c++17", "-DTAPS=" + std::to_string(taps)}));
  std::vector<void*> made;
  for (const auto& kernel : kernels) {
    made.push_back(function_of(module, kernel.name));
    if (kernel.shared > 0) allow_shared(made.back(), kernel.shared);
  }
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  all.functions[taps] = made;
}

void* function(int taps, size_t which) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  const auto found = all.functions.find(taps);
  TORCH_CHECK(found != all.functions.end(), "the kernels of the gated delta rule are not loaded");
  return found->second.at(which);
}

}  // namespace

extern "C" {

// Compiles and loads the kernels for this process's device, unless that has been done.
int longstraw_delta_load(const char* rule, const char* convolution, int taps, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    load(0, rule, "the gated delta rule", kRule);
    load(taps, convolution, "the convolution", kConvolution);
  });
}

// Whether the kernels of the rule, and with `taps` above 0 those of the convolution, are loaded.
int longstraw_delta_loaded(int taps) { return is_loaded(0) && is_loaded(taps) ? 1 : 0; }

// Starts kernel `which` of the rule (`taps` is 0) or of the convolution. `argument` is its only parameter.
int longstraw_delta_launch(int taps, int which, unsigned x, unsigned y, void* argument, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const auto at = static_cast<size_t>(which);
    const Kernel& kernel = taps == 0 ? kRule.at(at) : kConvolution.at(at);
    void* parameters[1] = {argument};
    launch(function(taps, at), x, y, kernel.threads, kernel.shared, parameters);
  });
}
}
