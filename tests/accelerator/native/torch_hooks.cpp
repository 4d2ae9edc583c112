// Random numbers, and the rest that PyTorch asks of a device. Each device draws from a CPU generator of its own.
#include "torch_device.h"

namespace sim_torch {
namespace {

struct Random final : c10::GeneratorImpl {
  explicit Random(int device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  at::Generator host;

 private:
  Random* clone_impl() const override {
    auto* copy = new Random(device_.index());
    copy->host = host.clone();
    return copy;
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator>& all = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int i = 0; i < sim::devices(); ++i) made.push_back(at::make_generator<Random>(i));
    return made;
  }());
  return all.at(device < 0 ? device_now : device);
}
at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<Random*>(generator.unsafeGetGeneratorImpl())->host;
}

namespace {
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return sim::devices() > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(sim::devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(device_now, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return sim::arena_of(data) == sim::pinned_arena(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {kSim, static_cast<c10::DeviceIndex>(sim::arena_of(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Random>(device < 0 ? device_now : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

int registered = [] {
  c10::SetAllocator(kSim, device_memory());
  at::setHostAllocator(kSim, pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();
}  // namespace
}  // namespace sim_torch
