// Kernels of a decode step: compiled for the GPU at hand at run time, launched one by one or recorded in a CUDA graph.
#include "../nvrtc.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace longstraw;

// A function, and the bytes of shared memory that its launches may ask for.
struct Function {
  void* handle = nullptr;
  unsigned shared = 48 << 10;
};

// Modules by dtype and head width, and the functions that have been asked for. They stay until the process ends.
struct Loaded {
  std::mutex lock;
  std::map<std::pair<int, int>, void*> modules;
  std::map<std::pair<void*, std::string>, Function> functions;
};
Loaded& loaded() {
  static auto* made = new Loaded;
  return *made;
}

// The stream on which this thread records a graph, if it does.
thread_local void* recording = nullptr;

void* function(int dtype, int head, const char* name, unsigned shared) {
  auto& all = loaded();
  const std::lock_guard<std::mutex> held(all.lock);
  const auto module = all.modules.find({dtype, head});
  TORCH_CHECK(module != all.modules.end(), "the kernels of a decode step are not loaded");
  Function& found = all.functions[{module->second, name}];
  if (found.handle == nullptr) found.handle = function_of(module->second, name);
  if (shared > found.shared) {
    allow_shared(found.handle, shared);
    found.shared = shared;
  }
  return found.handle;
}

// CUlaunchAttribute and CUlaunchConfig of the driver's interface.
struct Attribute {
  int id;
  int pad;
  union {
    char bytes[64];
    int number;
  } value;
};
static_assert(sizeof(Attribute) == 72, "as the driver has it");
struct Configuration {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};

}  // namespace

extern "C" {

// Compiles and loads the kernels for one dtype and head width, unless that was done before.
int longstraw_decode_load(const char* source, int dtype, int head, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    auto& all = loaded();
    {
      const std::lock_guard<std::mutex> held(all.lock);
      if (all.modules.count({dtype, head}) > 0) return;
    }
    const bool own = attribute(kMajor) == 9 && attribute(kMinor) == 0;
    void* module = load_module(compile(source, "a decode step",
                                       {architecture(own), "--std=c++17", "-DDTYPE=" + std::to_string(dtype),
                                        "-DHEAD=" + std::to_string(head)}));
    const std::lock_guard<std::mutex> held(all.lock);
    all.modules[{dtype, head}] = module;
  });
}

// Number of multiprocessors of the device, whether blocks of it form clusters, and the most shared memory of a block.
int longstraw_decode_device(int* processors, int* clusters, int* shared, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    *processors = attribute(kProcessors);
    constexpr int kSharedMost = 97;  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    *clusters = attribute(kMajor) >= 9 ? 1 : 0;
    *shared = attribute(kSharedMost);
  });
}

// Starts a kernel, or adds it to the graph that this thread records. `argument` is its only parameter. With `early` it may
// begin before the kernel ahead of it has ended, and waits for it by itself.
int longstraw_decode_launch(int dtype, int head, const char* name, const unsigned* grid, unsigned threads, unsigned shared,
                            int early, void* argument, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    constexpr int kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_*
    Attribute attributes[1] = {};
    Configuration configuration = {{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, recording, attributes, 0};
    if (recording == nullptr) configuration.stream = compute().native_handle();
    if (early != 0) {
      Attribute& added = attributes[configuration.count++];
      added.id = kProgrammaticSerialization;
      added.value.number = 1;
    }
    void* parameters[1] = {argument};
    using Launch = int (*)(const Configuration*, void*, void**, void**);
    static const auto start = driver<Launch>("cuLaunchKernelEx");
    driven_well(start(&configuration, function(dtype, head, name, shared), parameters, nullptr), name);
  });
}

// From here on launches of this thread are recorded instead of started.
int longstraw_graph_begin(char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
    // The stream that computations are on by default cannot be recorded.
    static void* stream = guard().getStreamFromGlobalPool(device(), false).native_handle();
    driven_well(driver<int (*)(void*, int)>("cuStreamBeginCapture_v2")(stream, kRelaxed), "recording a graph");
    recording = stream;
  });
}

// Ends the recording. With `keep` what was recorded becomes `*graph`, else it is dropped.
int longstraw_graph_end(int keep, void** graph, char* message, size_t capacity) {
  void* stream = std::exchange(recording, nullptr);
  return guarded(message, capacity, [&] {
    void* recorded = nullptr;
    const int ended = driver<int (*)(void*, void**)>("cuStreamEndCapture")(stream, &recorded);
    const auto destroy = driver<int (*)(void*)>("cuGraphDestroy");
    if (keep == 0) {
      if (recorded != nullptr) destroy(recorded);
      return;
    }
    driven_well(ended, "recording a graph");
    using Instantiate = int (*)(void**, void*, unsigned long long);
    const int made = driver<Instantiate>("cuGraphInstantiateWithFlags")(graph, recorded, 0);
    destroy(recorded);
    driven_well(made, "making a graph");
  });
}

// Starts a graph on the compute stream.
int longstraw_graph_launch(void* graph, char* message, size_t capacity) {
  return guarded(message, capacity, [&] {
    static const auto start = driver<int (*)(void*, void*)>("cuGraphLaunch");
    driven_well(start(graph, compute().native_handle()), "starting a graph");
  });
}

void longstraw_graph_free(void* graph) {
  try {
    driver<int (*)(void*)>("cuGraphExecDestroy")(graph);
  } catch (const std::exception&) {
    // Only a driver that has no such function leaves it behind.
  }
}
}
