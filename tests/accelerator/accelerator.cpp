// An accelerator for tests: PrivateUse1 devices whose kernels run on the CPU, but which can be used only as one can use a GPU.
// What it simulates and catches, and what it cannot, is said in __init__.py beside this file.
//
// A kernel computes at once, in the host's thread. What is simulated is when that would be known:
//  * time: every stream is busy until some moment; work begins when its stream is free and ends later; waiting for it sleeps;
//  * order: a vector clock per stream says which work of the others it has waited for. Two uses of the same memory, one of
//    them a write, that no clock orders are a race: found every time, since no thread has to lose it.
// One lock guards everything. It is never held while the host sleeps, nor while the last reference to a tensor is dropped,
// which may need Python's interpreter lock.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "memory.h"

namespace at::autocast {  // declared here: autocast_mode.h would include every operator
TORCH_API Tensor cached_cast(at::ScalarType, const Tensor&, c10::DeviceType);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);
}  // namespace at::autocast

namespace {

// ---- copies

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  std::optional<Moment> wait_for;
  {
    Held held(world.lock);
    const auto way = from.device().str() + ">" + to.device().str();
    const double seconds = world.seconds_per_byte * to.nbytes();
    const Tensor& host = from.device().is_cpu() ? from : to;
    if (!host.device().is_cpu()) {
      // As CUDA does: on the source's stream, which first waits for the target's, which then waits for the copy.
      auto &source = current_timeline(from.device().index()), &target = current_timeline(to.device().index());
      usable(target.device);
      if (from.device() != to.device()) wait(source, moment(target));
      Work work("copy " + way, source);
      work.uses(block_of(from.storage()), false);
      work.uses(block_of(to.storage()), true);
      auto a = for_kernels(from), b = for_kernels(to);
      move(from.is_alias_of(to) ? a.clone() : a, b);
      work.done(seconds);
      if (from.device() != to.device()) wait(target, moment(source));
    } else {
      auto& stream = current_timeline((host.is_same(from) ? to : from).device().index());
      Work work("copy " + way, stream);
      auto* pinned = pinned_block(host.data_ptr());
      const bool late = non_blocking && pinned && host.is_non_overlapping_and_dense();  // else through a pageable copy
      if (host.is_same(from)) {
        work.uses(block_of(to.storage()), true);
        work.uses(pinned, false);
        if (late) {
          auto upload = std::make_shared<Upload>();
          upload->source = over(from.storage(), from, c10::DispatchKey::CPU, from.storage_offset());
          upload->target = for_kernels(to);
          upload->content.assign(static_cast<const char*>(from.data_ptr()), from.nbytes());
          upload->text = "pinned memory was overwritten before " + work.name + " on " + stream.str() + " had read it";
          block_of(to.storage())->uploads.push_back(upload);
          world.pending.push_back({&stream, work.position, pinned, [upload] { deliver(*upload); }, upload});
        } else {
          move(from, for_kernels(to));
        }
      } else {
        work.uses(block_of(from.storage()), false);
        work.uses(pinned, true);
        for (auto& p : world.pending) if (p.upload && p.pinned == pinned) deliver(*p.upload), p.upload->watched = false;
        if (late) {
          Tensor content = at::detail::empty_strided_cpu(to.sizes(), to.strides(), to.scalar_type());
          move(for_kernels(from), content);
          std::memset(to.data_ptr(), 0xFF, to.nbytes());
          auto target = over(to.storage(), to, c10::DispatchKey::CPU, to.storage_offset());
          world.pending.push_back({&stream, work.position, pinned, [=] { std::memcpy(target.data_ptr(), content.data_ptr(), target.nbytes()); }, nullptr});
        } else {
          move(for_kernels(from), to);
        }
      }
      work.done(seconds);
      if (!late && !(host.is_same(from) && non_blocking)) wait_for = moment(stream);
    }
    auto& count = world.counts[way];
    count.first++, count.second += to.nbytes();
  }
  if (wait_for) host_waits(*wait_for);
  return to;
}

// ---- generators: of the CPU's kind, one per device

struct FakeGenerator final : at::CPUGeneratorImpl {
  explicit FakeGenerator(DeviceIndex index) { as(Device(FAKE, index), c10::DispatchKey::PrivateUse1); }
  void as(Device device, c10::DispatchKey key) {  // kernels of the CPU accept only a generator that says it is the CPU's
    device_ = device;
    key_set_ = c10::DispatchKeySet(key);
  }

 private:
  FakeGenerator* clone_impl() const override {
    auto* copy = new FakeGenerator(device().index());
    copy->set_state(*get_state());
    return copy;
  }
};

struct Drawing {  // for as long as this lives, a kernel of the CPU draws from a device's generator
  FakeGenerator* generator;
  Device device;
  bool as_default;  // the operator takes no generator: the CPU's default one has this one's state meanwhile
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor before;
  Drawing(const at::Generator& g, bool as_default)
      : generator(static_cast<FakeGenerator*>(g.unsafeGetGeneratorImpl())), device(g.device()), as_default(as_default) {
    if (as_default) before = cpu.get_state(), cpu.set_state(Tensor(generator->get_state()));
    else generator->as(Device(c10::kCPU), c10::DispatchKey::CPU);
  }
  ~Drawing() {
    if (as_default) generator->set_state(*cpu.get_state().unsafeGetTensorImpl()), cpu.set_state(before);
    else generator->as(device, c10::DispatchKey::PrivateUse1);
  }
};

// ---- operators

// CUDA's kernels for these make the host wait: the shape or the value of their result depends on the data.
bool waits_for_data(const c10::OperatorHandle& op, const std::vector<Tensor>& indices) {
  if (op.operator_name().name.rfind("aten::index", 0) == 0) {
    for (auto& t : indices) if (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte) return true;
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto find = [](const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); };
  const auto& name = op.operator_name().name;
  if (name == "aten::convolution_overrideable") {
    static auto forward = find("aten::convolution");
    return forward.callBoxed(stack);
  }
  if (name == "aten::convolution_backward_overrideable") {
    static auto backward = find("aten::convolution_backward");
    const size_t first = stack->size() - op.schema().arguments().size();
    stack->insert(stack->begin() + first + 3, c10::IValue(std::vector<int64_t>{(*stack)[first].toTensor().size(1)}));
    return backward.callBoxed(stack);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// Any operator: the kernel of the CPU, over the memory of the device, after the checks that a GPU makes.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  struct Given {
    Tensor original, alias;
    bool written;
  };
  std::vector<Given> given;  // before the lock is taken, so that it is destroyed after it is released
  std::vector<Tensor> indices;
  std::optional<Device> home, wanted;
  std::optional<at::Generator> generator;
  std::optional<size_t> free_generator;

  auto alias = [&](const Tensor& t, bool written) -> Tensor {
    if (!t.defined() || (t.device().is_cpu() && t.dim() == 0)) return t;
    TORCH_CHECK(!home || *home == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *home,
                " and ", t.device(), "! (", schema.operator_name(), ")");
    home = t.device();
    if (t.device().is_cpu()) return t;
    std::optional<c10::Storage> storage;
    for (auto& g : given) {
      if (g.original.is_same(t)) return g.written |= written, g.alias;
      if (g.original.is_alias_of(t)) storage = g.alias.storage();
    }
    given.push_back({t, over(storage ? *storage : storage_for_kernels(t), t, c10::DispatchKey::CPU, t.storage_offset()), written});
    return given.back().alias;
  };

  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    auto& value = (*stack)[first + i];
    const bool written = (argument.alias_info() && argument.alias_info()->isWrite()) ||
                         argument.name() == "running_mean" || argument.name() == "running_var";  // batch norm does not say so
    if (value.isTensor()) {
      value = alias(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(alias(t, written));
      value = list;
    } else if (value.isOptionalTensorList()) {  // indices, which may be on the CPU
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
        const bool defined = t && t->defined();
        if (defined) indices.push_back(*t);
        list.push_back(defined && t->device().type() == FAKE ? std::optional<Tensor>(alias(*t, written)) : t);
      }
      value = list;
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
    } else if (value.isDevice()) {
      wanted = value.toDevice();
      value = Device(c10::kCPU);
    } else if (value.isNone() && argument.name() == "generator") {
      free_generator = first + i;
    }
  }
  TORCH_CHECK(!home || home->type() == FAKE || given.empty(), "Expected all tensors to be on the same device");
  const auto device = (home && home->type() == FAKE ? *home : wanted && wanted->type() == FAKE ? *wanted : Device(FAKE, current)).index();
  const DeviceIndex index = device < 0 ? current : device;
  TORCH_CHECK(!generator || generator->device() == Device(FAKE, index), "Expected a '", Device(FAKE, index), "' generator device but found '",
              generator->device(), "'");
  bool view = false;
  for (auto& returned : schema.returns()) view |= returned.alias_info() && !returned.alias_info()->isWrite();

  const size_t returns = schema.returns().size();
  std::optional<Moment> wait_for;
  {
    Held held(world.lock);
    auto& stream = current_timeline(index);
    Work work(schema.name(), stream);
    if (!view) for (auto& g : given) work.uses(block_of(g.original.storage()), g.written);
    {
      std::optional<Drawing> drawing;
      if (generator || free_generator || op.hasTag(at::Tag::nondeterministic_seeded)) {
        if (!generator) generator = device_at(index).generator;
        if (free_generator) (*stack)[*free_generator] = *generator;
        drawing.emplace(*generator, !free_generator && !schema.argumentIndexWithName("generator"));
      }
      compute(op, stack);
    }
    for (auto& g : given) if (g.written) keep_resized(g.original, g.alias);
    auto back = [&](const Tensor& made) -> Tensor {
      if (!made.defined() || (wanted && wanted->type() != FAKE)) return made;
      for (auto& g : given) if (made.is_same(g.alias)) return g.original;
      for (auto& g : given)
        if (made.is_alias_of(g.alias)) return over(g.original.storage(), made, c10::DispatchKey::PrivateUse1, made.storage_offset());
      return to_device(made, index, work);
    };
    for (size_t i = stack->size() - returns; i < stack->size(); i++) {
      auto& value = (*stack)[i];
      if (value.isTensor()) {
        value = back(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : value.toTensorVector()) list.push_back(back(t));
        value = list;
      }
    }
    if (!view) work.done_as_kernel();
    if (!view && waits_for_data(op, indices)) wait_for = moment(stream);
  }
  if (wait_for) host_waits(*wait_for);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(FAKE)));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(FAKE)));
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  std::vector<int64_t> contiguous(size.size(), 1);
  for (int64_t i = int64_t(size.size()) - 2; i >= 0; i--) contiguous[i] = contiguous[i + 1] * std::max<int64_t>(size[i + 1], 1);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride.empty() ? c10::IntArrayRef(contiguous) : stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const int64_t size = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, Stream s) {
  Held held(world.lock);
  if (auto* block = block_of(self.storage())) block->recorded.insert(&timeline(s));
}

int64_t attention_by_formula(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // what torch itself chooses for such a device
}

// torch calls these for every device but the CPU, whose kernels therefore do not have them. Autograd sees what they are made of.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& igates, const Tensor& hgates, const Tensor& hx, const std::optional<Tensor>& ibias,
                                    const std::optional<Tensor>& hbias) {
  auto i = (ibias && ibias->defined() ? igates + *ibias : igates).chunk(3, 1), h = (hbias && hbias->defined() ? hgates + *hbias : hgates).chunk(3, 1);
  auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + reset * h[2]).tanh();
  return {(hx - fresh) * update + fresh, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& igates, const Tensor& hgates, const Tensor& cx, const std::optional<Tensor>& ibias,
                                             const std::optional<Tensor>& hbias) {
  auto gates = igates + hgates;
  for (auto& bias : {ibias, hbias}) if (bias && bias->defined()) gates = gates + *bias;
  auto g = gates.chunk(4, 1);
  auto cy = g[1].sigmoid() * cx + g[0].sigmoid() * g[2].tanh();
  return {g[3].sigmoid() * cy.tanh(), cy, Tensor()};
}

template <bool LOWER>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = LOWER ? at::autocast::get_autocast_dtype(FAKE) : at::kFloat;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
    if (auto& value = (*stack)[i]; value.isTensor() && value.toTensor().defined()) value = at::autocast::cached_cast(dtype, value.toTensor(), FAKE);
  op.callBoxed(stack);
}

// ---- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex index_of(Device d) { return d.index() < 0 ? current : d.index(); }
  static Stream as_stream(const Timeline& t) { return Stream(Stream::UNSAFE, Device(FAKE, t.device), t.id); }
  c10::DeviceType type() const override { return FAKE; }
  Device getDevice() const override { return {FAKE, current}; }
  Device exchangeDevice(Device d) const override {
    Device old(FAKE, current);
    setDevice(d);
    return old;
  }
  void setDevice(Device d) const override {
    if (d.index() >= 0) device_at(d.index());
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(world.devices.size()); }

  Stream getStream(Device d) const noexcept override {
    Held held(world.lock);
    return as_stream(current_timeline(index_of(d)));
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, Device(FAKE, index_of(d))); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    Held held(world.lock);
    return as_stream(new_timeline(index_of(d)));
  }
  Stream exchangeStream(Stream s) const noexcept override {
    Stream old = getStream(s.device());
    chosen.resize(world.devices.size(), 0);
    chosen[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const Stream& s) const override { return over(moment_of_stream(s)); }
  void synchronizeStream(const Stream& s) const override { host_waits(moment_of_stream(s)); }
  void synchronizeDevice(const DeviceIndex d) const override { host_waits(moment_of_device(d)); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    Held held(world.lock);
    if (data.get_deleter() == &release) static_cast<Block*>(data.get_context())->recorded.insert(&timeline(s));
  }

  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Held held(world.lock);
    usable(s.device_index());
    auto& stream = timeline(s);
    join(stream.seen, world.host);
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = moment(stream);
    static_cast<Moment*>(*event)->time = std::max(now(), stream.busy_until);
  }
  void block(void* event, const Stream& s) const override {
    Held held(world.lock);
    if (event) wait(timeline(s), *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override { return !event || over(*static_cast<Moment*>(event)); }
  void synchronizeEvent(void* event) const override { if (event) host_waits(Moment(*static_cast<Moment*>(event))); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return 1e3 * (static_cast<Moment*>(b)->time - static_cast<Moment*>(a)->time);
  }

  static bool over(const Moment& m) {  // a host that has asked and been told so has waited
    {
      Held held(world.lock);
      usable(m.device);
      if (world.virtual_time) world.virtual_now += 1e-6;  // asking takes time, or a loop that asks would never end
      if (stuck(m.behind) || now() < m.time) return false;
    }
    host_waits(m);
    return true;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {  // some of these do not override anything in torch 2.6
  bool isBuilt() const { return true; }
  bool isAvailable() const { return !world.devices.empty(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(FAKE, d)); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return Guard().exchangeDevice(Device(FAKE, d)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return device_at(d < 0 ? current : d).generator; }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<FakeGenerator>(d < 0 ? current : d); }
  bool isPinnedPtr(const void* address) const override { return pinned_block(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void* address) const override {
    auto* block = block_at(address);
    TORCH_CHECK(block && !block->device.is_cpu(), "fake accelerator: an address that is not on any device");
    return block->device;
  }
};

#if TORCH_MINOR == 6  // torch.Generator("fake:1") asks the hooks only since 2.7
at::Generator new_generator(DeviceIndex d) { return Hooks().getNewGenerator(d); }
REGISTER_GENERATOR_PRIVATEUSE1(new_generator)
#endif

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_by_formula);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  // torch has kernels of its own for these on such a device: they raise, or are made of other operators, with other bits.
  for (auto* name : {"convolution_overrideable", "convolution_backward_overrideable", "native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the most common of what CUDA's autocast knows
  for (auto* name : {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
  for (auto* name : {"softmax.int", "log_softmax.int", "layer_norm", "nll_loss_nd", "cross_entropy_loss", "mse_loss", "exp", "log", "pow.Tensor_Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
}

void reset() {  // as if every device had been waited for; tensors live on
  std::vector<Pending> arrived;
  Held held(world.lock);
  arrived.swap(world.pending);
  for (auto& p : arrived) p.arrive();
  for (auto& device : world.devices) {
    device.lost = device.faulty = device.opened = false;
    device.fails_in = 0, device.limit = int64_t(1) << 34, device.peak = device.allocated;
    for (auto& s : device.streams) join(world.host, s.seen), s.busy_until = 0, s.behind.clear();
  }
  world.hanging.clear();
  world.counts.clear(), world.seconds.clear(), world.races.clear(), world.unraised.clear(), world.nondeterministic.clear(), world.trace.clear();
  world.seconds_per_byte = world.virtual_now = 0;
  world.virtual_time = world.traces = false, world.raises = true;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const char* wanted = std::getenv("FAKE_DEVICES");
  for (int i = 0, n = wanted ? std::atoi(wanted) : 4; i < n; i++) {
    world.devices.emplace_back();
    world.devices.back().generator = at::make_generator<FakeGenerator>(DeviceIndex(i));
    new_timeline(DeviceIndex(i));
  }
  c10::SetAllocator(FAKE, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { world.forked = world.used; });
  using unlocked = py::call_guard<py::gil_scoped_release>;  // whatever takes the world's lock

  m.def("device_count", [] { return int(world.devices.size()); });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int d) { Guard().setDevice(Device(FAKE, DeviceIndex(d))); });
  m.def("synchronize", [](int d) { host_waits(moment_of_device(DeviceIndex(d))); }, unlocked());
  m.def("default_generator", [](int d) { return device_at(DeviceIndex(d)).generator; });
  m.def("used", [] { return world.used; });
  m.def("forked", [] { return world.forked; });
  m.def("reset", &reset, unlocked());
  m.def("memory", [](int d) { auto& a = device_at(DeviceIndex(d)); return std::make_tuple(a.allocated, a.peak, a.limit); });
  m.def("reset_peak", [](int d) { device_at(DeviceIndex(d)).peak = device_at(DeviceIndex(d)).allocated; });
  m.def("set_memory_limit", [](int d, int64_t bytes) { device_at(DeviceIndex(d)).limit = bytes; });
  m.def("fail_allocation", [](int d, int64_t n) { device_at(DeviceIndex(d)).fails_in = n; });
  m.def("set_lost", [](int d, bool lost) { device_at(DeviceIndex(d)).lost = lost, device_at(DeviceIndex(d)).faulty = false; });
  m.def("fault", [](int d) { device_at(DeviceIndex(d)).faulty = true; });
  m.def("hang", [](int d) {
    Held held(world.lock);
    world.hanging.insert(++world.hangs);
    current_timeline(DeviceIndex(d)).behind.insert(world.hangs);
    return world.hangs;
  }, unlocked());
  m.def("end_hangs", [](const std::set<int64_t>& ended) { Held held(world.lock); for (auto each : ended) world.hanging.erase(each); }, unlocked());
  m.def("hanging", [] { Held held(world.lock); return world.hanging; }, unlocked());
  m.def("stuck", [](int d) { Held held(world.lock); return stuck(current_timeline(DeviceIndex(d)).behind); }, unlocked());
  m.def("opened", [] {
    Held held(world.lock);
    std::vector<int> opened;
    for (size_t i = 0; i < world.devices.size(); i++) if (world.devices[i].opened) opened.push_back(int(i));
    return opened;
  }, unlocked());
  m.def("counts", [] { Held held(world.lock); return world.counts; }, unlocked());
  m.def("reset_counts", [] { Held held(world.lock); world.counts.clear(); }, unlocked());
  m.def("races", [] { Held held(world.lock); world.unraised.clear(); return std::exchange(world.races, {}); }, unlocked());
  m.def("raise_races", [](bool on) { Held held(world.lock); world.raises = on; world.unraised.clear(); }, unlocked());
  m.def("set_kernel_seconds", [](double s, const std::string& name) { Held held(world.lock); world.seconds[plain(name)] = s; }, unlocked());
  m.def("set_copy_seconds_per_byte", [](double s) { Held held(world.lock); world.seconds_per_byte = s; }, unlocked());
  m.def("set_virtual_time", [](bool on) { Held held(world.lock); world.virtual_now = now(); world.virtual_time = on; }, unlocked());
  m.def("set_nondeterministic", [](const std::string& name, bool on) {
    Held held(world.lock);
    if (on) world.nondeterministic.insert(plain(name)); else world.nondeterministic.erase(plain(name));
  }, unlocked());
  m.def("trace", [](bool on) { Held held(world.lock); world.traces = on; }, unlocked());
  m.def("take_trace", [] { Held held(world.lock); return std::exchange(world.trace, {}); }, unlocked());
  m.def("now", [] { Held held(world.lock); return now(); }, unlocked());
}
