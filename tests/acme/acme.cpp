// A device as a vendor may bring one: it computes through the host's kernels, and its memory cannot be read by the host.
// It has two devices, no streams, no pinned memory, no memory figures, no random state, and no process group.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace {

constexpr c10::DeviceIndex kNumDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

// memory: pages of their own, which are opened to the host only while a copy of the device runs

std::recursive_mutex lock;
std::map<void*, size_t> blocks;

size_t rounded(size_t num_bytes) {
  const size_t page = sysconf(_SC_PAGESIZE);
  return (num_bytes + page - 1) / page * page;
}

void release(void* block) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const auto found = blocks.find(block);
  if (found != blocks.end()) {
    munmap(block, found->second);
    blocks.erase(found);
  }
}

struct AcmeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kType, current);
    if (num_bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    void* block = mmap(nullptr, rounded(num_bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(block != MAP_FAILED, "acme is out of memory");
    std::lock_guard<std::recursive_mutex> held(lock);
    blocks[block] = rounded(num_bytes);
    return {block, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override;
};

AcmeAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

class Opened {
 public:
  explicit Opened(void* block) : held_(lock), block_(block) {
    protect(PROT_READ | PROT_WRITE);
  }
  ~Opened() {
    protect(PROT_NONE);
  }

 private:
  void protect(int how) {
    const auto found = blocks.find(block_);
    if (found != blocks.end()) {
      mprotect(block_, found->second, how);
    }
  }
  std::lock_guard<std::recursive_mutex> held_;
  void* block_;
};

void AcmeAllocator::copy_data(void* to, const void* from, size_t num_bytes) const {
  Opened source(const_cast<void*>(from)), target(to);
  memcpy(to, from, num_bytes);
}

void* block_of(const at::Tensor& tensor) {
  return tensor.device().type() == kType ? tensor.storage().data_ptr().get() : nullptr;
}

at::Tensor as_host(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) {
    return tensor;
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// which device

struct AcmeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current;
    current = device.index();
    return {kType, before};
  }
  c10::Device getDevice() const override {
    return {kType, current};
  }
  void setDevice(c10::Device device) const override {
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kNumDevices;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, AcmeGuard);

struct AcmeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kNumDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    current = index;
  }
};
const bool are_hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new AcmeHooks());
  return true;
}();

// operators

class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : before_(current) {
    if (device && device->has_index()) {
      current = device->index();
    }
  }
  ~OnDevice() {
    current = before_;
  }

 private:
  c10::DeviceIndex before_;
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  Opened source(block_of(self)), end(block_of(target));
  as_host(target).copy_(as_host(self));
  return target;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(size);
  int64_t numel = 1;
  for (const auto extent : wanted) {
    numel *= extent;
  }
  const size_t needed = (self.storage_offset() + numel) * self.itemsize();
  const auto& storage = self.storage();
  if (needed > storage.nbytes()) {
    OnDevice on(self.device());
    auto grown = allocator.allocate(needed);
    if (storage.nbytes()) {
      allocator.copy_data(grown.get(), storage.data_ptr().get(), storage.nbytes());
    }
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  return self.to(at::kCPU).item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

void through_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&through_the_host>());
}

}  // namespace

extern "C" int acme_current_device() {
  return current;
}

extern "C" void acme_set_device(int index) {
  current = static_cast<c10::DeviceIndex>(index);
}
