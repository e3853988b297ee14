// Collectives as lists of steps. A step sends one piece and receives another at the same time. Received elements
// replace the local elements or are combined with them. An algorithm is a function from (rank, ranks, elements) to such
// a list: it can be printed and checked without a network. message_communicator.cpp executes it.
//
// Bytes sent per rank, for M bytes on n ranks (Thakur, Rabenseifner and Gropp 2005):
//   doubling   log2 n steps of M            all-reduce: least latency
//   halving    2·log2 n steps, 2(n−1)/n·M   all-reduce: the bound on bytes with few steps
//   ring       2(n−1) steps, 2(n−1)/n·M     the same bound, each rank exchanges messages with two others only
//   direct     2(n−1) steps, 2(n−1)/n·M     each piece is summed by its owner at once: one rounding in bf16
//   tree       log2 n steps of M            broadcast
//   scatter-gather  log2 n + n − 1 steps, 2M     broadcast of large vectors: pieces down the tree, then a ring
#pragma once
#include <cstdint>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

enum class Algorithm : std::uint8_t { doubling, halving, ring, direct, tree, scatter_gather };
const char* name_of(Algorithm algorithm);

struct Piece {
  std::int64_t begin = 0, end = 0;  // elements
  std::int64_t length() const { return end - begin; }
};

struct Step {
  int to = -1;  // −1: nothing is sent
  Piece out = {};
  int from = -1;  // −1: nothing is received
  Piece in = {};
  bool combine = false;
};

struct Steps {
  std::vector<Step> list = {};
  // The first `wide_steps` steps combine into this piece only; in bf16 it is kept in f32 until they are over.
  Piece wide = {};
  std::size_t wide_steps = 0;
};

Steps all_reduce_steps(Algorithm algorithm, int rank, int ranks, std::int64_t count);
Steps reduce_scatter_steps(Algorithm algorithm, int rank, int ranks, const Cuts& cuts);  // ring or direct
Steps all_gather_steps(int rank, int ranks, const Cuts& cuts);
Steps broadcast_steps(Algorithm algorithm, int rank, int ranks, std::int64_t count, int root);
Steps barrier_steps(int rank, int ranks);

// The algorithm up to this number of bytes; the last row has no bound. Measured per transport (make bench-network).
struct Choice {
  std::size_t up_to;
  Algorithm algorithm;
};
struct ChoiceTable {
  std::vector<Choice> all_reduce{
      {16 << 10, Algorithm::doubling}, {256 << 10, Algorithm::halving}, {~0ul, Algorithm::ring}};
  std::vector<Choice> broadcast{{64 << 10, Algorithm::tree}, {~0ul, Algorithm::scatter_gather}};
};
Algorithm choose(const std::vector<Choice>& rows, std::size_t bytes);

// into[i] = combine(into[i], from[i])
void combine_elements(Combine combine, DType dtype, void* into, const void* from, std::int64_t count);
// To bf16 with rounding, and back.
void narrow(bf16* into, const float* from, std::int64_t count);
void widen(float* into, const bf16* from, std::int64_t count);
// bf16 into f32, for Steps::wide.
void combine_wide(Combine combine, float* into, const bf16* from, std::int64_t count);

}  // namespace tandem
