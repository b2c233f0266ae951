// Memory of devices and pinned memory, and tensors over either.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include "world.h"

namespace {

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::unique_ptr<Block> last(block);  // destroyed after the lock is released
  Held held(world.lock);
  world.blocks.erase(block->address);
  if (block->device.is_cpu()) return;
  // A caching allocator hands memory out again to the stream that it came from, at once.
  auto free = [&](const Use& use) {
    return !use.stream || use.stream == block->home || block->recorded.count(use.stream) ||
           std::max(known(block->home->seen, use.stream->number), known(world.host, use.stream->number)) >= use.position;
  };
  auto check = [&](const Use& use) {
    if (!free(use)) found("memory of " + block->home->str() + " is freed while " + *use.name + " on " + use.stream->str() +
                          " may still use it (wait for that stream, or call record_stream)");
  };
  check(block->written);
  for (auto& use : block->read) check(use);
  for (auto& upload : block->uploads) upload->target = Tensor();
  world.devices[block->device.index()].allocated -= block->bytes;
  munmap(block->address, block->bytes);
}

c10::DataPtr allocate_on(DeviceIndex index, size_t bytes) {
  Held held(world.lock);
  auto& device = usable(index);
  if (bytes == 0) return {nullptr, Device(FAKE, index)};
  bool fails = device.fails_in > 0 && --device.fails_in == 0;
  TORCH_CHECK_WITH(OutOfMemoryError, !fails && device.allocated + int64_t(bytes) <= device.limit, "fake accelerator: out of memory: ",
                   Device(FAKE, index).str(), " was asked for ", bytes, " bytes, has ", device.limit, " and ", device.allocated, " are in use");
  auto* address = static_cast<char*>(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  TORCH_CHECK(address != MAP_FAILED, "fake accelerator: no addresses are left");
  static const std::string name = "its allocation";
  auto& home = current_timeline(index);
  auto* block = new Block{Device(FAKE, index), address, bytes, c10::GetCPUAllocator()->allocate(bytes), &home};
  block->written = {&home, home.enqueued, &name};  // who had this memory before may still use it, in the order of its stream
  std::memset(block->memory.get(), 0xFF, bytes);   // memory that nobody wrote is NaN
  world.blocks[address] = block;
  device.allocated += bytes;
  device.peak = std::max(device.peak, device.allocated);
  return {address, block, &release, Device(FAKE, index)};
}

Block* block_at(const void* address) {
  Held held(world.lock);
  auto next = world.blocks.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (next == world.blocks.begin()) return nullptr;
  auto* block = (--next)->second;
  return address < block->address + std::max<size_t>(block->bytes, 1) ? block : nullptr;
}

Block* block_of(const c10::Storage& storage) {  // by address where the storage is somebody else's view of the memory
  auto& data = storage.data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : block_at(data.get());
}

Block* pinned_block(const void* address) {
  auto* block = block_at(address);
  return block && block->device.is_cpu() ? block : nullptr;
}

char* memory_of(const c10::Storage& storage) {  // where kernels find what the storage's address stands for
  auto* block = block_of(storage);
  TORCH_CHECK(block || storage.nbytes() == 0, "fake accelerator: a tensor over memory that is not the accelerator's");
  return block ? static_cast<char*>(block->memory.get()) + (static_cast<const char*>(storage.data()) - block->address) : nullptr;
}

#if TORCH_MINOR >= 9
using AllocatorBase = c10::DeviceAllocator;  // torch.accelerator.memory_allocated and its like
#else
using AllocatorBase = c10::Allocator;
#endif

struct DeviceMemory final : AllocatorBase {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "fake accelerator: raw copies are not made"); }
#if TORCH_MINOR >= 9
  bool initialized() override { return world.used; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream s) override { static_cast<Block*>(data.get_context())->recorded.insert(&timeline(s)); }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { device_at(d).peak = device_at(d).allocated; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) { return {device_at(d).limit - device_at(d).allocated, device_at(d).limit}; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* sums : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes})
      (*sums)[0].current = device_at(d).allocated, (*sums)[0].peak = device_at(d).peak;
    return stats;
  }
#endif
};
DeviceMemory& device_memory = *new DeviceMemory;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Held held(world.lock);
    auto memory = c10::GetCPUAllocator()->allocate(std::max<size_t>(bytes, 1));
    auto* address = static_cast<char*>(memory.get());
    auto* block = new Block{Device(c10::kCPU), address, bytes, std::move(memory)};
    world.blocks[address] = block;
    return {address, block, &release, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory& pinned_memory = *new PinnedMemory;

Tensor over(c10::Storage storage, const Tensor& like, c10::DispatchKey key, int64_t offset) {  // no autograd, no Python object
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  if (like.is_conj()) tensor.unsafeGetTensorImpl()->_set_conj(true);
  if (like.is_neg()) tensor.unsafeGetTensorImpl()->_set_neg(true);
  return tensor;
}

c10::Storage storage_for_kernels(const Tensor& t) {
  c10::DataPtr data(memory_of(t.storage()), Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

Tensor for_kernels(const Tensor& t) { return over(storage_for_kernels(t), t, c10::DispatchKey::CPU, t.storage_offset()); }

Tensor to_device(const Tensor& made, DeviceIndex index, Work& work) {  // what a kernel has made
  auto bytes = made.numel() ? at::detail::computeStorageNbytes(made.sizes(), made.strides(), made.itemsize()) : 0;
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_on(index, bytes), &device_memory, true);
  auto* block = block_of(storage);
  if (block) std::memcpy(block->memory.get(), made.data_ptr(), bytes);
  work.uses(block, true);
  return over(std::move(storage), made, c10::DispatchKey::PrivateUse1, 0);
}

void keep_resized(const Tensor& original, const Tensor& alias) {  // out= and resize_ may change what they write to
  auto* impl = original.unsafeGetTensorImpl();
  if (alias.storage().data() != memory_of(original.storage())) {
    auto bytes = alias.storage().nbytes();
    auto data = allocate_on(original.device().index(), bytes);
    std::memcpy(static_cast<Block*>(data.get_context())->memory.get(), alias.storage().data(), bytes);
    original.storage().set_data_ptr_noswap(std::move(data));
    original.storage().set_nbytes(bytes);
  }
  if (original.sizes() != alias.sizes() || original.strides() != alias.strides())
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

}  // namespace
