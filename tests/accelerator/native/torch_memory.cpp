// Memory for PyTorch: the devices' allocator and that of pinned host memory.
#include "torch_device.h"

namespace sim_torch {
namespace {

void free_block(void* block) {
  if (block) sim::release_block(static_cast<sim::Block*>(block));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kSim, device_now);
    if (!bytes) return {nullptr, nullptr, &free_block, device};
    auto* block = sim::allocate_block(device_now, stream_index(device_now), bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block, "sim out of memory. Tried to allocate ", bytes, " bytes. ", device, " has a total capacity of ",
                     sim::capacity(device_now), " bytes, of which ", sim::stats(device_now).allocated, " are in use");
    return {block->user, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(sim::work_address(to), sim::work_address(from), bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { for (int i = 0; i < sim::devices(); ++i) sim::empty_cache(i); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    sim::record_stream(sim::find_block(data.get()), stream_index(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats out;
    auto& stats = sim::stats(device);
    out.allocated_bytes[0].current = out.active_bytes[0].current = stats.allocated;
    out.allocated_bytes[0].peak = out.active_bytes[0].peak = stats.peak;
    out.reserved_bytes[0].current = stats.reserved;
    out.reserved_bytes[0].peak = stats.reserved_peak;
    out.allocation[0].allocated = stats.allocations;
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& stats = sim::stats(device);
    stats.peak = stats.allocated;
    stats.reserved_peak = stats.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {sim::capacity(device) - sim::stats(device).reserved, sim::capacity(device)};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_block, c10::kCPU};
    auto* block = sim::allocate_block(sim::pinned_arena(), -1, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, block, "sim: out of pinned memory");
    return {block->user, block, &free_block, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override { sim::empty_cache(sim::pinned_arena()); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::DeviceAllocator* device_memory() {
  static auto* it = new DeviceMemory;
  return it;
}
at::HostAllocator* pinned_memory() {
  static auto* it = new PinnedMemory;
  return it;
}
}  // namespace sim_torch
