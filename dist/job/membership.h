// Membership: which process is at which rank, in a job that continues when a rank is lost. The slot of a lost rank is
// empty until a new process rejoins as this rank. The incarnation number distinguishes the processes of a rank. An
// address record contains what other ranks need to connect to a rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct AddressRecord {
  std::string host;      // its name, for messages to the user
  std::string identity;  // the same for processes that share memory
  int process = 0;
  std::string address = {};  // of its host, for the other ranks
  int port = 0;              // of its survivor agreement
  std::string ucx = {};      // the address of its channel's UCX worker; empty: it has none

  std::string text() const;
  static AddressRecord from(const std::string& text);     // throws Error
  static AddressRecord mine(const std::string& address);  // of this process, without ports
};

struct MemberSlot {
  bool lost = false, left = false;  // left: it has ended normally
  std::uint64_t incarnation = 0;
  AddressRecord record = {};
};

// The job's state when a rank begins or rejoins.
struct Membership {
  bool goes_on = false;                      // the job continues when a rank other than 0 is lost
  std::uint64_t nonce = 0, incarnation = 0;  // the job's; this process's
  std::uint64_t generation = 0;              // of the membership, when this rank joined
  std::string terms = {};                    // the settings that all ranks have agreed on
  std::vector<MemberSlot> slots = {};
  std::string text() const;
  static Membership from(const std::string& text);  // without goes_on. Throws Error
};

// A rank was lost or has rejoined. Rank 0 decides. All ranks receive all changes in the same order; each change is a
// generation of the membership, from 1.
struct Change {
  int rank = -1;
  std::uint64_t incarnation = 0;  // 0: lost
  std::string text;               // the reason; or the address record of the rejoined rank
};

std::uint64_t number_in(const std::string& text);  // of a record. Throws Error
// Compares two texts by lines: the first line that differs, of both.
std::string first_difference(const std::string& a, const std::string& b);

}  // namespace tandem
