// Streams and events for PyTorch: its device guard.
#include "torch_device.h"

namespace sim_torch {
namespace {

thread_local std::vector<c10::StreamId> stream_now;

c10::StreamId& stream_id(int device) {
  if (stream_now.empty()) stream_now.resize(sim::devices(), 0);
  return stream_now.at(device);
}

}  // namespace

int stream_index(int device) { return sim::stream_of(device, stream_id(device)); }
int stream_index(const c10::Stream& stream) { return sim::stream_of(stream.device_index(), stream.id()); }

namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kSim, device_now}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < sim::devices(), "there is no ", device);
    device_now = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_now = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return make(device, stream_id(at(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return make(device, sim::new_stream(at(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    enter_host();
    auto old = getStream(stream.device());
    stream_id(stream.device_index()) = stream.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(sim::devices()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<sim::Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new sim::Event;
    sim::record_event(*static_cast<sim::Event*>(*event), stream_index(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) sim::wait_for_event(stream_index(stream), *static_cast<sim::Event*>(event));
  }
  bool queryEvent(void* event) const override { return !event || sim::query_event(*static_cast<sim::Event*>(event)); }
  bool queryStream(const c10::Stream& stream) const override { return sim::query_stream(stream_index(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { sim::host_waits_stream(stream_index(stream), "stream"); }
  void synchronizeEvent(void* event) const override {
    if (event) sim::host_waits_event(*static_cast<sim::Event*>(event), "event");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    sim::host_waits_device(device < 0 ? device_now : device, "device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    sim::record_stream(sim::find_block(data.get()), stream_index(stream));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto &a = *static_cast<sim::Event*>(first), &b = *static_cast<sim::Event*>(second);
    TORCH_CHECK(a.timed && b.timed, "both events must be made with enable_timing=True");
    return b.ms - a.ms;
  }

 private:
  static int at(c10::Device device) { return device.has_index() ? device.index() : device_now; }
  static c10::Stream make(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, at(device)), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}  // namespace
}  // namespace sim_torch
