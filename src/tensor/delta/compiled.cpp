// The gated delta rule on a GPU: compiles the CUDA text of this folder for the device at run time, and launches it.
#include "../nvrtc.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace longstraw;

struct Kernel {
  const char* name;
  unsigned threads, shared;
  void* function = nullptr;
};

// Bytes of tiles of 64 rows of 128 and of 64, of the transposes, and of a state, as the kernels have them.
constexpr unsigned kWide = 64 * 136 * 2, kNarrow = 64 * 72 * 2, kColumns = 128 * 72 * 2, kWhole = 128 * 136 * 2;

// In the order of `Kernel` in compiled.rs. Hopper's own instructions read tiles without gaps between the rows.
std::vector<Kernel> rule(bool hopper) {
  const unsigned wide = hopper ? 64 * 128 * 2 : kWide, square = hopper ? 64 * 64 * 2 : kNarrow;
  // A stage of the tiles of a chunk without and with queries and scores, and what two chunks send to global memory.
  const unsigned small = wide + square + kNarrow + 2048, large = small + wide + square, sent = 2 * (kWide + 2 * kNarrow);
  // The first stage begins at a multiple of this.
  constexpr unsigned kAligned = 1024;
  return {
      {"prepare", 128, 2 * kWide + 64 * 72 * 4},
      {"forward", 256, 3 * large + 2 * kNarrow + kAligned},
      {"states", 256, 3 * small + sent + kAligned},
      {"map", 256, 3 * small + kAligned},
      {"dstates", 256, 2 * large + sent + kAligned},
      {"pull", 256, 3 * large + kAligned},
      {"gradient", 512, 3 * kWide + 2 * kColumns + 2 * kWhole + 3 * kNarrow + 19 * 256 + 64},
  };
}

std::vector<Kernel> convolution() { return {{"convolve", 128, 0}, {"convolve_gradient", 128, 0}}; }

// Kernels by number of taps; those of the rule have the number 0. They stay until the process ends.
struct Loaded {
  std::mutex lock;
  std::map<int, std::vector<Kernel>> kernels;
};
Loaded& loaded() {
  static auto* made = new Loaded;
  return *made;
}

bool is_loaded(int taps) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  return all.kernels.count(taps) > 0;
}

void load(int taps, const char* source, const char* name, std::vector<Kernel> kernels, bool hopper) {
  void* module = load_module(compile(source, name,
                                     {architecture(hopper), "--std=c++17", "-DTAPS=" + std::to_string(taps),
                                      std::string("-DHOPPER=") + (hopper ? "1" : "0")}));
  for (auto& kernel : kernels) {
    kernel.function = function_of(module, kernel.name);
    if (kernel.shared > 0) allow_shared(kernel.function, kernel.shared);
  }
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  all.kernels[taps] = std::move(kernels);
}

Kernel kernel_of(int taps, int which) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  const auto found = all.kernels.find(taps);
  TORCH_CHECK(found != all.kernels.end(), "the kernels of the gated delta rule are not loaded");
  return found->second.at(static_cast<size_t>(which));
}

}  // namespace

extern "C" {

// Compiles and loads the kernels for this process's device, in the place of those loaded before. `portable` leaves out
// Hopper's own instructions.
int longstraw_delta_load(const char* rule_source, const char* convolution_source, int taps, int portable, char* message,
                         size_t capacity) {
  return guarded(message, capacity, [&] {
    const bool hopper = portable == 0 && attribute(kMajor) == 9 && attribute(kMinor) == 0;
    load(0, rule_source, "the gated delta rule", rule(hopper), hopper);
    load(taps, convolution_source, "the convolution", convolution(), false);
  });
}

// Whether the kernels of the rule, and with `taps` above 0 those of the convolution, are loaded.
int longstraw_delta_loaded(int taps) { return is_loaded(0) && is_loaded(taps) ? 1 : 0; }

// Starts kernel `which` of the rule (`taps` is 0) or of the convolution. `argument` is its only parameter.
int longstraw_delta_launch(int taps, int which, unsigned x, unsigned y, void* argument, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    const Kernel kernel = kernel_of(taps, which);
    void* parameters[1] = {argument};
    launch(kernel.function, x, y, kernel.threads, kernel.shared, parameters);
  });
}
}
