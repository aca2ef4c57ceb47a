// SPDX-License-Identifier: Apache-2.0
// A device of PyTorch without hardware, "testdev", for tests of tensors that are not on the CPU.
//
// Its pointers lie in a range without access rights: code that reads or writes them as memory of
// the CPU ends the process. Copies add the distance to a second range, which holds the elements.
// Few operators are native; the CPU computes the rest on copies (at::native::cpu_fallback), so
// results are those of the CPU to the bit. Two devices of one stream each, which do all at once.

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr size_t SPACE = size_t{1} << 32;  // bytes of address space, of which few are backed
constexpr size_t UNIT = 512;

class Memory {
 public:
  Memory() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    shown_ = static_cast<char*>(mmap(nullptr, SPACE, PROT_NONE, flags, -1, 0));
    held_ = static_cast<char*>(mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, flags, -1, 0));
    TORCH_CHECK(shown_ != MAP_FAILED && held_ != MAP_FAILED, "no address space");
  }

  void* take(size_t nbytes) {
    if (nbytes == 0) return nullptr;
    const size_t size = (nbytes + UNIT - 1) / UNIT * UNIT;
    const std::lock_guard<std::mutex> guard(lock_);
    auto& spare = spare_[size];
    char* found = nullptr;
    if (spare.empty()) {
      TORCH_CHECK(used_ + size <= SPACE, "testdev is out of memory");
      found = shown_ + used_;
      used_ += size;
    } else {
      found = spare.back();
      spare.pop_back();
    }
    sizes_[found] = size;
    std::memset(held(found), 0xCD, size);  // what nobody wrote is no zero
    return found;
  }

  void give(void* pointer) {
    if (pointer == nullptr) return;
    const std::lock_guard<std::mutex> guard(lock_);
    char* found = static_cast<char*>(pointer);
    spare_[sizes_.at(found)].push_back(found);
    sizes_.erase(found);
  }

  // Return where the elements of a pointer of the device are.
  char* held(const void* pointer) const {
    return held_ + (static_cast<const char*>(pointer) - shown_);
  }

 private:
  char* shown_;
  char* held_;
  size_t used_ = UNIT;
  std::mutex lock_;
  std::map<size_t, std::vector<char*>> spare_;
  std::unordered_map<char*, size_t> sizes_;
};

Memory& memory() {
  static auto* found = new Memory;  // lives as long as the last tensor
  return *found;
}

void give(void* pointer) { memory().give(pointer); }

constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;
std::atomic<int> waits{0};  // calls that waited for all that a device had been given

c10::Device swap(c10::Device device) {
  const c10::Device before(KIND, current);
  if (device.has_index()) current = device.index();
  return before;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = memory().take(nbytes);
    return {pointer, pointer, &give, c10::Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(memory().held(to), memory().held(from), count);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator)

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  const c10::Device before = swap(storage.device());
  c10::DataPtr fresh = allocator.allocate(nbytes);
  swap(before);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept) allocator.copy_data(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

c10::Stream stream_of(c10::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : current;
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, index));
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override { return swap(device); }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override { swap(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { swap(device); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(device); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream_of(swap(s.device())); }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override { ++waits; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

struct DeviceHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { swap({KIND, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return swap({KIND, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return swap({KIND, index}).index();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

// Return a tensor of the CPU over the elements of one of the device.
at::Tensor held(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  const size_t nbytes = tensor.storage().nbytes();
  char* base = nbytes ? memory().held(tensor.storage().data()) : nullptr;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  const int64_t count = static_cast<int64_t>(nbytes / tensor.itemsize());
  at::Tensor found = nbytes ? at::from_blob(base, {count}, options) : at::empty({0}, options);
  found = at::as_strided(found, tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) found._set_conj(true);
  if (tensor.is_neg()) found._set_neg(true);
  return found;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  const at::NoGradGuard guard;
  at::Tensor to = held(target);
  to.copy_(held(source));
  return target;
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<c10::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  const int64_t count = c10::multiply_integers(size);
  const size_t nbytes = (tensor->storage_offset() + count) * self.itemsize();
  if (count && nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  tensor->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) resize(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& tensor) { return held(tensor).item(); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

// Its schema does not say that it writes the running statistics, so the fallback would lose that.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& variance, bool training, double momentum, double eps) {
  const auto of = [](const std::optional<at::Tensor>& one) {
    return one && one->defined() ? std::optional<at::Tensor>(held(*one)) : std::nullopt;
  };
  const auto [found, first, second] = at::native_batch_norm(
      held(input), of(weight), of(bias), of(mean), of(variance), training, momentum, eps);
  return {found.to(input.device()), first.to(input.device()), second.to(input.device())};
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {  // enough to make sparse tensors, and to read them
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  m.impl("_values", TORCH_FN(at::native::_values_sparse));
  m.impl("indices", TORCH_FN(at::native::indices_sparse));
  m.impl("values", TORCH_FN(at::native::values_sparse));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
}

// Conjugates and negatives are resolved by copies, so copies take them as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

extern "C" int waits_so_far() { return waits; }

extern "C" void begin() {  // hooks may be registered once in a process
  static DeviceHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
