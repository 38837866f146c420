// Compiles CUDA text for the GPU at hand at run time, and launches its kernels on the compute stream.
//
// NVRTC comes with libtorch's GPU build, the driver with the GPU. Both are opened at run time; nothing links them, and
// their headers are not needed: the few types and numbers of their interfaces that are used stand below.
#pragma once

#include "gpu.h"

#include <link.h>

#include <algorithm>
#include <string>
#include <vector>

namespace longstraw {

// --- libraries ---------------------------------------------------------------------------------------------------

// Folders of the CUDA libraries that are loaded, in the order of loading.
inline std::vector<std::string> folders() {
  std::vector<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* into) {
        const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const auto slash = path.rfind('/');
        if (slash == std::string::npos) return 0;
        const std::string name = path.substr(slash + 1);
        if (name.rfind("libtorch_cuda", 0) == 0 || name.rfind("libcudart", 0) == 0) {
          static_cast<std::vector<std::string>*>(into)->push_back(path.substr(0, slash + 1));
        }
        return 0;
      },
      &found);
  return found;
}

// NVRTC: beside the CUDA libraries that are loaded, else where the loader looks. libcaffe2_nvrtc is libtorch's own
// library that links the NVRTC of its version.
inline void* open_compiler() {
  std::vector<std::string> names;
  for (const auto& folder : folders()) {
    for (const char* name : {"libcaffe2_nvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"}) names.push_back(folder + name);
  }
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) names.emplace_back(name);
  for (const auto& name : names) {
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr && dlsym(handle, "nvrtcCreateProgram") != nullptr) return handle;
    if (handle != nullptr) dlclose(handle);
  }
  return nullptr;
}

template <typename Function>
inline Function compiler(const char* name) {
  static void* handle = open_compiler();
  TORCH_CHECK(handle != nullptr, "NVRTC is not found beside libtorch's CUDA libraries");
  auto* found = reinterpret_cast<Function>(dlsym(handle, name));
  TORCH_CHECK(found != nullptr, "NVRTC has no ", name);
  return found;
}

template <typename Function>
inline Function driver(const char* name) {
  static void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(handle != nullptr, "libcuda.so.1 is not found");
  auto* found = reinterpret_cast<Function>(dlsym(handle, name));
  TORCH_CHECK(found != nullptr, "the CUDA driver has no ", name);
  return found;
}

inline void driven_well(int status, const char* what) {
  if (status == 0) return;
  const char* words = nullptr;
  driver<int (*)(int, const char**)>("cuGetErrorString")(status, &words);
  constexpr int kNoMemory = 2;
  TORCH_CHECK(false, status == kNoMemory ? "out of memory: " : "", what, ": ", words == nullptr ? "no words" : words);
}

inline int attribute(int which) {
  int at = 0, value = 0;
  driven_well(driver<int (*)(int*, int)>("cuDeviceGet")(&at, driven), "cuDeviceGet");
  driven_well(driver<int (*)(int*, int, int)>("cuDeviceGetAttribute")(&value, which, at), "cuDeviceGetAttribute");
  return value;
}

constexpr int kProcessors = 16, kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_*

// --- compilation -------------------------------------------------------------------------------------------------

inline std::string log_of(void* program) {
  size_t length = 0;
  compiler<int (*)(void*, size_t*)>("nvrtcGetProgramLogSize")(program, &length);
  std::string log(length, '\0');
  compiler<int (*)(void*, char*)>("nvrtcGetProgramLog")(program, log.data());
  std::replace(log.begin(), log.end(), '\n', ' ');
  return log;
}

// Machine code of `source`, called `name` in messages.
inline std::vector<char> compile(const char* source, const char* name, const std::vector<std::string>& options) {
  void* program = nullptr;
  using Create = int (*)(void**, const char*, const char*, int, const char* const*, const char* const*);
  TORCH_CHECK(compiler<Create>("nvrtcCreateProgram")(&program, source, name, 0, nullptr, nullptr) == 0,
              "NVRTC makes no program");
  std::vector<const char*> words;
  for (const auto& option : options) words.push_back(option.c_str());
  const int status = compiler<int (*)(void*, int, const char* const*)>("nvrtcCompileProgram")(
      program, static_cast<int>(words.size()), words.data());
  const std::string log = status == 0 ? "" : log_of(program);
  std::vector<char> code;
  size_t length = 0;
  if (status == 0 && compiler<int (*)(void*, size_t*)>("nvrtcGetCUBINSize")(program, &length) == 0) {
    code.resize(length);
    compiler<int (*)(void*, char*)>("nvrtcGetCUBIN")(program, code.data());
  }
  compiler<int (*)(void**)>("nvrtcDestroyProgram")(&program);
  TORCH_CHECK(status == 0, "NVRTC refuses ", name, ": ", log);
  TORCH_CHECK(!code.empty(), "NVRTC gives no machine code");
  return code;
}

// Loads machine code into the context of this process's device.
inline void* load_module(const std::vector<char>& code) {
  guard().setDevice(device());
  void* module = nullptr;
  driven_well(driver<int (*)(void**, const void*)>("cuModuleLoadData")(&module, code.data()), "loading kernels");
  return module;
}

// The option that names this device's compute capability. `own`: with the instructions that later devices lack.
inline std::string architecture(bool own) {
  const int major = attribute(kMajor), minor = attribute(kMinor);
  TORCH_CHECK(major >= 8, "kernels are compiled for compute capability 8.0 and later, not for ", major, ".", minor);
  return "--gpu-architecture=sm_" + std::to_string(major * 10 + minor) + (own ? "a" : "");
}

inline void* function_of(void* module, const char* name) {
  void* found = nullptr;
  driven_well(driver<int (*)(void**, void*, const char*)>("cuModuleGetFunction")(&found, module, name), name);
  return found;
}

// Shared memory that a launch of `function` may ask for.
inline void allow_shared(void* function, unsigned bytes) {
  constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  static const auto set = driver<int (*)(void*, int, int)>("cuFuncSetAttribute");
  driven_well(set(function, kMaxDynamicShared, static_cast<int>(bytes)), "shared memory of a kernel");
}

// --- launches ----------------------------------------------------------------------------------------------------

inline void launch(void* function, unsigned x, unsigned y, unsigned threads, unsigned shared, void** parameters) {
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  static const auto start = driver<Launch>("cuLaunchKernel");
  driven_well(start(function, x, y, 1, threads, 1, 1, shared, compute().native_handle(), parameters, nullptr),
              "starting a kernel");
}

}  // namespace longstraw
