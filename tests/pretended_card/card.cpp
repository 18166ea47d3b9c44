// What a torch without CUDA lacks so that its autograd takes tensors that say cuda:0: a device guard, and CUDA's hooks.
// Load it before torch: torch looks for its hooks once (ATen/detail/CUDAHooksInterface.cpp, `getCUDAHooks`).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>
#include <unordered_set>

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
const c10::Device CARD(CUDA, 0);

// Autograd asks for the stream of every tensor's device (torch/csrc/autograd/input_buffer.cpp). There is one stream,
// and whatever was launched is done.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return CARD; }
  c10::Device getDevice() const override { return CARD; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, CARD); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

Guard guard;
const bool registered = [] {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
  return true;
}();

// Says cuda:0 and draws as a CPU's generator does, so that a run on the card drops what the run on the CPU drops.
// Kernels of the CPU refuse it; card.py draws with a CPU's generator in the same state.
struct CardGenerator final : public at::CPUGeneratorImpl {
  explicit CardGenerator(uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = CARD;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

// Main memory that is known to be pinned, for `Tensor.is_pinned` and `pin_memory` (ATen/native/Memory.cpp).
struct PinnedMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = c10::alloc_cpu(size);
    const std::lock_guard<std::mutex> lock(mutex());
    pointers().insert(pointer);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
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
}  // namespace

namespace at::pretended {
// The virtual functions that torch 2.11 to 2.13 call on a CPU build that is told to have CUDA; the others raise.
struct CUDAHooks : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::holds(pointer); }
  Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedMemory();
    return allocator;
  }
  Device getDeviceFromPtr(void*) const override { return CARD; }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto generator = make_generator<CardGenerator>(default_rng_seed_val);
    return generator;
  }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CardGenerator>(default_rng_seed_val); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at::pretended
