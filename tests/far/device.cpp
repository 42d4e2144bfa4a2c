// The device "far": memory of the host under another name. `device.py` says what it is for and compiles it.
//
// A kernel runs on the CPU, over the same memory, by one boxed fallback for all operators: each far tensor is lent as a
// CPU tensor with the same strides, and each result is handed back under far's name. So the bits are those of the CPU,
// views share their storage, and no operator has to be listed. What the host reads is reported to Python (`far::read`).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::IValue;
using c10::StorageImpl;
using c10::Stream;
constexpr auto FAR = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;

bool available = false;  // only while a test uses the device, so that other tests find a machine without one
thread_local DeviceIndex current = 0;

void report(const char* what) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("far::read", "").typed<void(c10::string_view)>();
  op.call(what);
}

// ---- Streams. A non-blocking copy waits in its stream's queue until a kernel runs there or something waits for it: as late
// as a real device might run it, so that a missing wait shows as wrong numbers. A stream that is told to wait for an event
// of another one has that in its own queue.

struct Queue {
  std::deque<std::function<void()>> work;
  int64_t ended = 0;
};
struct FarEvent {
  Stream stream;
  int64_t until;
};
std::recursive_mutex streams_mutex;
std::map<std::pair<DeviceIndex, c10::StreamId>, Queue> queues;
int64_t streams = 0;
int64_t queued_copies = 0;
thread_local c10::StreamId current_stream[COUNT] = {0, 0};

Queue& queue(Stream stream) { return queues[{stream.device_index(), stream.id()}]; }

void run(Queue& queue, int64_t until = INT64_MAX) {
  std::lock_guard<std::recursive_mutex> guard(streams_mutex);
  while (!queue.work.empty() && queue.ended < until) {
    auto work = std::move(queue.work.front());
    queue.work.pop_front();
    queue.ended++;
    work();
  }
}

Stream stream_of(DeviceIndex index) { return Stream(Stream::UNSAFE, Device(FAR, index), current_stream[index]); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return FAR; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    if (device.index() >= 0) current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(FAR, current); }
  void setDevice(Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return stream_of(device.index() < 0 ? current : device.index()); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(FAR, device.index() < 0 ? current : device.index()), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    return Stream(Stream::UNSAFE, Device(FAR, device.index() < 0 ? current : device.index()), ++streams);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = stream_of(stream.device_index());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    delete static_cast<FarEvent*>(*event);
    auto& queued = queue(stream);
    *event = new FarEvent{stream, queued.ended + static_cast<int64_t>(queued.work.size())};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<FarEvent*>(event); }
  void block(void* event, const Stream& waiting) const override {
    auto* far = static_cast<FarEvent*>(event);
    if (!far || queryEvent(event)) return;
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    queue(waiting).work.push_back([stream = far->stream, until = far->until] { run(queue(stream), until); });
  }
  bool queryEvent(void* event) const override {
    auto* far = static_cast<FarEvent*>(event);
    return !far || queue(far->stream).ended >= far->until;
  }
  bool queryStream(const Stream& stream) const override { return queue(stream).work.empty(); }
  void synchronizeStream(const Stream& stream) const override {
    report("synchronize stream");
    run(queue(stream));
  }
  void synchronizeEvent(void* event) const override {
    report("synchronize event");
    if (auto* far = static_cast<FarEvent*>(event)) run(queue(far->stream), far->until);
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    report("synchronize device");
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    for (auto& [key, queued] : queues)
      if (key.first == index) run(queued);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

// ---- Random numbers: a generator for each device, with the numbers that the CPU draws from the same seed.

struct FarGenerator final : c10::GeneratorImpl {
  explicit FarGenerator(DeviceIndex index, at::Generator of = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(FAR, index), c10::DispatchKeySet(DispatchKey::PrivateUse1)), cpu(std::move(of)) {}
  at::Generator cpu;
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  FarGenerator* clone_impl() const override { return new FarGenerator(device_.index(), cpu.clone()); }
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < COUNT; i++) made.push_back(at::make_generator<FarGenerator>(i));
    return made;
  }();
  return generators.at(index < 0 ? current : index);
}

// ---- Pinned memory of the host, known by its address.

std::mutex pinned_mutex;
std::set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.insert(data);
    return {data, data, &free, Device(c10::kCPU)};
  }
  static void free(void* data) {
    {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned.erase(data);
    }
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_allocator;

struct FarAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    return {data, data, &c10::free_cpu, Device(FAR, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }  // nothing is measured
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
} far_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<FarGenerator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(FAR, current); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    return pinned.count(data) != 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return available ? COUNT : 0; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = far_allocator.allocate(size);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    data.unsafe_set_device(storage.device());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

// ---- Kernels.

using StoragePtr = c10::intrusive_ptr<StorageImpl>;

void release(void* storage) { c10::raw::intrusive_ptr::decref(static_cast<StorageImpl*>(storage)); }

// The memory of a storage under another device's name. The new storage keeps the old one alive.
StoragePtr renamed(const StoragePtr& storage, Device device) {
  auto* owner = storage.get();
  c10::raw::intrusive_ptr::incref(owner);
  auto* allocator = device.type() == FAR ? static_cast<c10::Allocator*>(&far_allocator) : c10::GetCPUAllocator();
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), storage->nbytes(),
      c10::DataPtr(const_cast<void*>(storage->data()), owner, &release, device), allocator, /*resizable=*/true);
}

at::Tensor over(const StoragePtr& storage, const at::Tensor& like, DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

StoragePtr storage_of(const at::Tensor& tensor) { return tensor.storage().getWeakStorageImpl().lock(); }

bool is_far(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == FAR; }

// One call of an operator: lends far tensors as CPU tensors and takes the results back.
struct Call {
  const std::string& name;
  std::optional<Device> device;
  std::map<StorageImpl*, StoragePtr> lent;  // far storage -> CPU storage
  std::map<StorageImpl*, StoragePtr> back;  // CPU storage -> far storage
  std::map<c10::TensorImpl*, at::Tensor> tensors, originals;

  void meet(Device other) {
    if (other.index() < 0) other = Device(FAR, current);
    TORCH_CHECK(!device || *device == other, name, ": expected all tensors on one device, found ", *device, " and ", other);
    device = other;
  }

  StoragePtr lend(const StoragePtr& storage) {
    auto& cpu = lent[storage.get()];
    if (!cpu) {
      cpu = renamed(storage, c10::kCPU);
      back[cpu.get()] = storage;
    }
    return cpu;
  }

  at::Tensor lend(const at::Tensor& tensor) {
    if (!is_far(tensor)) return tensor;
    auto& cpu = tensors[tensor.unsafeGetTensorImpl()];
    if (!cpu.defined()) {
      cpu = over(lend(storage_of(tensor)), tensor, DispatchKey::CPU);
      originals[cpu.unsafeGetTensorImpl()] = tensor;
    }
    return cpu;
  }

  at::Tensor take(const at::Tensor& tensor) {
    if (!tensor.defined() || !device || tensor.device().type() != c10::kCPU) return tensor;
    auto known = originals.find(tensor.unsafeGetTensorImpl());
    if (known != originals.end()) return known->second;
    auto storage = storage_of(tensor);
    auto& far = back[storage.get()];
    if (!far) far = renamed(storage, *device);
    return over(far, tensor, DispatchKey::PrivateUse1);
  }

  // An operator may have resized what it wrote to, or given it another storage.
  void settle() {
    for (auto& [impl, far] : originals) {
      auto& cpu = tensors[far.unsafeGetTensorImpl()];
      auto storage = storage_of(cpu);
      auto mine = storage_of(far);
      if (lent[mine.get()].get() != storage.get()) {
        auto& other = back[storage.get()];
        if (!other) other = renamed(storage, far.device());
        far.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(other));
      } else if (mine->data() != storage->data()) {
        c10::raw::intrusive_ptr::incref(storage.get());
        c10::DataPtr data(const_cast<void*>(storage->data()), storage.get(), &release, far.device());
        mine->set_data_ptr_noswap(std::move(data));
        mine->set_nbytes(storage->nbytes());
      }
      if (cpu.sizes() != far.sizes() || cpu.strides() != far.strides() || cpu.storage_offset() != far.storage_offset())
        far.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
};

template <class F>
void each_tensor(const IValue& value, F&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) each_tensor(item, visit);
  }
}

IValue mapped(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// Operators whose result has a shape that only the values tell, so that the host waits for them.
const std::set<std::string> READS = {
    "aten::_local_scalar_dense", "aten::equal",          "aten::nonzero",  "aten::masked_select",
    "aten::_unique",             "aten::_unique2",       "aten::bincount", "aten::unique_dim",
    "aten::unique_consecutive",  "aten::unique_dim_consecutive"};

bool reads(const std::string& name, const std::vector<IValue>& arguments, const c10::FunctionSchema& schema) {
  if (READS.count(name)) return true;
  if (name == "aten::repeat_interleave" || name == "aten::_index_put_impl_" || name == "aten::index_put_") {
    bool found = name == "aten::repeat_interleave" && arguments.back().isNone();
    for (size_t i = 0; i < arguments.size() && name != "aten::repeat_interleave"; i++)
      if (schema.arguments()[i].name() == "indices")
        each_tensor(arguments[i], [&](const at::Tensor& index) { found |= index.scalar_type() == c10::kBool; });
    // CUDA fills by a mask where the value is a number.
    return found && (name == "aten::repeat_interleave" || arguments[2].toTensor().numel() != 1);
  }
  return false;
}

// CUDA's rule: a tensor without dimensions may come from the CPU where a kernel takes a number, and indices may.
void check_devices(Call& call, const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const auto& schema = op.schema();
  bool pointwise = op.hasTag(at::Tag::pointwise);
  std::vector<at::Tensor> near;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = schema.arguments()[i];
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    bool free = argument.name() == "indices" || call.name == "aten::set_";
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (is_far(tensor)) return call.meet(tensor.device());
      bool number = tensor.dim() == 0 && (pointwise || tensor.unsafeGetTensorImpl()->is_wrapped_number());
      if (tensor.device().is_meta() || (!free && (written || !number))) near.push_back(tensor);
    });
    if (arguments[i].isDevice() && arguments[i].toDevice().type() == FAR) call.meet(arguments[i].toDevice());
  }
  if (call.device && !near.empty())
    TORCH_CHECK(false, call.name, ": expected all tensors on one device, found ", *call.device, " and ",
                near[0].device(), " (shape ", near[0].sizes(), ")");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // Two operators have other names on a device that is not in torch.
  static auto convolution = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  static auto backward = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto& name = op.schema().operator_name().name;
  if (name == "aten::convolution_overrideable") return fallback(convolution, stack);
  if (name == "aten::convolution_backward_overrideable") {
    const auto weight = (*stack)[stack->size() - 8].toTensor();
    bool transposed = (*stack)[stack->size() - 4].toBool();
    int64_t outputs = transposed ? weight.size(1) * stack->at(stack->size() - 2).toInt() : weight.size(0);
    stack->insert(stack->end() - 7, IValue(c10::List<int64_t>({outputs})));
    return fallback(backward, stack);
  }
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  Call call{schema.operator_name().name};
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  check_devices(call, op, arguments);
  if (!call.device) call.device = Device(FAR, current);
  run(queue(stream_of(call.device->index())));
  if (reads(call.name, arguments, schema)) report(schema.name().c_str() + 6);
  bool drew = !op.hasTag(at::Tag::nondeterministic_seeded);
  auto& generator = default_generator(call.device->index());
  for (size_t i = 0; i < count; i++) {
    IValue& value = arguments[i];
    const auto kind = schema.arguments()[i].type()->str();
    if (kind.find("Generator") == 0 && !drew) {
      auto given = value.isNone() ? generator : value.toGenerator();
      TORCH_CHECK(given.device() == *call.device, call.name, ": expected a generator on ", *call.device, ", found one on ",
                  given.device());
      value = static_cast<FarGenerator*>(given.unsafeGetGeneratorImpl())->cpu;
      drew = true;
    } else if (value.isStorage()) {
      auto storage = value.toStorage().getWeakStorageImpl().lock();
      if (storage->device().type() == FAR) value = c10::Storage(call.lend(storage));
    } else if (value.isDevice() && value.toDevice().type() == FAR) {
      value = Device(c10::kCPU);
    } else {
      value = mapped(value, [&](const at::Tensor& tensor) { return call.lend(tensor); });
    }
  }
  std::vector<IValue> results = arguments;
  const auto& cpu = at::detail::getDefaultCPUGenerator();
  auto& drawn = static_cast<FarGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
  at::Tensor before;
  if (!drew) {  // draws from the default generator, which it does not take as an argument
    before = cpu.get_state();
    const_cast<at::Generator&>(cpu).set_state(drawn.get_state());
  }
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &results);
  if (!drew) {
    drawn.set_state(cpu.get_state());
    const_cast<at::Generator&>(cpu).set_state(before);
  }
  call.settle();
  torch::jit::drop(*stack, count);
  for (IValue& value : results)
    stack->push_back(mapped(value, [&](const at::Tensor& tensor) { return call.take(tensor); }));
}

at::Tensor near(const at::Tensor& tensor) {
  return is_far(tensor) ? over(renamed(storage_of(tensor), c10::kCPU), tensor, DispatchKey::CPU) : tensor;
}

bool is_pinned(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  return tensor.device().is_cpu() && pinned.count(tensor.storage().data()) != 0;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool non_blocking) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "")
                       .typed<at::Tensor&(at::Tensor&, const at::Tensor&, bool)>();
  auto device = is_far(into) ? into.device() : from.device();
  auto& queued = queue(stream_of(device.index()));
  auto source = near(from), target = near(into);
  auto copy = [source, target]() mutable {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    op.call(target, source, false);
  };
  bool crosses = is_far(from) != is_far(into);
  if (non_blocking && crosses && is_pinned(is_far(from) ? into : from)) {
    std::lock_guard<std::recursive_mutex> guard(streams_mutex);
    queued.work.push_back(copy);
    queued_copies++;
  } else {
    if (crosses && !is_far(into)) report("copy to the host");
    run(queued);
    copy();
  }
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& into) {
  into.resize_(from.sizes());
  return copy_from(from, into, false);
}

// As on CUDA, F.dropout calls this; the CPU's own kernel multiplies in another order than F.dropout on the CPU.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto noise = at::empty_like(input);
  if (train.value_or(true)) {
    noise.bernoulli_(1 - p);
    auto kept = noise.to(c10::kBool);
    return {noise.div_(1 - p).mul(input), kept};
  }
  return {input.clone(), noise.fill_(1).to(c10::kBool)};
}

// autograd starts a thread for each device before the first backward pass of a process, which is long past when a test
// asks for this device: start those that are missing.
struct Engine : torch::autograd::Engine {
  static constexpr auto queues = &Engine::device_ready_queues_;
};

void start_threads() {
  auto& engine = torch::autograd::Engine::get_default_engine();
  auto& ready = engine.*Engine::queues;
  for (auto index = static_cast<int>(ready.size()); index < COUNT; index++) {
    ready.push_back(std::make_shared<torch::autograd::ReadyQueue>());
    std::thread([&engine, index, mine = ready.back()] { engine.thread_init(index, mine); }).detach();
  }
}

c10::impl::DeviceGuardImplRegistrar guard(FAR, new Guard());

}  // namespace

TORCH_LIBRARY(far, m) {
  m.def("read(str what) -> ()");  // device.py implements it
  m.def("start_threads() -> ()", &start_threads);
  m.def("set_available(bool value) -> ()", [](bool value) { available = value; });
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return std::optional<at::Generator>(default_generator(index)); });
  m.def("is_available() -> bool", []() { return available; });
  m.def("set_device(int index) -> ()", [](int64_t index) { current = index; });
  m.def("device() -> int", []() { return static_cast<int64_t>(current); });
  m.def("synchronize(int index) -> ()", [](int64_t index) { Guard().synchronizeDevice(index); });
  m.def("streams() -> int", []() { return streams; });
  m.def("queued_copies() -> int", []() { return queued_copies; });
  c10::SetAllocator(FAR, &far_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_dropout", native_dropout);
  // torch writes these out for other devices; the CPU has kernels of its own.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The operators of the CPU's list that the tests' models use.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss2d, fp32)
}
