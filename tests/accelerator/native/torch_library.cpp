// What simulated.py calls.
#include "torch_device.h"

namespace sim_torch {
namespace {

void default_generator_op(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto device = torch::jit::pop(*stack).toInt();
  stack->emplace_back(default_generator(static_cast<int>(device)));
}
}  // namespace

TORCH_LIBRARY(sim, m) {
  m.def("default_generator(int device) -> Generator", torch::CppFunction::makeFromBoxedFunction<&default_generator_op>());
  m.def("take_races() -> str[]", []() { return sim::take_races(); });
  m.def("take_syncs() -> Dict(str, int)", []() {
    c10::Dict<std::string, int64_t> out;
    for (auto& [why, count] : sim::take_syncs()) out.insert(why, count);
    return out;
  });
  m.def("raise_at_once(bool on) -> ()", [](bool on) { sim::raise_at_once(on); });
  m.def("forbid_syncs(bool on) -> ()", [](bool on) { sim::forbid_syncs(on); });
  m.def("limit_memory(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    sim::limit_memory(static_cast<int>(device), static_cast<size_t>(bytes));
  });
  m.def("pinned_bytes() -> int", []() { return sim::stats(sim::pinned_arena()).allocated; });
  m.def("use_on_host(Tensor tensor, bool writes) -> ()", [](const at::Tensor& tensor, bool writes) {
    auto* data = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
    sim::use_on_host(data, at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()), writes);
  });
  m.def("could_overlap(int one, int other) -> bool", [](int64_t one, int64_t other) {  // `torch.Event.event_id`
    return sim::could_overlap(*reinterpret_cast<sim::Event*>(one), *reinterpret_cast<sim::Event*>(other));
  });
  m.def("raise_found() -> ()", []() { sim::raise_found(); });
}
}  // namespace sim_torch
