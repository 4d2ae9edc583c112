// What the parts of the PyTorch backend share.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <utility>

#include "machine.h"

namespace sim_torch {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
inline thread_local c10::DeviceIndex device_now = 0;

int stream_index(int device);  // of the current stream
int stream_index(const c10::Stream&);
int enter_host();  // the host thread for which this one works
c10::DeviceAllocator* device_memory();
at::HostAllocator* pinned_memory();
const at::Generator& default_generator(int device);
at::Generator& host_generator(const at::Generator&);  // the CPU generator inside of the device's
void resize_storage(c10::StorageImpl*, size_t bytes);
}  // namespace sim_torch
