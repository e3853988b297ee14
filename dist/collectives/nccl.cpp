#include "dist/collectives/nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <thread>

#include "core/checksum.h"
#include "core/clock.h"
#include "dist/collectives/nccl_functions.h"
#include "dist/collectives/wire.h"

namespace tandem {
namespace {

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return ncclFloat32;
    case DType::f64: return ncclFloat64;
    case DType::bf16: return ncclBfloat16;
    case DType::f16: return ncclFloat16;
    case DType::i32: return ncclInt32;
    default: return ncclUint8;
  }
}
ncclRedOp_t operation_of(Combine combine) { return combine == Combine::sum ? ncclSum : ncclMax; }

class Nccl;

// A call is queued on the stream beside the device's own, then completed by the library, then reached by the device.
struct Call {
  Header header;
  std::function<ncclResult_t(cudaStream_t)> queue;
  Work announced;                       // check that the other ranks call the same
  std::array<float, 8> signature = {};  // of the header: 16 bits per number, and their negatives
  std::unique_ptr<Event> event;
  enum class At { waits, queued, marked, done } at = At::waits;
  bool over = false;
};

class NcclWork : public Work::Operation {
 public:
  NcclWork(Nccl& all, std::shared_ptr<Call> call) : all_(all), call_(std::move(call)) {}
  bool advance() override;
  void wait() override;

 private:
  Nccl& all_;
  std::shared_ptr<Call> call_;  // continues if this is abandoned: the device has it
};

class Nccl : public Communicator {
 public:
  Nccl(const NcclLibrary& library, std::shared_ptr<Communicator> host, Backend& backend, const NcclOptions& options)
      : Communicator(host->group()),
        library_(library),
        nccl_(*library.functions),
        host_(std::move(host)),
        backend_(backend),
        options_(options),
        host_check_(host_->split(0, rank())),
        stream_(backend.new_queue()) {
    ncclUniqueId id{};
    if (rank() == 0) verify(nccl_.get_unique_id(&id), "ncclGetUniqueId");
    host_->broadcast({&id, sizeof id, DType::u8}, 0).wait();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    stream_->handle();  // selects its device for this thread
    try {
      verify(nccl_.comm_init_rank_config(&comm_, size(), id, rank(), &config), "ncclCommInitRankConfig");
      while (!completed("the start")) rest();
    } catch (const CommunicationError& e) {
      group()->fail(e.rank, e.what());
      abort();
      throw;
    }
  }
  // Calls ncclCommAbort: ncclCommDestroy may wait for absent ranks.
  ~Nccl() override { abort(); }

  Work send(int to, Buffer data, int) override {
    return start(Kind::message, data, [=, this](cudaStream_t s) {
      return nccl_.send(data.data, std::size_t(data.count), type_of(data.dtype), to, comm_, s);
    });
  }
  Work recv(int from, Buffer data, int) override {
    return start(Kind::message, data, [=, this](cudaStream_t s) {
      return nccl_.recv(data.data, std::size_t(data.count), type_of(data.dtype), from, comm_, s);
    });
  }
  Work broadcast(Buffer data, int root) override {
    require(root >= 0 && root < size(), "broadcast: there is no rank ", root, " of ", size());
    return start(
        Kind::broadcast, data, [=, this](cudaStream_t s) { return piece_from(data, root, s); }, {}, root);
  }
  Work all_reduce(Buffer data, Combine combine) override {
    sent_ += 2 * data.bytes() * std::size_t(size() - 1) / std::size_t(size());
    return start(
        Kind::all_reduce, data,
        [=, this](cudaStream_t s) {
          return nccl_.all_reduce(data.data, data.data, std::size_t(data.count), type_of(data.dtype),
                                  operation_of(combine), comm_, s);
        },
        combine);
  }
  // NCCL's own reduce-scatter and all-gather need pieces of equal size.
  Work reduce_scatter(Buffer data, Combine combine, const Cuts& cuts) override {
    return start(Kind::reduce_scatter, data,
                 pieces(data, cuts,
                        [=, this](Buffer piece, int owner, cudaStream_t s) {
                          return nccl_.reduce(piece.data, piece.data, std::size_t(piece.count), type_of(piece.dtype),
                                              operation_of(combine), owner, comm_, s);
                        }),
                 combine);
  }
  Work all_gather(Buffer data, const Cuts& cuts) override {
    return start(Kind::all_gather, data, pieces(data, cuts, [this](Buffer piece, int owner, cudaStream_t s) {
                   return piece_from(piece, owner, s);
                 }));
  }
  Work barrier() override { return host_->barrier(); }
  // Makes a new NCCL communicator: ncclCommSplit has problems with non-blocking communicators.
  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = host_->split(color, key);
    return part ? std::make_unique<Nccl>(library_, std::move(part), backend_, options_) : nullptr;
  }

  void rest() override { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  void wake() override { host_->wake(); }
  Traffic traffic() const override {  // NCCL's bytes: by the bound for all-reduce, 2(n − 1)/n
    const int v = library_.version;
    return {sent_ + host_->traffic().bytes,
            "NCCL " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100)};
  }

 private:
  friend class NcclWork;
  using Queueing = std::function<ncclResult_t(cudaStream_t)>;

  ncclResult_t piece_from(Buffer data, int root, cudaStream_t s) {
    return nccl_.broadcast(data.data, data.data, std::size_t(data.count), type_of(data.dtype), root, comm_, s);
  }
  Queueing pieces(Buffer data, const Cuts& given, std::function<ncclResult_t(Buffer, int owner, cudaStream_t)> call) {
    return [=, this, cuts = given.empty() ? even_cuts(data.count, size()) : given](cudaStream_t s) {
      ncclResult_t worst = nccl_.group_start();
      for (int r = 0; r < size() && worst == ncclSuccess; r++) {
        const std::int64_t begin = cuts[std::size_t(r)], end = cuts[std::size_t(r) + 1];
        const ncclResult_t said = begin == end ? ncclSuccess : call({data.at(begin), end - begin, data.dtype}, r, s);
        if (said != ncclInProgress) worst = said;
      }
      const ncclResult_t end = nccl_.group_end();
      return worst == ncclSuccess ? end : worst;
    };
  }

  Work start(Kind kind, Buffer data, Queueing queueing, Combine combine = Combine::sum, int root = 0) {
    if (failed_) std::rethrow_exception(failed_);
    auto call = std::make_shared<Call>();
    call->header = {.number = kind == Kind::message ? 0 : ++number_,
                    .kind = kind,
                    .dtype = data.dtype,
                    .combine = combine,
                    .root = std::uint8_t(root),
                    .count = data.count};
    call->queue = std::move(queueing);
    call->event = backend_.new_event();
    if (kind != Kind::message) announce(*call);
    if (calls_.empty()) since_ = Clock::now();
    calls_.push_back(call);
    return Work(std::make_unique<NcclWork>(*this, std::move(call)));
  }

  // The maximum of the ranks' signatures, and of their negatives: the two agree exactly if all signatures are equal.
  void announce(Call& call) {
    const Header& h = call.header;
    Checksum sum;
    for (std::uint64_t part : {std::uint64_t(h.count), std::uint64_t(h.kind), std::uint64_t(h.dtype),
                               std::uint64_t(h.combine), std::uint64_t(h.root)})
      sum.add(&part, sizeof part);
    for (std::size_t i = 0; i < 4; i++) {
      call.signature[i] = float(sum.value() >> 16 * i & 0xffff);
      call.signature[i + 4] = -call.signature[i];
    }
    call.announced = host_->all_reduce(buffer(std::span<float>(call.signature)), Combine::max);
  }
  bool agreed(Call& call) {
    if (!call.announced.done()) return false;
    for (std::size_t i = 0; i < 4; i++)
      if (call.signature[i] != -call.signature[i + 4]) disagree(call);
    return true;
  }
  // All ranks detect the difference and call this.
  [[noreturn]] void disagree(const Call& call) {
    constexpr std::size_t length = 128;
    std::vector<std::uint8_t> all(length * std::size_t(size()));
    const std::string mine = describe(call.header).substr(0, length - 1);
    std::copy(mine.begin(), mine.end(), all.begin() + std::ptrdiff_t(length * std::size_t(rank())));
    host_check_->all_gather(buffer(all)).wait();  // on host_ some ranks have announced later calls
    auto call_of = [&](int r) {
      return std::string(reinterpret_cast<const char*>(all.data()) + length * std::size_t(r));
    };
    int other = 1;
    while (other + 1 < size() && call_of(other) == call_of(0)) other++;
    throw CommunicationError(other,
                             where(other) + " calls " + call_of(other) + " where " + where(0) + " calls " + call_of(0));
  }

  // ---- progress -----------------------------------------------------------------------------------------------------
  void carry_on() {
    if (failed_) std::rethrow_exception(failed_);
    try {
      for (std::size_t i = 0; i < calls_.size() && go_on(i);) i++;
      while (!calls_.empty() && calls_.front()->over) {
        calls_.pop_front();
        since_ = Clock::now();
      }
      if (!calls_.empty()) look(describe(calls_.front()->header));
    } catch (const Error& e) {
      failed_ = std::current_exception();
      if (const auto* c = dynamic_cast<const CommunicationError*>(&e); c)
        group()->fail(c->rank, e.what());
      else
        group()->fail(rank(), where(rank()) + ": " + e.what());
      abort();
      throw;
    }
  }
  // Returns true if the next call may be queued.
  bool go_on(std::size_t number) {
    Call& call = *calls_[number];
    if (call.over) return true;
    if (call.at == Call::At::waits) queue(number);
    if (call.at == Call::At::queued) {  // until it has completed, it is not in the stream
      if (!completed(describe(call.header))) return false;
      stream_->mark(*call.event);
      call.at = Call::At::marked;
    }
    if (call.at == Call::At::marked && call.event->done()) call.at = Call::At::done;
    call.over = agreed(call) && call.at == Call::At::done;
    return true;
  }
  // Messages that wait together are queued as one group. Otherwise two ranks that both send first would deadlock.
  void queue(std::size_t first) {
    auto message = [&](std::size_t i) { return i < calls_.size() && calls_[i]->header.kind == Kind::message; };
    const std::string what = describe(calls_[first]->header);
    const bool group = message(first);
    std::size_t i = first;
    if (group) verify(nccl_.group_start(), what);
    do {
      verify(calls_[i]->queue(static_cast<cudaStream_t>(stream_->handle())), what);
      calls_[i]->at = Call::At::queued;
    } while (group && message(++i));
    if (group) verify(nccl_.group_end(), what);
  }
  bool completed(const std::string& what) {
    ncclResult_t state = ncclSuccess;
    verify(nccl_.comm_get_async_error(comm_, &state), what);
    verify(state, what);
    if (state == ncclInProgress) look(what);
    return state == ncclSuccess;
  }
  // Checks for errors, failed ranks and the deadline during a wait.
  void look(const std::string& what) {
    ncclResult_t state = ncclSuccess;
    verify(nccl_.comm_get_async_error(comm_, &state), what);
    verify(state, what);
    if (seconds_since(since_) > options_.patience) group()->check();
    if (seconds_since(since_) > options_.deadline)
      throw CommunicationError(
          -1, what + " over NCCL: " + where(rank()) + " waits for " + std::to_string(int(options_.deadline)) + " s");
  }
  void verify(ncclResult_t result, const std::string& what) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* last = nccl_.get_last_error(comm_);
    throw CommunicationError(rank(), what + " over NCCL: " + where(rank()) + ": " + nccl_.get_error_string(result) +
                                         (last && *last ? std::string(": ") + last : "") +
                                         " (NCCL_DEBUG=INFO tells more)");
  }
  void abort() {
    if (comm_) nccl_.comm_abort(std::exchange(comm_, nullptr));  // once; it is not used afterwards
  }

  const NcclLibrary& library_;
  const NcclFunctions& nccl_;
  std::shared_ptr<Communicator> host_;
  Backend& backend_;
  NcclOptions options_;
  std::unique_ptr<Communicator> host_check_;  // on the host, for disagree()
  std::unique_ptr<Queue> stream_;
  ncclComm_t comm_ = nullptr;
  std::deque<std::shared_ptr<Call>> calls_;
  Clock::time_point since_ = Clock::now();  // when the first of them began, or the one before it ended
  std::exception_ptr failed_;
  std::uint32_t number_ = 0;
  std::uint64_t sent_ = 0;
};

bool NcclWork::advance() {
  if (!call_->over) all_.carry_on();
  return call_->over;
}
void NcclWork::wait() {
  while (!advance()) all_.rest();
}

NcclLibrary open_library() {
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    return {.why_not = why ? why : "libnccl.so.2 cannot be opened"};
  }
  static NcclFunctions functions;
  std::string missing;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) missing += std::string(missing.empty() ? "" : ", ") + name;
  };
  find(functions.get_version, "ncclGetVersion");
  find(functions.get_unique_id, "ncclGetUniqueId");
  find(functions.comm_init_rank_config, "ncclCommInitRankConfig");
  find(functions.comm_get_async_error, "ncclCommGetAsyncError");
  find(functions.comm_abort, "ncclCommAbort");
  find(functions.get_error_string, "ncclGetErrorString");
  find(functions.get_last_error, "ncclGetLastError");
  find(functions.group_start, "ncclGroupStart");
  find(functions.group_end, "ncclGroupEnd");
  find(functions.all_reduce, "ncclAllReduce");
  find(functions.reduce, "ncclReduce");
  find(functions.broadcast, "ncclBroadcast");
  find(functions.send, "ncclSend");
  find(functions.recv, "ncclRecv");
  NcclLibrary found{.functions = &functions};
  if (!missing.empty())
    found.why_not = "libnccl.so.2 has no " + missing + ": NCCL 2.14 or later is needed";
  else if (functions.get_version(&found.version) != ncclSuccess) {
    found.version = 0;
    found.why_not = "libnccl.so.2 does not tell its version";
  }
  return found;
}

}  // namespace

const NcclLibrary& installed_nccl() {
  static const NcclLibrary library = open_library();
  return library;
}

std::unique_ptr<Communicator> over_nccl(const NcclLibrary& nccl, std::shared_ptr<Communicator> host, Backend& backend,
                                        const NcclOptions& options) {
  require(nccl.version > 0, "NCCL cannot be used: ", nccl.why_not);
  return std::make_unique<Nccl>(nccl, std::move(host), backend, options);
}

}  // namespace tandem
