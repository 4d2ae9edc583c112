// The ops: each runs as the CPU's, on CPU tensors over the simulator's own view of the device's memory.
#include "torch_device.h"

namespace sim_torch {

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard on(storage->device());
  auto fresh = device_memory()->allocate(bytes);
  size_t kept = std::min(bytes, storage->nbytes());
  int who = stream_index(device_now);
  if (kept) {
    auto *from = sim::find_block(storage->data()), *to = sim::find_block(fresh.get());
    sim::launch_op(who, "resize_", {{from, 0, kept, false}, {to, 0, kept, true}});
    memcpy(sim::work_address(fresh.get()), sim::work_address(storage->data()), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

namespace {

at::Tensor tensor_on(c10::Storage storage, caffe2::TypeMeta type, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     int64_t offset, c10::DispatchKey key = c10::DispatchKey::PrivateUse1) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  c10::DeviceGuard on(device.value_or(c10::Device(kSim)));
  return at::detail::empty_strided_generic(size, stride, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  c10::DeviceGuard on(device.value_or(c10::Device(kSim)));
  return at::detail::empty_generic(size, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_strided(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || stride.size() != size.size()) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return set_strided(self, source, 0, {count}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) { sim::record_stream(sim::find_block(self.storage().data()), stream_index(stream)); }

bool on_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }

// One op: its tensors seen through the simulator's own view of their memory, as CPU tensors.
struct Call {
  explicit Call(std::string name) : name(std::move(name)) {}
  std::string name;
  int device = -1;
  bool metadata_only = false, host_tensors_allowed = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // (CPU alias, device tensor)
  std::vector<sim::Use> uses;

  void use(const at::Tensor& t, bool write) {
    if (metadata_only || !t.numel()) return;
    size_t item = t.itemsize(), lo = t.storage_offset() * item;
    size_t hi = at::detail::computeStorageNbytes(t.sizes(), t.strides(), item, t.storage_offset());
    auto* block = sim::find_block(t.storage().data());
    if (!block) return;
    size_t skip = static_cast<const char*>(t.storage().data()) - block->user;
    uses.push_back({block, lo + skip, hi + skip, write});
  }

  at::Tensor alias(const at::Tensor& t, bool write) {
    if (!t.defined()) return t;
    if (!on_sim(t)) {
      TORCH_CHECK(t.dim() == 0 || host_tensors_allowed, name, ": expected all tensors on one device, but found sim:",
                  device, " and ", t.device());
      return t;
    }
    TORCH_CHECK(device < 0 || device == t.device().index(), name, ": expected all tensors on one device, but found sim:",
                device, " and ", t.device());
    device = t.device().index();
    use(t, write);
    return view(t, write);
  }

  at::Tensor view(const at::Tensor& t, bool write) {
    c10::Storage storage;
    for (auto& [made, original] : seen)
      if (original.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) storage = made.storage();
    if (!storage) {
      void* data = t.storage().nbytes() ? sim::work_address(t.storage().data()) : nullptr;
      storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(data, c10::kCPU),
                             write && !data ? c10::GetAllocator(c10::kCPU) : nullptr, write && !data);
    }
    auto made = tensor_on(std::move(storage), t.dtype(), t.sizes(), t.strides(), t.storage_offset(), c10::DispatchKey::CPU);
    seen.emplace_back(made, t);
    return made;
  }

  at::Tensor back(const at::Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [made, original] : seen) {
      if (made.is_same(t)) return original;
    }
    for (auto& [made, original] : seen)
      if (made.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) {
        auto view = tensor_on(original.storage(), t.dtype(), t.sizes(), t.strides(), t.storage_offset());
        return view;
      }
    c10::DeviceGuard on(c10::Device(kSim, device));
    at::Tensor made = at::detail::empty_strided_generic(t.sizes(), t.strides(), device_memory(),
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.scalar_type());
    fill(made, t);
    return made;
  }

  void fill(const at::Tensor& on_device, const at::Tensor& from) {
    if (!from.numel()) return;
    size_t bytes = at::detail::computeStorageNbytes(from.sizes(), from.strides(), from.itemsize());
    memcpy(sim::work_address(on_device.storage().data()), from.const_data_ptr(), bytes);
    if (auto* block = sim::find_block(on_device.storage().data())) sim::log_further_use(stream_index(device), name, {block, 0, bytes, true});
  }
};

bool waits(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  if (op.hasTag(at::Tag::data_dependent_output)) return true;
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  auto& name = op.operator_name().name;
  if (name == "aten::index" || name == "aten::_unsafe_index") {
    for (auto& each : stack[first + 1].toOptionalTensorVector())
      if (each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
    return false;
  }
  if (name == "aten::repeat_interleave") return stack.back().isNone();
  return true;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  size_t n = schema.arguments().size(), first = stack->size() - n;
  Call call(op.operator_name().name.substr(6));
  call.host_tensors_allowed = call.name.find("index") != std::string::npos;
  bool host_waits = waits(op, *stack, first);
  for (auto& argument : schema.arguments())
    if (argument.alias_info() && !argument.alias_info()->isWrite()) call.metadata_only = true;
  for (size_t i = 0; i < n; ++i) {
    auto& value = (*stack)[first + i];
    auto& argument = schema.arguments()[i];
    // The schema does not say that batch norm writes its running statistics.
    bool is_statistics = argument.name().rfind("running_", 0) == 0;
    bool write = is_statistics || (argument.alias_info() && argument.alias_info()->isWrite());
    if (value.isTensor()) value = call.alias(value.toTensor(), write);
    else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& each : list) each = call.alias(each, write);
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (auto& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional<at::Tensor>(call.alias(*each, write)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      if (call.device < 0) call.device = value.toDevice().has_index() ? value.toDevice().index() : device_now;
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == kSim) {
      if (call.device < 0) call.device = value.toGenerator().device().index();
      value = host_generator(value.toGenerator());
    }
  }
  if (call.device < 0) call.device = device_now;
  for (size_t i = 0; i < n; ++i) {  // no generator given: the device's own, not the CPU's
    auto& value = (*stack)[first + i];
    if (value.isNone() && schema.arguments()[i].name() == "generator") value = host_generator(default_generator(call.device));
  }
  int who = stream_index(call.device);
  if (!call.metadata_only) sim::launch_op(who, call.name, call.uses);
  if (host_waits) sim::host_waits_stream(who, call.name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [made, original] : call.seen)  // out= tensors that had to grow
    if (!made.sizes().equals(original.sizes())) {
      resize_(original, made.sizes(), std::nullopt);
      original.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      if (made.storage().data() != sim::work_address(original.storage().data())) call.fill(original, made);
    }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = call.back(value.toTensor());
    else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& each : list) each = call.back(each);
      value = c10::List<at::Tensor>(list);
    }
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  bool from_device = on_sim(self), to_device = on_sim(dst);
  Call call("copy_");
  auto pinned = [](const at::Tensor& t) { return t.numel() && sim::arena_of(t.storage().data()) == sim::pinned_arena(); };
  const at::Tensor& host = from_device ? dst : self;
  bool between = from_device && to_device;
  call.name = between ? "copy_" : from_device ? "copy to the host" : "copy to the device";
  int who = stream_index(from_device ? self.device().index() : dst.device().index());
  bool peers = between && self.device().index() != dst.device().index();
  if (peers) sim::wait_for_stream(who, stream_index(dst.device().index()));
  bool tracked = between || pinned(host);
  if (from_device || pinned(self)) call.use(self, false);
  if (to_device || pinned(dst)) call.use(dst, true);
  sim::launch_op(who, call.name, call.uses);
  if (!between && (!non_blocking || !tracked)) sim::host_waits_stream(who, tracked ? call.name : call.name + ", pageable");
  auto from = from_device || pinned(self) ? call.view(self, false) : self;
  auto to = to_device || pinned(dst) ? call.view(dst, false) : dst;
  to.copy_(from);
  if (peers) sim::wait_for_stream(stream_index(dst.device().index()), who);
  return dst;
}

// at::convolution asks out-of-tree devices for ops of other names.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(target, stack);
}
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto target = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto channels = (*stack)[stack->size() - 10].toTensor().size(1);
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{channels}));
  fallback(target, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_strided));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
}  // namespace sim_torch
