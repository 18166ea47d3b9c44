// What a torch without a GPU lacks so that its autograd takes tensors that say cuda:0, xpu:0 or mps:0: a device guard
// and the device's hooks. Load it before torch: torch looks for hooks once (ATen/detail/CUDAHooksInterface.cpp,
// `getCUDAHooks`). One kind of card is there at a time, as `pretend` says.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>
#include <unordered_set>

namespace {
using c10::DeviceIndex;
using c10::DeviceType;

auto pretended = DeviceType::CUDA;
DeviceIndex cards = 1;
thread_local DeviceIndex current = 0;

// Autograd asks for the stream of every tensor's device (torch/csrc/autograd/input_buffer.cpp). There is one stream,
// and whatever was launched is done.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  explicit Guard(DeviceType type) : type_(type) {
    c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].store(this);
  }
  DeviceType type() const override { return type_; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {type_, current}; }
  void setDevice(c10::Device device) const override { current = device.has_index() ? device.index() : current; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return type_ == pretended ? cards : 0; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  const DeviceType type_;
};

Guard guards[] = {Guard(DeviceType::CUDA), Guard(DeviceType::XPU), Guard(DeviceType::MPS)};

// Says cuda:0 and draws as a CPU's generator does, so that a run on the card drops what the run on the CPU drops.
// Kernels of the CPU refuse it; pretended_card.py draws with a CPU's generator in the same state.
struct CardGenerator final : public at::CPUGeneratorImpl {
  CardGenerator(uint64_t seed, c10::Device device) : at::CPUGeneratorImpl(seed) {
    device_ = device;
    key_set_ = c10::DispatchKeySet(
        device.is_cuda() ? c10::DispatchKey::CUDA : device.is_xpu() ? c10::DispatchKey::XPU : c10::DispatchKey::MPS);
  }
};

// Main memory that is known to be pinned, for `Tensor.is_pinned` and `pin_memory` (ATen/native/Memory.cpp).
struct PinnedMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = c10::alloc_cpu(size);
    const std::lock_guard<std::mutex> lock(mutex());
    pointers().insert(pointer);
    return {pointer, pointer, &release, c10::Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  static bool holds(const void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex());
    return pointers().count(pointer) > 0;
  }
  static void release(void* pointer) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      pointers().erase(pointer);
    }
    c10::free_cpu(pointer);
  }
  static std::unordered_set<const void*>& pointers() {
    static auto* all = new std::unordered_set<const void*>();  // never destroyed: tensors outlive statics
    return *all;
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex();
    return *one;
  }
};

// The virtual functions that torch 2.11 to 2.13 call on a CPU build that is told to have such devices; others raise.
template <typename Interface, DeviceType TYPE>
struct Hooks : public Interface {
  bool is_here() const { return pretended == TYPE; }
  void init() const override {}
  bool isBuilt() const override { return is_here(); }
  bool isAvailable() const override { return is_here(); }
  bool hasPrimaryContext(DeviceIndex) const override { return is_here(); }
  DeviceIndex deviceCount() const override { return is_here() ? cards : 0; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  virtual DeviceIndex current_device() const { return current; }  // MPS has no such function
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedMemory();
    return allocator;
  }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, current}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto generator = getNewGenerator(0);
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    const c10::Device device(TYPE, index < 0 ? current : index);
    return at::make_generator<CardGenerator>(c10::default_rng_seed_val, device);
  }
};
}  // namespace

extern "C" void pretend(const char* kind, int number) {
  pretended = c10::Device(kind).type();
  cards = static_cast<DeviceIndex>(number);
}

namespace at::pretended {
#define HOOKS(KIND)                                                                      \
  struct KIND##Hooks final : public Hooks<at::KIND##HooksInterface, DeviceType::KIND> {  \
    explicit KIND##Hooks(at::KIND##HooksArgs = {}) {}                                    \
    bool has##KIND() const override { return is_here(); }                                \
  };                                                                                     \
  using at::KIND##HooksRegistry;                                                         \
  using at::Registerer##KIND##HooksRegistry;                                             \
  REGISTER_##KIND##_HOOKS(KIND##Hooks)
HOOKS(CUDA);
HOOKS(XPU);
HOOKS(MPS);
}  // namespace at::pretended
