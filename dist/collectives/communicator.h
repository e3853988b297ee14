// Communicator: collectives and messages between the ranks of a job. All ranks call the collectives in the same order.
// Each call returns a Work at once; asking the Work makes progress. Implementations: in-process (ranks are threads),
// node (shared memory), UCX between hosts, NCCL on devices. With one rank every call is complete at once.
//
// Every collective has a number, and its messages carry (number, operation, type, count). When ranks call different
// collectives, both calls are named in the error. Every wait has a deadline, except for a rank that is alive and
// reports that it works. A failed communicator stays failed: the other ranks are told, and every later call throws the
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

// Elements in memory that the host can read (of a device, where the communicator is one of devices:
// dist/collectives/on_devices.h); the caller keeps them alive until the Work is done.
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

// Sums of f32 and f64 are made in their type. Sums of bf16 are made in f32 and rounded once by the rank that owns a
// piece (small ones: once per exchange). The largest of numbers among which there is a NaN is a NaN.
enum class Combine : std::uint8_t { sum, max };

// Where the pieces of `count` elements begin: rank r has [cuts[r], cuts[r + 1]). Even ones: ⌊count·r/n⌋.
using Cuts = std::vector<std::int64_t>;
Cuts even_cuts(std::int64_t count, int pieces);

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
  };
  Work() = default;  // nothing to do
  explicit Work(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}
  bool done() {
    if (operation_ && operation_->advance()) operation_.reset();
    return !operation_;
  }
  void wait() {
    if (operation_) operation_->wait();
    operation_.reset();
  }

 private:
  std::unique_ptr<Operation> operation_;
};

// The ranks of a communicator, and whether they still work. Communicators that rest on another one share its group.
class Group {
 public:
  Group(int rank, int size) : rank(rank), size(size) {}
  virtual ~Group() = default;
  int rank, size;
  virtual std::string where(int rank) const = 0;  // "rank 2 on node7"
  // For a wait for something else than a Work, while the other ranks need this one. Throws when one of them has failed
  // or left.
  virtual void check() = 0;
  // Gives up, and tells the other ranks why: their calls throw this text.
  virtual void fail(int culprit, const std::string& text) = 0;
  // After a failure: the ranks of the job that still reach each other, this one among them; may take seconds. Before:
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

  // Between two ranks: messages with the same tag arrive in the order in which they were sent, and must be of the type
  // and count that the receiver expects.
  virtual Work send(int to, Buffer data, int tag = 0) = 0;
  virtual Work recv(int from, Buffer data, int tag = 0) = 0;

  // All ranks. The results are the same on every rank, bit for bit.
  virtual Work broadcast(Buffer data, int root) = 0;
  virtual Work all_reduce(Buffer data, Combine combine = Combine::sum) = 0;
  // In place. Every rank has all of `data`; afterwards this rank's piece is reduced and the other pieces are undefined.
  virtual Work reduce_scatter(Buffer data, Combine combine = Combine::sum, const Cuts& cuts = {}) = 0;
  // In place. This rank's piece of `data` is set; afterwards all pieces are.
  virtual Work all_gather(Buffer data, const Cuts& cuts = {}) = 0;
  virtual Work barrier() = 0;

  // One communicator for each colour, its ranks ordered by (key, rank here); null where the colour is negative. Every
  // rank calls it, and it waits for all.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  // Memory in which this communicator's collectives need no copies, zeroed; null: any memory will do. Every rank calls
  // it with the same number of bytes, and it waits for all.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) {
    (void)bytes;
    return nullptr;
  }

  virtual void rest() = 0;  // sleeps until something has happened, until wake(), or a few milliseconds
  virtual void wake() = 0;

  struct Traffic {
    std::uint64_t bytes;    // sent so far
    std::string transport;  // what carries the messages, in words
  };
  virtual Traffic traffic() const = 0;

 private:
  std::shared_ptr<Group> group_;
};

// A job of one rank.
std::unique_ptr<Communicator> alone();

}  // namespace tandem
