// A device for machines that have none: torch keeps its tensors apart from those of the host, as it does with a GPU's.
//
// Its memory is the host's, and its kernels are the host's, so results have the bits of a job on CPUs. What is harsher
// than a device, and what is as harsh:
//
// * an operation that takes tensors of both fails, but for numbers (no dimension) and indices;
// * memory is limited and counted, and noise when it is given out empty;
// * random numbers come from a generator of its own;
// * copies that do not block, on a stream other than the default one, are late: until a seeded moment the target is noise.
//   A source or target that nobody keeps until then is lost, which is counted.
//
// What the default stream is told to do is done when the call returns.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <unistd.h>

namespace {

using Clock = std::chrono::steady_clock;
using at::IValue;
using at::Tensor;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int NOISE = 0x3C; // bytes that look like small numbers of any type

c10::Device device() {
  return c10::Device(TYPE, 0);
}

bool is_far(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

// -- memory -----------------------------------------------------------------------------------------------

std::atomic<int64_t> allocated{0}, peak{0}, limit{INT64_MAX};

void check_room(int64_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, allocated + bytes <= limit, "far: out of memory: ", bytes, " bytes");
}

void count(int64_t bytes) {
  auto now = allocated += bytes;
  auto before = peak.load();
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

struct Block {
  void* data;
  int64_t bytes;
};

void release(void* context) {
  auto block = static_cast<Block*>(context);
  allocated -= block->bytes;
  std::free(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, nullptr, &c10::detail::deleteNothing, device()};
    check_room(bytes);
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(data, NOISE, bytes);
    count(bytes);
    return {data, new Block{data, int64_t(bytes)}, &release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

Memory memory;

// What a process may still use as it ends is never destroyed.
std::mutex pinned_lock;
auto& pinned = *new std::map<const char*, size_t>();

void unpin(void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(static_cast<char*>(data));
  std::free(data);
}

struct PageLocked final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<char*>(data)] = bytes;
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

PageLocked page_locked;

bool is_page_locked(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin())
    return false;
  auto found = std::prev(after);
  return static_cast<const char*>(data) < found->first + found->second;
}

// -- tensors of either side on one memory -----------------------------------------------------------------

Tensor tensor_of(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number())
    impl->set_wrapped_number(true);
  return made;
}

// What a tensor of the device is for the host's kernels.
Tensor near(const Tensor& far) {
  auto kept = far.storage();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      kept.nbytes(),
      c10::DataPtr(
          kept.mutable_data(),
          new c10::Storage(kept),
          [](void* context) { delete static_cast<c10::Storage*>(context); },
          c10::Device(c10::DeviceType::CPU)),
      c10::GetAllocator(c10::DeviceType::CPU),
      true);
  return tensor_of(c10::Storage(std::move(storage)), c10::DispatchKey::CPU, far);
}

void forget(void* context) {
  auto kept = static_cast<c10::Storage*>(context);
  allocated -= kept->nbytes();
  delete kept;
}

c10::DataPtr kept_by_the_device(const c10::Storage& near) {
  check_room(near.nbytes());
  count(near.nbytes());
  return c10::DataPtr(near.mutable_data(), new c10::Storage(near), &forget, device());
}

// The same for what a kernel has made.
Tensor far(const Tensor& near) {
  auto kept = near.storage();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), kept.nbytes(), kept_by_the_device(kept), &memory, true);
  return tensor_of(c10::Storage(std::move(storage)), c10::DispatchKey::PrivateUse1, near);
}

// -- operations -------------------------------------------------------------------------------------------

std::atomic<int64_t> waits{0}, loads{0};

// The host asks for what the device has yet to compute, in whatever thread: autograd has one for the device.
void note_wait() {
  waits++;
}

// It waits for a mark. A thread of the package may, the main thread should not.
void note_wait_for_mark() {
  if (gettid() == getpid())
    waits++;
}

const at::Generator& generator() {
  static auto* made = new at::Generator(at::detail::createCPUGenerator(1));
  return *made;
}

// Operations whose results have a shape, or a value, that only the device knows: the host waits for it.
const std::set<std::string> LOOKING{
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};

// Operations whose indices may be in host memory.
const std::set<std::string> INDEXED{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

struct Call {
  const c10::OperatorHandle& op;
  std::vector<std::pair<Tensor, Tensor>> pairs; // of the device, and of the host

  Tensor given(const Tensor& tensor, bool index = false) {
    if (!is_far(tensor)) {
      TORCH_CHECK(index || !tensor.defined() || tensor.dim() == 0, op.operator_name(), ": expected all tensors on one device, found one of the host's");
      return tensor;
    }
    for (auto& [mine, theirs] : pairs)
      if (mine.is_same(tensor))
        return theirs;
    pairs.emplace_back(tensor, near(tensor));
    return pairs.back().second;
  }

  // What a kernel has resized.
  void follow() {
    for (auto& [mine, theirs] : pairs) {
      auto storage = mine.storage().unsafeGetStorageImpl();
      if (theirs.storage().data() != storage->data()) {
        auto bytes = theirs.storage().nbytes();
        storage->set_data_ptr_noswap(kept_by_the_device(theirs.storage()));
        storage->set_nbytes(bytes);
      }
      if (!mine.sizes().equals(theirs.sizes()) || !mine.strides().equals(theirs.strides()))
        mine.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
    }
  }

  Tensor returned(const Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    for (auto& [mine, theirs] : pairs)
      if (theirs.is_same(tensor))
        return mine;
    for (auto& [mine, theirs] : pairs)
      if (tensor.storage().unsafeGetStorageImpl() == theirs.storage().unsafeGetStorageImpl())
        return tensor_of(mine.storage(), c10::DispatchKey::PrivateUse1, tensor);
    return far(tensor);
  }
};

// Exchange a tensor, or each of a list; whether there is one.
template <class Exchange>
bool exchanged(IValue& value, Exchange exchange) {
  if (value.isTensor()) {
    value = exchange(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> found;
    for (const Tensor& each : value.toTensorVector())
      found.push_back(exchange(each));
    value = found;
  } else {
    return false;
  }
  return true;
}

void by_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op, {}};
  const auto& arguments = op.schema().arguments();
  auto begin = stack->size() - arguments.size();
  bool indexed = INDEXED.count(op.operator_name().name), waits = LOOKING.count(op.operator_name().name);
  for (size_t number = 0; number < arguments.size(); number++) {
    IValue& value = (*stack)[begin + number];
    if (exchanged(value, [&](const Tensor& each) { return call.given(each); }))
      continue;
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (const auto& each : value.toOptionalTensorVector()) {
        found.push_back(each.has_value() ? std::optional<Tensor>(call.given(*each, indexed)) : std::nullopt);
        waits |= indexed && each.has_value() && (each->dtype() == at::kBool || each->dtype() == at::kByte);
      }
      value = found;
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isNone() && arguments[number].name() == "generator") {
      value = generator();
    }
  }
  if (waits)
    note_wait();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.follow();
  begin = stack->size() - op.schema().returns().size();
  for (size_t number = begin; number < stack->size(); number++)
    exchanged((*stack)[number], [&](const Tensor& each) { return call.returned(each); });
}

// -- streams ----------------------------------------------------------------------------------------------

std::atomic<int64_t> late_seed{-1}, late{0}, lost{0}, pageable{0};
constexpr double LATE_S = 0.003;

// The end of what a stream has been told so far.
struct Mark {
  std::mutex lock;
  std::condition_variable reached;
  bool done = false;
  Clock::time_point at;

  void reach() {
    std::lock_guard<std::mutex> guard(lock);
    done = true;
    at = Clock::now();
    reached.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> guard(lock);
    reached.wait(guard, [this] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> guard(lock);
    return done;
  }
};

using MarkPointer = std::shared_ptr<Mark>;

// Does one thing after the other, each a moment later.
struct Queue {
  std::mutex lock;
  std::condition_variable came;
  std::deque<std::function<void()>> actions;
  std::mt19937 random;

  explicit Queue(int64_t seed) : random(seed) {
    std::thread([this] { run(); }).detach();
  }
  void put(std::function<void()> action) {
    std::lock_guard<std::mutex> guard(lock);
    actions.push_back(std::move(action));
    came.notify_one();
  }
  void run() {
    while (true) {
      std::function<void()> action;
      {
        std::unique_lock<std::mutex> guard(lock);
        came.wait(guard, [this] { return !actions.empty(); });
        action = std::move(actions.front());
        actions.pop_front();
      }
      action();
    }
  }
  void dawdle() {
    std::uniform_real_distribution<double> upto(-LATE_S, LATE_S);
    auto seconds = upto(random);
    if (seconds > 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
};

thread_local c10::StreamId current = 0;
std::atomic<c10::StreamId> newest{0};
std::mutex queues_lock;

Queue& queue(c10::StreamId id) {
  static auto* made = new std::map<c10::StreamId, Queue*>();
  std::lock_guard<std::mutex> guard(queues_lock);
  auto& found = (*made)[id];
  if (found == nullptr)
    found = new Queue(late_seed * 1000 + id);
  return *found;
}

bool is_late(c10::StreamId id) {
  return id != 0 && late_seed >= 0;
}

MarkPointer marked(c10::StreamId id) {
  auto mark = std::make_shared<Mark>();
  if (is_late(id))
    queue(id).put([mark] { mark->reach(); });
  else
    mark->reach();
  return mark;
}

c10::Stream stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return device();
  }
  c10::Device getDevice() const override {
    return device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Stream getStream(c10::Device) const override {
    return stream(current);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(++newest);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream(++newest);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current, next.id()));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new MarkPointer();
    *static_cast<MarkPointer*>(*event) = marked(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr)
      return;
    auto mark = *static_cast<MarkPointer*>(event);
    if (is_late(stream.id()))
      queue(stream.id()).put([mark] { mark->wait(); });
    else
      mark->wait();
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<MarkPointer*>(event))->query();
  }
  void synchronizeEvent(void* event) const override {
    note_wait_for_mark();
    if (event != nullptr)
      (*static_cast<MarkPointer*>(event))->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPointer*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto begin = *static_cast<MarkPointer*>(first), end = *static_cast<MarkPointer*>(second);
    TORCH_CHECK(begin->query() && end->query(), "far: an event has not been reached yet");
    return std::chrono::duration<double, std::milli>(end->at - begin->at).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    return marked(stream.id())->query();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait_for_mark();
    marked(stream.id())->wait();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    note_wait_for_mark();
    for (c10::StreamId id = 1; id <= newest; id++)
      marked(id)->wait();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- what torch asks of the device itself -----------------------------------------------------------------

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The host's tensor over the memory of a storage that lives, of either side.
Tensor over(const c10::intrusive_ptr<c10::StorageImpl>& storage, const Tensor& like) {
  auto at = tensor_of(c10::Storage(storage), storage->device_type() == TYPE ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU, like);
  return is_far(at) ? near(at) : at;
}

struct Place {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  Tensor like; // shape, strides and type, without memory

  explicit Place(const Tensor& tensor)
      : storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl())),
        like(at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(), nullptr, false),
            c10::DispatchKeySet(c10::DispatchKey::CPU),
            tensor.dtype())) {
    like.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  }
};

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor from = is_far(source) ? near(source) : source, into = is_far(target) ? near(target) : target;
  if (!non_blocking && is_far(source) && !is_far(target))
    note_wait();
  if (!non_blocking && !is_far(source))
    loads++;
  if (!(is_late(current) && non_blocking)) {
    into.copy_(from.expand_as(into));
    return target;
  }
  auto noise = at::full({int64_t(into.numel() * into.itemsize())}, NOISE, at::kByte);
  if (into.numel() > 0)
    into.copy_(noise.view(into.scalar_type()).view(into.sizes()));
  late++;
  if (is_far(source) != is_far(target) && !is_page_locked((is_far(source) ? target : source).const_data_ptr()))
    pageable += into.nbytes(); // a device would make the thread wait for these
  Place begin(source), end(target);
  auto& mine = queue(current);
  mine.put([begin, end, &mine] {
    mine.dawdle();
    auto first = begin.storage.lock(), second = end.storage.lock();
    if (first && second)
      over(second, end.like).copy_(over(first, begin.like));
    else
      lost++; // its memory is somebody else's by now
  });
  return target;
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_whole(Tensor& self, c10::Storage source) {
  std::vector<c10::SymInt> size{c10::SymInt(int64_t(source.nbytes() / self.dtype().itemsize()))};
  return set_storage(self, std::move(source), 0, size, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

void grow(c10::StorageImpl* storage, size_t bytes) {
  auto data = memory.allocate(bytes);
  if (storage->nbytes() > 0 && bytes > 0)
    std::memcpy(data.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  auto storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes)
    grow(storage, bytes);
  return self;
}

at::Scalar item(const Tensor& self) {
  note_wait();
  return near(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  // The memory is not given out anew before that stream is through.
  if (is_late(stream.id()))
    queue(stream.id()).put([kept = self.storage()] {});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // What torch would put together from other operations, with other bits than its kernel for the host has.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&by_the_host>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
}

struct Hooks final : at::PrivateUse1HooksInterface {
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
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return device();
  }
  bool isPinnedPtr(const void* data) const override {
    return is_page_locked(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &page_locked;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(storage.unsafeGetStorageImpl(), bytes);
  }
};

int64_t installed = [] {
  c10::SetAllocator(TYPE, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return 1;
}();

// -- what tests ask ---------------------------------------------------------------------------------------

std::vector<int64_t> counts() {
  return {late, lost, waits, loads, allocated, peak, limit, pageable};
}

TORCH_LIBRARY(far, m) {
  m.def("late(int seed) -> ()", [](int64_t seed) { late_seed = seed; });
  m.def("limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("forget_peak() -> ()", [] { peak = allocated.load(); });
  m.def("counts() -> int[]", &counts);
  m.def("generator() -> Generator?", [] { return generator(); });
}

} // namespace
