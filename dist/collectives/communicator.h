// Communicator: collectives and messages between the ranks of a job. All ranks call the collectives in the same order.
// Each call returns a Work at once; polling the Work makes progress. Implementations: in-process (ranks are threads),
// node (shared memory), UCX between hosts, NCCL on devices. With one rank every call is complete at once.
//
// Every collective has a number, and its messages contain (number, operation, type, count). If ranks call different
// collectives, the error names both calls. Every wait has a deadline, except for a rank that is alive and reports that
// it works. A failed communicator stays failed: the failure is sent to the other ranks, and every later call throws the
// same CommunicationError.
//
// Threads: a communicator and its Works may be used by one thread at a time. wake() may be called from any thread.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tandem {

// Another rank failed. The text names rank, host and operation.
struct CommunicationError : Error {
  CommunicationError(int culprit, const std::string& text) : Error(text), rank(culprit) {}
  int rank;  // the rank at fault; −1: unknown
};

// Elements in memory that the host can read (device memory if the communicator is for devices:
// dist/collectives/on_devices.h). The caller keeps them alive until the Work is done.
struct Buffer {
  void* data = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::f32;
  std::size_t bytes() const { return std::size_t(count) * size_of(dtype); }
  std::byte* at(std::int64_t element) const {
    return static_cast<std::byte*>(data) + std::size_t(element) * size_of(dtype);
  }
};
template <class T>
Buffer buffer(std::span<T> elements) {
  return {const_cast<std::remove_const_t<T>*>(elements.data()), std::int64_t(elements.size()),
          dtype_of<std::remove_const_t<T>>};
}
template <class T>
Buffer buffer(std::vector<T>& elements) {
  return buffer(std::span<T>(elements));
}
inline Buffer buffer(Tensor& t) { return {t.raw_write(), t.numel(), t.dtype()}; }

// Sums of f32 and f64 are computed in their type. Sums of bf16 are computed in f32 and rounded once by the rank that
// owns a piece (small ones: once per exchange). The maximum is a NaN if any of the numbers is a NaN.
enum class Combine : std::uint8_t { sum, max };

// Where the pieces of `count` elements begin: rank r has [cuts[r], cuts[r + 1]). Even ones: ⌊count·r/n⌋.
using Cuts = std::vector<std::int64_t>;
Cuts even_cuts(std::int64_t count, int pieces);

// A call of a communicator. Its arguments were checked, and its cuts are set.
struct Call {
  enum class Kind : std::uint8_t { send, recv, broadcast, all_reduce, reduce_scatter, all_gather, barrier };
  Kind kind = Kind::barrier;
  Buffer data = {};
  Combine combine = Combine::sum;
  int peer = 0;    // the root of a broadcast; the other rank of a message
  int tag = 0;     // of a message
  Cuts cuts = {};  // of reduce_scatter and all_gather

  bool is_message() const { return kind <= Kind::recv; }
};

// An operation in progress. Destroying it abandons the operation. Do so only after a failure: the other ranks wait for
// it.
class Work {
 public:
  class Operation {
   public:
    virtual ~Operation() = default;
    // Makes progress without waiting. Returns true when the operation is complete. Throws CommunicationError.
    virtual bool advance() = 0;
    // Makes progress until the operation is complete.
    virtual void wait() = 0;
    // Called if the Work is destroyed before advance() or wait() has reported the end.
    virtual void abandon() noexcept {}
  };
  Work() = default;  // nothing to do
  explicit Work(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  Work(Work&&) = default;
  Work& operator=(Work other) noexcept {
    operation_.swap(other.operation_);
    return *this;
  }
  ~Work() {
    if (operation_) operation_->abandon();
  }
  bool done() {
    if (operation_ && operation_->advance()) operation_.reset();
    return !operation_;
  }
  void wait() {
    if (operation_) operation_->wait();
    operation_.reset();
  }

 private:
  std::shared_ptr<Operation> operation_;
};

// The ranks of a communicator, and their liveness. Communicators that use another one share its group.
class Group {
 public:
  Group(int rank, int size) : rank(rank), size(size) {}
  virtual ~Group() = default;
  int rank, size;
  virtual std::string where(int rank) const = 0;  // "rank 2 on node7"
  // Call this periodically while waiting for something other than a Work. Throws if a rank has failed or left.
  virtual void check() = 0;
  // Fails the communicator and sends the reason to the other ranks: their calls throw this text.
  virtual void fail(int culprit, const std::string& text) = 0;
  // After a failure: the ranks of the job that still reach each other, including this one; may take seconds. Before:
  // none.
  virtual std::vector<int> survivors() = 0;
};

class Communicator {
 public:
  explicit Communicator(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  virtual ~Communicator() = default;
  const std::shared_ptr<Group>& group() const { return group_; }
  int rank() const { return group_->rank; }
  int size() const { return group_->size; }
  std::string where(int rank) const { return group_->where(rank); }

  // Between two ranks. Messages with the same tag arrive in the order of sending. Their type and count must be those
  // that the receiver expects.
  Work send(int to, Buffer data, int tag = 0) { return message(Call::Kind::send, to, data, tag); }
  Work recv(int from, Buffer data, int tag = 0) { return message(Call::Kind::recv, from, data, tag); }

  // All ranks. The results are the same on every rank, bit for bit.
  Work broadcast(Buffer data, int root);
  Work all_reduce(Buffer data, Combine combine = Combine::sum);
  // In place. Every rank has all of `data`; afterwards this rank's piece is reduced and the other pieces are undefined.
  Work reduce_scatter(Buffer data, Combine combine = Combine::sum, Cuts cuts = {});
  // In place. This rank's piece of `data` is set; afterwards all pieces are.
  Work all_gather(Buffer data, Cuts cuts = {});
  Work barrier() { return begin({}); }
  // Begins a call with checked arguments: one of these seven, or a part of one from another communicator.
  virtual Work begin(const Call& call) = 0;

  // One communicator for each colour, its ranks ordered by (key, current rank); null if the colour is negative. Every
  // rank calls it, and it waits for all.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  // Zeroed memory in which this communicator's collectives need no copies; null: any memory can be used. Every rank
  // calls it with the same number of bytes, and it waits for all.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) {
    (void)bytes;
    return nullptr;
  }

  virtual void rest() = 0;  // sleeps until an event occurs, until wake(), or for a few milliseconds
  virtual void wake() = 0;

  struct Traffic {
    std::uint64_t bytes;    // sent so far
    std::string transport;  // the transport of the messages, as text
  };
  virtual Traffic traffic() const = 0;

 private:
  Work message(Call::Kind kind, int peer, Buffer data, int tag);
  Cuts checked(Cuts cuts, Buffer data) const;
  std::shared_ptr<Group> group_;
};

// A job of one rank.
std::unique_ptr<Communicator> alone();

}  // namespace tandem
