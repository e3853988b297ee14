// Seats: who is at which rank, in a job that goes on when a rank is lost. A seat is empty until the rank comes back, as a
// process that knows nothing of the one before: its incarnation tells the two apart. A card is what the others must know to
// reach it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct Card {
  std::string host;      // its name, for people
  std::string identity;  // the same for processes that share memory
  int process = 0;
  std::string address;  // where it listens for the other ranks
  int port = 0;
  bool rdma = false;
  std::string ucx;  // its worker's address; empty: it has none

  std::string text() const;
  static Card from(const std::string& text);  // throws Error
  // This process's; it listens nowhere yet.
  static Card mine();
};

struct Seat {
  bool lost = false, left = false;  // left: it has ended well
  std::uint64_t incarnation = 0;
  std::string card;
};

// Somebody was lost, or has come back. Rank 0 decides, and all ranks hear of all changes in one order: each is a generation of the
// membership, from 1.
struct Change {
  int rank = -1;
  std::uint64_t incarnation = 0;  // 0: lost
  std::string text;               // why; or the card of who has come
};

// What a rank that comes back is told.
struct Welcome {
  std::uint64_t nonce = 0, incarnation = 0;
  std::uint64_t generation = 0;  // of the membership, with this return
  std::string terms;             // what all ranks have agreed on
  std::vector<Seat> seats;
  std::string text() const;
  static Welcome from(const std::string& text);
};

// Two texts of lines: the first line that differs, of both.
std::string first_difference(const std::string& a, const std::string& b);

}  // namespace tandem
