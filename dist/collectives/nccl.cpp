#include "dist/collectives/nccl.h"

#include <nccl.h>

#include <utility>

#include "core/clock.h"
#include "dist/collectives/operations.h"

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

// A call is given to the library, which queues it on a stream other than the device's own; then the device executes it.
// It continues if its Work is abandoned, because the device cannot drop it.
struct NcclCall : OperationQueue::Operation {
  using Operation::Operation;
  std::vector<Header> headers;  // of this call, by rank: the other ranks must call the same
  Work announced;               // their exchange
  std::unique_ptr<Event> event;
  enum class At { waits, queued, marked, done } at = At::waits;
};

class Nccl : public QueuedCommunicator {
 public:
  Nccl(std::shared_ptr<Communicator> host, Backend& backend, const NcclOptions& options)
      : QueuedCommunicator(host->group()),
        host_(std::move(host)),
        backend_(backend),
        options_(options),
        stream_(backend.new_queue()) {
    ncclUniqueId id{};
    if (rank() == 0) verify(ncclGetUniqueId(&id), "ncclGetUniqueId");
    host_->broadcast({&id, sizeof id, DType::u8}, 0).wait();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    stream_->handle();  // selects its device for this thread
    guarded([&] {
      verify(ncclCommInitRankConfig(&comm_, size(), id, rank(), &config), "ncclCommInitRankConfig");
      while (!completed("the start")) rest();
    });
  }
  // Calls ncclCommAbort: ncclCommDestroy may wait for absent ranks.
  ~Nccl() override {
    abort();
    operations_.clear();  // before the host's communicator
  }

  Work begin(const Call& call) override {
    if (call.kind == Kind::barrier) return host_->begin(call);
    if (call.kind == Kind::all_reduce) sent_ += 2 * call.data.bytes() * std::size_t(size() - 1) / std::size_t(size());
    auto operation = std::make_shared<NcclCall>(*this, call, header_of(call, call.is_message() ? 0 : ++number_));
    operation->event = backend_.new_event();
    guarded([&] {
      if (!call.is_message()) announce(*operation);
    });
    if (operations_.empty()) since_ = Clock::now();
    return add(std::move(operation));
  }
  // Makes a new NCCL communicator: ncclCommSplit has problems with non-blocking communicators.
  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = host_->split(color, key);
    return part ? std::make_unique<Nccl>(std::move(part), backend_, options_) : nullptr;
  }

  void wake() override { host_->wake(); }
  Traffic traffic() const override {  // NCCL's bytes: by the bound for all-reduce, 2(n − 1)/n
    const int v = nccl_version();
    return {sent_ + host_->traffic().bytes,
            "NCCL " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100)};
  }

 private:
  ncclResult_t start(const Call& call, cudaStream_t s) {
    const Buffer& data = call.data;
    const auto count = std::size_t(data.count);
    const ncclDataType_t type = type_of(data.dtype);
    switch (call.kind) {
      case Kind::send: return ncclSend(data.data, count, type, call.peer, comm_, s);
      case Kind::recv: return ncclRecv(data.data, count, type, call.peer, comm_, s);
      case Kind::broadcast: return ncclBroadcast(data.data, data.data, count, type, call.peer, comm_, s);
      case Kind::all_reduce:
        return ncclAllReduce(data.data, data.data, count, type, operation_of(call.combine), comm_, s);
      default: return start_pieces(call, s);
    }
  }
  // NCCL's own reduce-scatter and all-gather need pieces of equal size.
  ncclResult_t start_pieces(const Call& call, cudaStream_t s) {
    const ncclDataType_t type = type_of(call.data.dtype);
    ncclResult_t worst = ncclGroupStart();
    for (int r = 0; r < size() && worst == ncclSuccess; r++) {
      const std::int64_t begin = call.cuts[std::size_t(r)], end = call.cuts[std::size_t(r) + 1];
      void* piece = call.data.at(begin);
      const auto count = std::size_t(end - begin);
      if (count == 0) continue;
      const ncclResult_t result = call.kind == Kind::all_gather
                                      ? ncclBroadcast(piece, piece, count, type, r, comm_, s)
                                      : ncclReduce(piece, piece, count, type, operation_of(call.combine), r, comm_, s);
      if (result != ncclInProgress) worst = result;
    }
    const ncclResult_t end = ncclGroupEnd();
    return worst == ncclSuccess ? end : worst;
  }

  void announce(NcclCall& call) {
    call.headers.resize(std::size_t(size()));
    call.headers[std::size_t(rank())] = call.header;
    call.announced =
        host_->all_gather({call.headers.data(), std::int64_t(call.headers.size() * sizeof(Header)), DType::u8});
  }
  // Whether the other ranks call the same. All ranks detect a difference.
  bool agreed(NcclCall& call) {
    if (!call.announced.done()) return false;
    for (std::size_t r = 1; r < call.headers.size(); r++)
      if (call.headers[r].kind != call.headers[0].kind || !call.headers[r].agrees(call.headers[0]))
        throw CommunicationError(int(r), mismatch(where(int(r)), call.headers[r], where(0), call.headers[0]));
    return true;
  }

  // ---- progress -----------------------------------------------------------------------------------------------------
  NcclCall& call_at(std::size_t i) { return static_cast<NcclCall&>(*operations_[i]); }
  bool carry_on() override {
    try {
      const std::size_t before = operations_.size();
      for (std::size_t i = 0; i < operations_.size() && go_on(i);) i++;
      while (!operations_.empty() && operations_.front()->over) {
        operations_.pop_front();
        since_ = Clock::now();
      }
      return operations_.size() < before;
    } catch (const CommunicationError&) {
      throw;
    } catch (const Error& e) {  // an error of the device
      throw CommunicationError(rank(), where(rank()) + ": " + e.what());
    }
  }
  void check(Operation&) override { look(describe(operations_.front()->header)); }
  void report_failure(int culprit, const std::string& text) override {
    QueuedCommunicator::report_failure(culprit, text);
    abort();
  }
  void abandon(Operation&) override {}
  // Returns true if the next call may be queued.
  bool go_on(std::size_t number) {
    NcclCall& call = call_at(number);
    if (call.over) return true;
    if (call.at == NcclCall::At::waits) queue(number);
    if (call.at == NcclCall::At::queued) {  // until it has completed, it is not in the stream
      if (!completed(describe(call.header))) return false;
      stream_->mark(*call.event);
      call.at = NcclCall::At::marked;
    }
    if (call.at == NcclCall::At::marked && call.event->done()) call.at = NcclCall::At::done;
    call.over = agreed(call) && call.at == NcclCall::At::done;
    return true;
  }
  // Messages that wait together are queued as one group. Otherwise two ranks that both send first would deadlock.
  void queue(std::size_t first) {
    auto message = [&](std::size_t i) { return i < operations_.size() && operations_[i]->call.is_message(); };
    const std::string what = describe(operations_[first]->header);
    const bool group = message(first);
    std::size_t i = first;
    if (group) verify(ncclGroupStart(), what);
    do {
      verify(start(operations_[i]->call, static_cast<cudaStream_t>(stream_->handle())), what);
      call_at(i).at = NcclCall::At::queued;
    } while (group && message(++i));
    if (group) verify(ncclGroupEnd(), what);
  }
  bool completed(const std::string& what) {
    const ncclResult_t now = state(what);
    if (now == ncclInProgress) look(what);
    return now == ncclSuccess;
  }
  ncclResult_t state(const std::string& what) {
    ncclResult_t found = ncclSuccess;
    verify(ncclCommGetAsyncError(comm_, &found), what);
    verify(found, what);
    return found;
  }
  // Checks for errors, failed ranks and the deadline during a wait.
  void look(const std::string& what) {
    state(what);
    if (seconds_since(since_) > options_.patience) group()->check();
    if (seconds_since(since_) > options_.deadline)
      throw CommunicationError(
          -1, what + " over NCCL: " + where(rank()) + " waits for " + std::to_string(int(options_.deadline)) + " s");
  }
  void verify(ncclResult_t result, const std::string& what) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* last = ncclGetLastError(comm_);
    throw CommunicationError(rank(), what + " over NCCL: " + where(rank()) + ": " + ncclGetErrorString(result) +
                                         (last && *last ? std::string(": ") + last : "") +
                                         " (NCCL_DEBUG=INFO tells more)");
  }
  void abort() {
    if (comm_) ncclCommAbort(std::exchange(comm_, nullptr));  // once; it is not used afterwards
  }

  std::shared_ptr<Communicator> host_;
  Backend& backend_;
  NcclOptions options_;
  std::unique_ptr<Queue> stream_;
  ncclComm_t comm_ = nullptr;
  Clock::time_point since_ = Clock::now();  // when the first call in the queue began, or the call before it ended
  std::uint32_t number_ = 0;
  std::uint64_t sent_ = 0;
};

}  // namespace

int nccl_version() {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}

std::unique_ptr<Communicator> over_nccl(std::shared_ptr<Communicator> host, Backend& backend,
                                        const NcclOptions& options) {
  return std::make_unique<Nccl>(std::move(host), backend, options);
}

}  // namespace tandem
