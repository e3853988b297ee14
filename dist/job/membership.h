// Membership: which process is at which rank, in a job that continues when a rank is lost. The slot of a lost rank is
// empty until a new process rejoins as this rank. The incarnation number distinguishes the processes of a rank. An
// address record contains what other ranks need to connect to a rank. All of them are sent as texts, in MessagePack.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct AddressRecord {
  std::string host = {};      // its name, for messages to the user
  std::string identity = {};  // the same for processes that share memory
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
  bool goes_on = false;                      // the job continues when a rank other than 0 is lost; the same on all
  std::uint64_t nonce = 0, incarnation = 0;  // the job's; this process's
  std::uint64_t generation = 0;              // of the membership, when this rank joined
  std::string terms = {};                    // the settings that all ranks have agreed on
  std::vector<MemberSlot> slots = {};
  std::string text() const;
  static Membership from(const std::string& text);  // throws Error
};

// A rank's answer to rank 0, which has accepted its connection and sent it the addresses of all ranks.
struct JoinRequest {
  std::uint64_t incarnation = 0;  // of a rank that rejoins: the minimum
  std::string terms = {};
  AddressRecord record = {};
  std::string text() const;
  static JoinRequest from(const std::string& text);  // throws Error
};

// A message of the control plane. lost, returned: a change of the membership, which rank 0 decides. All ranks receive
// all changes in the same order; each is a generation of the membership, from 1.
struct ControlMessage {
  enum class Type : std::uint8_t { edge = 1, failure, goodbye, accusation, lost, returned, text, texts } type = {};
  int rank = 0;                  // of the edge; the culprit; the rank that leaves, is lost or has rejoined
  int waits_for = -1;            // of the edge
  std::uint64_t number = 0;      // edge: its steps; returned: the incarnation; text, texts: the gathering
  std::uint64_t generation = 0;  // of the membership after that loss or rejoin
  // The operation in which a rank waits; the reason of a failure or loss; an address record; gathered texts.
  std::string content = {};
  std::string text() const;
  static ControlMessage from(const std::string& text);  // throws Error
};

// Several texts in one, and back. Throws Error if it is damaged.
std::string bundle(const std::vector<std::string>& texts);
std::vector<std::string> unbundle(const std::string& bundled);

// Returns the first line that differs between two texts, from both: "x and y".
std::string first_difference(const std::string& a, const std::string& b);

}  // namespace tandem
