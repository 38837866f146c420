// What the files of the GPU's side share: the device that this process drives, its streams, and how failures leave.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <system_error>

#include "count.h"

namespace longstraw {

// The device that this process drives, or -1; set once, before the first tensor on it.
extern int driven;

inline c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

inline c10::Device device() { return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(driven)); }

inline c10::Stream compute() { return guard().getStream(device()); }

template <typename Function>
Function runtime(const char* name) {
  auto* found = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(found != nullptr, "the CUDA libraries have no ", name);
  return found;
}

inline void must(int status, const char* what) {
  if (status == 0) return;
  const char* words = runtime<const char* (*)(int)>("cudaGetErrorString")(status);
  // The runtime remembers the error for its next caller, who has nothing to do with it.
  runtime<int (*)()>("cudaGetLastError")();
  TORCH_CHECK(false, what, ": ", words);
}

template <typename Work>
int guarded(char* message, size_t capacity, Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    keep(error.what(), message, capacity);
    return 1;
  }
}

inline c10::Event mark(const c10::Stream& stream, bool timed) {
  c10::Event event(c10::DeviceType::CUDA, timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  event.record(stream);
  return event;
}

// An event behind what a copy stream was asked for. Where none can be made, the copy is over when this throws: nobody
// could tell otherwise when its tensors may go.
inline c10::Event* behind(const c10::Stream& stream) {
  try {
    return new c10::Event(mark(stream, false));
  } catch (...) {
    guard().synchronizeDevice(device().index());
    throw;
  }
}

}  // namespace longstraw
