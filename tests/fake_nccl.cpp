#include "tests/fake_nccl.h"

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "dist/collectives/algorithms.h"
#include "tests/twin.h"

namespace tandem::test::fake_nccl {
namespace {

enum class What { all_reduce, reduce, broadcast };
struct Asked {
  What what;
  std::size_t count;
  ncclDataType_t type;
  ncclRedOp_t operation;
  int root;
  bool operator==(const Asked&) const = default;
};
struct Meeting {                                // of one collective
  std::map<int, Asked> asked;                   // by the ranks that are here
  std::map<int, std::vector<std::byte>> given;  // by them
  std::vector<std::byte> result;
};
struct World {
  std::mutex mutex;
  int ranks = 0, joined = 0;
  std::map<std::uint64_t, Meeting> meetings;
  struct Message {
    std::vector<std::byte> data;
    std::shared_ptr<bool> taken;
  };
  std::map<std::pair<int, int>, std::deque<Message>> messages;
};
struct Comm {
  std::shared_ptr<World> world;
  int rank = 0, calls = 0, polls = 0;
  std::uint64_t number = 0;
  bool aborted = false;
  std::vector<std::pair<TwinQueue*, std::function<bool()>>> unsettled;
};
Comm& of(ncclComm_t c) { return *reinterpret_cast<Comm*>(c); }

std::mutex worlds_mutex;
std::map<std::uint64_t, std::shared_ptr<World>> worlds;

DType dtype_of_nccl(ncclDataType_t t) {
  return t == ncclFloat64    ? DType::f64
         : t == ncclBfloat16 ? DType::bf16
         : t == ncclFloat32  ? DType::f32
         : t == ncclInt32    ? DType::i32
                             : DType::u8;
}

// A group is one piece of work, of which the parts go on side by side.
struct Group {
  bool open = false;
  ncclComm_t comm = nullptr;
  TwinQueue* stream = nullptr;
  std::vector<std::function<bool()>> parts;
};
thread_local Group group;
ncclResult_t enqueue(ncclComm_t c, cudaStream_t s, std::function<bool(Twin&)> work) {
  Comm& comm = of(c);
  if (comm.aborted) return ncclInvalidUsage;
  comm.calls++;
  comm.polls = 2;
  if (comm.world->ranks == 1) return ncclInProgress;  // nothing to do, also on a stream of a real device
  auto* stream = reinterpret_cast<TwinQueue*>(s);
  std::function<bool()> piece = [stream, work = std::move(work)] { return !trouble.silent && work(stream->twin()); };
  if (group.open) {
    group.comm = c, group.stream = stream;
    group.parts.push_back(std::move(piece));
  } else {
    comm.unsettled.push_back({stream, std::move(piece)});
  }
  return ncclInProgress;
}

ncclResult_t collective(Asked asked, const void* from, void* to, ncclComm_t c, cudaStream_t s) {
  const std::size_t bytes = asked.count * size_of(dtype_of_nccl(asked.type));
  return enqueue(
      c, s, [world = of(c).world, rank = of(c).rank, number = of(c).number++, asked, from, to, bytes](Twin& twin) {
        std::lock_guard lock(world->mutex);
        Meeting& m = world->meetings[number];
        if (m.asked.emplace(rank, asked).second) {
          m.given[rank].resize(bytes);
          twin.read(m.given[rank].data(), from, bytes);
        }
        if (int(m.asked.size()) < world->ranks) return false;
        for (const auto& [r, a] : m.asked)
          if (!(a == asked)) return false;
        if (m.result.empty() && bytes > 0) {
          m.result = m.given[asked.what == What::broadcast ? asked.root : 0];
          for (int r = 1; r < world->ranks && asked.what != What::broadcast; r++)
            combine_elements(asked.operation == ncclSum ? Combine::sum : Combine::max, dtype_of_nccl(asked.type),
                             m.result.data(), m.given[r].data(), std::int64_t(asked.count));
        }
        if (asked.what != What::reduce || asked.root == rank) twin.write(to, m.result.data(), bytes);
        return true;
      });
}
}  // namespace
}  // namespace tandem::test::fake_nccl

using namespace tandem::test;
using namespace tandem::test::fake_nccl;

ncclResult_t ncclGetVersion(int* v) { return *v = version, version ? ncclSuccess : ncclInternalError; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<std::uint64_t> next{1};
  const std::uint64_t mine = next++;
  std::memcpy(id, &mine, sizeof mine);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidUsage;
  if (trouble.at_start && trouble.rank == rank) return ncclResult_t(trouble.error.load());
  std::uint64_t key;
  std::memcpy(&key, &id, sizeof key);
  auto comm = std::make_unique<Comm>();
  {
    std::lock_guard lock(worlds_mutex);
    auto& world = worlds[key];
    if (!world) world = std::make_shared<World>();
    comm->world = world;
  }
  std::lock_guard lock(comm->world->mutex);
  comm->world->ranks = ranks;
  comm->world->joined++;
  comm->rank = rank;
  comm->polls = 2;
  trouble.started++;
  *out = reinterpret_cast<ncclComm_t>(comm.release());
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* state) {
  Comm& comm = of(c);
  if (comm.aborted) return ncclInvalidUsage;
  *state = ncclInProgress;
  {
    std::lock_guard lock(comm.world->mutex);
    if (comm.world->joined < comm.world->ranks) return ncclSuccess;
  }
  if (trouble.rank == comm.rank && trouble.error != ncclSuccess && comm.calls > trouble.after) {
    *state = ncclResult_t(trouble.error.load());
    return ncclSuccess;
  }
  if (comm.polls-- > 0) return ncclSuccess;
  for (auto& [stream, work] : comm.unsettled) stream->add(std::move(work));
  comm.unsettled.clear();
  *state = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
  if (!c || of(c).aborted) return ncclInvalidUsage;
  of(c).aborted = true;  // and kept: a call on it afterwards would be a mistake of ours, not a crash
  trouble.aborted++;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t r) { return r == ncclSystemError ? "unhandled system error" : "an error"; }
const char* ncclGetLastError(ncclComm_t) { return "the fake's last words"; }
ncclResult_t ncclGroupStart() { return group.open = true, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
  Group g = std::exchange(group, {});
  if (!g.comm) return ncclSuccess;
  of(g.comm).unsettled.push_back({g.stream, [parts = std::move(g.parts)]() mutable {
                                    std::erase_if(parts, [](auto& part) { return part(); });
                                    return parts.empty();
                                  }});
  return ncclInProgress;
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,
                           cudaStream_t s) {
  return collective({What::all_reduce, n, t, o, 0}, from, to, c, s);
}
ncclResult_t ncclReduce(const void* from, void* to, std::size_t n, ncclDataType_t t, ncclRedOp_t o, int root,
                        ncclComm_t c, cudaStream_t s) {
  return collective({What::reduce, n, t, o, root}, from, to, c, s);
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t s) {
  return collective({What::broadcast, n, t, ncclSum, root}, from, to, c, s);
}
// A message is sent when it has been received.
ncclResult_t ncclSend(const void* from, std::size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  return enqueue(c, s,
                 [world = of(c).world, me = of(c).rank, peer, from, bytes = n * size_of(dtype_of_nccl(t)),
                  taken = std::make_shared<bool>(false), sent = false](Twin& twin) mutable {
                   std::lock_guard lock(world->mutex);
                   if (!std::exchange(sent, true)) {
                     std::vector<std::byte> data(bytes);
                     twin.read(data.data(), from, bytes);
                     world->messages[{me, peer}].push_back({std::move(data), taken});
                   }
                   return *taken;
                 });
}
ncclResult_t ncclRecv(void* to, std::size_t, ncclDataType_t, int peer, ncclComm_t c, cudaStream_t s) {
  return enqueue(c, s, [world = of(c).world, me = of(c).rank, peer, to](Twin& twin) {
    std::lock_guard lock(world->mutex);
    auto& waiting = world->messages[{peer, me}];
    if (waiting.empty()) return false;
    twin.write(to, waiting.front().data.data(), waiting.front().data.size());
    *waiting.front().taken = true;
    waiting.pop_front();
    return true;
  });
}
