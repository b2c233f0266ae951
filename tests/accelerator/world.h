// Time and order: streams, what they have waited for, and whether two uses of memory race.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto FAKE = c10::DeviceType::PrivateUse1;

// ---- time and order

using Clock = std::vector<int64_t>;  // by stream: so much of its work is over before whatever comes next

int64_t known(const Clock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

struct Timeline {  // a stream
  DeviceIndex device;
  c10::StreamId id;
  size_t number;  // among the streams of all devices: its place in clocks
  int64_t enqueued = 0;
  Clock seen = {};
  double busy_until = 0;
  std::set<int64_t> behind = {};  // collectives that never end, before whatever comes next
  std::string str() const { return "stream " + std::to_string(id) + " of " + Device(FAKE, device).str(); }
};

struct Moment {  // of a stream, as an event remembers it
  Clock seen;
  double time = 0;
  DeviceIndex device = 0;
  std::set<int64_t> behind = {};
};

struct Use {  // of memory, by the work at `position` of a stream
  Timeline* stream = nullptr;
  int64_t position = 0;
  const std::string* name = nullptr;
};

struct Upload {  // a copy from pinned memory: its source is read when somebody needs the target, as late as a device might
  Tensor source, target;
  std::string content;  // of the source when the copy was enqueued
  bool delivered = false, watched = true;
  std::string text;
};

struct Block {  // device memory at an address that nobody may touch, or pinned memory
  Device device;
  char* address;
  size_t bytes;
  c10::DataPtr memory;  // what kernels work on
  Timeline* home = nullptr;
  Use written = {};
  std::vector<Use> read = {};  // since it was written, the last by each stream
  std::set<Timeline*> recorded = {};
  std::vector<std::shared_ptr<Upload>> uploads = {};
};

struct Pending {  // what becomes visible when the host knows that the work at `position` is over
  Timeline* stream;
  int64_t position;
  const Block* pinned;
  std::function<void()> arrive;
  std::shared_ptr<Upload> upload;
};

struct Accelerator {
  std::deque<Timeline> streams;  // a deque, since others keep pointers
  int64_t allocated = 0, peak = 0, limit = int64_t(1) << 34, fails_in = 0;
  bool lost = false, faulty = false, opened = false;
  at::Generator generator;
};

using Traced = std::tuple<int, int64_t, std::string, double, double, double>;  // device, stream, name, enqueued, starts, ends

struct World {
  std::recursive_mutex lock;
  std::deque<Accelerator> devices;
  size_t streams = 0;
  Clock host;  // one for all threads: they are taken to tell each other what they have waited for
  std::vector<Pending> pending;
  std::set<int64_t> hanging;  // collectives that never end, until somebody ends them
  int64_t hangs = 0;
  std::map<char*, Block*> blocks;  // all, by address
  std::unordered_set<std::string> names;
  std::map<std::string, std::pair<int64_t, int64_t>> counts;  // "from>to": copies, bytes
  std::map<std::string, double> seconds;                      // of kernels by name; "" is every other kernel
  double seconds_per_byte = 0, virtual_now = 0;
  bool virtual_time = false, raises = true, traces = false, used = false, forked = false;
  std::vector<std::string> races, unraised;
  std::set<std::string> nondeterministic;
  std::vector<Traced> trace;
};
World& world = *new World;  // never destroyed: tensors outlive static objects
using Held = std::lock_guard<std::recursive_mutex>;

thread_local DeviceIndex current = 0;
thread_local std::vector<c10::StreamId> chosen;

const auto beginning = std::chrono::steady_clock::now();

double now() {
  if (world.virtual_time) return world.virtual_now;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - beginning).count();
}

Accelerator& device_at(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && size_t(index) < world.devices.size(), "fake accelerator: there is no device ", int(index), " among ",
              world.devices.size());
  return world.devices[index];
}

Timeline& timeline(const Stream& s) { return device_at(s.device_index()).streams.at(s.id()); }

Timeline& new_timeline(DeviceIndex index) {
  auto& streams = device_at(index).streams;
  streams.push_back({index, c10::StreamId(streams.size()), world.streams++});
  return streams.back();
}

Timeline& current_timeline(DeviceIndex index) {
  return device_at(index).streams[size_t(index) < chosen.size() ? chosen[index] : 0];
}

Moment moment(const Timeline& s) { return {s.seen, s.busy_until, s.device, s.behind}; }

bool stuck(const std::set<int64_t>& behind) {
  for (auto each : behind) if (world.hanging.count(each)) return true;
  return false;
}

void wait(Timeline& s, const Moment& until) {
  join(s.seen, until.seen);
  s.busy_until = std::max(s.busy_until, until.time);
  s.behind.insert(until.behind.begin(), until.behind.end());
}

void found(const std::string& text) {  // a race, where nothing may be thrown: the next work or synchronisation does it
  world.races.push_back("fake accelerator: race: " + text);
  if (world.raises) world.unraised.push_back(world.races.back());
}

void raise_found() {
  if (world.unraised.empty()) return;
  auto text = world.unraised.front();
  world.unraised.clear();
  TORCH_CHECK(false, text);
}

Accelerator& usable(DeviceIndex index) {
  TORCH_CHECK(!world.forked, "fake accelerator: cannot be used in a forked process, since its parent has used it");
  world.used = true;
  auto& device = device_at(index);
  device.opened = true;
  TORCH_CHECK(!device.lost, "fake accelerator: device-side error: ", Device(FAKE, index).str(), " is lost");
  return device;
}

void move(const Tensor& from, const Tensor& to) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

void deliver(Upload& upload) {
  if (!upload.delivered && upload.target.defined()) move(upload.source, upload.target);
  upload.delivered = true;
}

bool overwritten(const Upload& u) { return std::memcmp(u.source.data_ptr(), u.content.data(), u.content.size()) != 0; }

void host_waits(const Moment& until) {  // never called with the lock held: it sleeps
  double from;
  {
    Held held(world.lock);
    usable(until.device);
    from = now();
    if (world.virtual_time) world.virtual_now = std::max(from, until.time);
  }
  for (;;) {
    {
      Held held(world.lock);
      if (!stuck(until.behind)) break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (double left = until.time - now(); left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
  std::vector<Pending> arrived;
  {
    Held held(world.lock);
    join(world.host, until.seen);
    auto over = [](const Pending& p) { return known(world.host, p.stream->number) >= p.position; };
    for (auto& p : world.pending) if (over(p)) arrived.push_back(p);
    world.pending.erase(std::remove_if(world.pending.begin(), world.pending.end(), over), world.pending.end());
    if (world.traces) world.trace.emplace_back(-1, -1, "synchronize", from, from, now());
    for (auto& p : arrived) {
      p.arrive();
      if (p.upload && p.upload->watched && overwritten(*p.upload)) found(p.upload->text);
    }
    auto& device = usable(until.device);
    if (device.faulty) {
      device.lost = true;
      TORCH_CHECK(false, "fake accelerator: device-side error: an illegal memory access was encountered on ",
                  Device(FAKE, until.device).str(), "; the kernel that did it may have been any since the last synchronisation");
    }
    raise_found();
  }
}

Moment moment_of_device(DeviceIndex index) {
  Held held(world.lock);
  Moment all{{}, 0, index, {}};
  for (auto& s : device_at(index).streams) {
    join(all.seen, s.seen);
    all.behind.insert(s.behind.begin(), s.behind.end());
    all.time = std::max(all.time, s.busy_until);
  }
  return all;
}

Moment moment_of_stream(const Stream& s) {
  Held held(world.lock);
  return moment(timeline(s));
}

// x.add_(y) reaches a device as add.out: all variants of an operator have one name.
std::string plain(const std::string& name) { return name.substr(0, name.find_last_not_of('_') + 1); }

struct Work {  // one kernel or copy on a stream: made, told what it uses, done
  Timeline& stream;
  const std::string& name;
  int64_t position;
  double enqueued_at = now();

  Work(const std::string& name, Timeline& stream)
      : stream(stream), name(*world.names.insert(plain(name)).first), position(stream.enqueued + 1) {
    usable(stream.device);
    raise_found();
    if (world.nondeterministic.count(this->name)) at::globalContext().alertNotDeterministic(this->name);
    join(stream.seen, world.host);  // the host enqueues it after whatever it has waited for
  }

  bool before(const Use& use) const {
    return !use.stream || use.stream == &stream || known(stream.seen, use.stream->number) >= use.position;
  }

  void uses(Block* block, bool writes) {
    if (!block) return;
    if (!before(block->written)) race(*block, block->written, writes);
    if (writes) for (auto& use : block->read) if (!before(use)) race(*block, use, writes);
    for (auto& upload : block->uploads) deliver(*upload);
    block->uploads.clear();
    Use mine{&stream, position, &name};
    if (writes) {
      block->written = mine;
      block->read.clear();
      return;
    }
    for (auto& use : block->read) if (use.stream == &stream) { use = mine; return; }
    block->read.push_back(mine);
  }

  void race(const Block& block, const Use& other, bool writes) const {
    found(name + " on " + stream.str() + (writes ? " writes" : " reads") + " memory of " +
          (block.device.is_cpu() ? "the host (pinned)" : block.device.str()) + " that " + *other.name + " on " + other.stream->str() +
          " uses, and does not wait for it");
    raise_found();
  }

  void done(double seconds) {
    stream.enqueued = position;
    stream.seen.resize(std::max(stream.seen.size(), stream.number + 1));
    stream.seen[stream.number] = position;
    double starts = std::max(now(), stream.busy_until);
    stream.busy_until = starts + seconds;
    if (world.traces) world.trace.emplace_back(stream.device, stream.id, name, enqueued_at, starts, stream.busy_until);
  }

  void done_as_kernel() {
    auto own = world.seconds.find(name);
    done(own != world.seconds.end() ? own->second : world.seconds[""]);
  }
};

}  // namespace
