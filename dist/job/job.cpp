#include "dist/job/job.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "dist/collectives/hierarchy.h"
#include "dist/collectives/node.h"
#include "dist/collectives/ucx.h"

namespace tandem {
namespace {

// The settings that must be the same on all ranks, one per line.
std::string agreement(const Variables& variables) {
  std::ostringstream text;
  text << "Tandem's messages: version 5\nUCX " << Ucx::version() << "\n";
  for (const auto& [name, otherwise] : {std::pair{"TANDEM_STRATEGY", "all-reduce"},
                                        {"TANDEM_WIRE", "f32"},
                                        {"TANDEM_SERVERS", "0"},
                                        {"TANDEM_HOSTS_AS", "1"}}) {
    const char* value = variables(name);
    text << name << " " << (value && *value ? value : otherwise) << "\n";
  }
  return text.str();
}

// A rank on the host of rank 0 may have connected through the loopback interface, which other hosts cannot reach.
void reach_from_everywhere(std::vector<AddressRecord>& records) {
  for (AddressRecord& c : records)
    for (const AddressRecord& other : records)
      if (is_loopback(c.address) && other.identity == c.identity) c.address = other.address;
}

std::uint64_t incarnation_in(const Variables& variables) {
  const char* text = variables("TANDEM_INCARNATION");
  if (!text || !*text) return 0;
  const auto v = parsed<std::uint64_t>(text);
  if (!v) refuse("TANDEM_INCARNATION=", text, ": expected the number of this restart of the rank, from 1");
  return *v;
}

// With TANDEM_HOSTS_AS=n the ranks count as those of n hosts. Returns the host of this rank.
std::string pretended_host(const Variables& variables, int rank, int size) {
  const char* text = variables("TANDEM_HOSTS_AS");
  if (!text || !*text) return "";
  const int hosts = parsed<int>(text).value_or(0);
  if (hosts < 1 || hosts > size)
    refuse("--hosts-as ", text, ": expected a number of hosts from 1 to the number of ranks, ", size);
  return "/" + std::to_string(std::int64_t(rank) * hosts / size);
}

}  // namespace

Job::Job(const JobOptions& options)
    : place_(place_in(options.variables)), deadlines_(Deadlines::from(options.variables)), goes_on_(options.goes_on) {
  if (size() == 1) return;
  const std::uint64_t incarnation = goes_on_ ? incarnation_in(options.variables) : 0;
  if (incarnation)
    rejoin(options.variables, incarnation);
  else
    rendezvous(options.variables);
  hosts_.clear();
  std::vector<std::string> found;
  for (int r = 0; r < size(); r++) {
    found.push_back(record(r).identity);
    std::vector<std::string> kinds;  // in the order of their first ranks
    for (const std::string& id : found)
      if (std::find(kinds.begin(), kinds.end(), id) == kinds.end()) kinds.push_back(id);
    hosts_.push_back(int(std::find(kinds.begin(), kinds.end(), found.back()) - kinds.begin()));
  }
}

Job::~Job() = default;

void Job::rendezvous(const Variables& variables) {
  Rendezvous rendezvous(place_, deadlines_, variables, goes_on_);
  AddressRecord mine = AddressRecord::mine();
  mine.identity += pretended_host(variables, rank(), size());
  mine.address = rendezvous.interface_address();
  const int socket = goes_on_ ? -1 : bound_socket(place_.one_host(), 0);  // for the survivor agreement
  if (socket >= 0) mine.port = port_of(socket);
  control_ = std::make_shared<Control>(rendezvous, deadlines_);
  std::vector<AddressRecord> records;
  std::vector<std::string> terms, drawn;  // rank 0's random number identifies the job
  for (const std::string& text : control_->gather(bundle({agreement(variables), mine.text(), random_bytes(8)}))) {
    const auto said = unbundle(text);
    require(said.size() == 3, "a rank says what this one does not understand: are all of the same version?");
    terms.push_back(said[0]), records.push_back(AddressRecord::from(said[1])), drawn.push_back(said[2]);
  }
  for (std::size_t r = 1; r < terms.size(); r++)
    require(terms[r] == terms[0], "rank 0 on ", records[0].host, " and rank ", r, " on ", records[r].host,
            " do not fit together: ", first_difference(terms[0], terms[r]));
  reach_from_everywhere(records);
  Membership members{.goes_on = goes_on_, .terms = terms[0]};
  std::memcpy(&members.nonce, drawn[0].data(), sizeof members.nonce);
  for (const AddressRecord& c : records) members.slots.push_back({.record = c.text()});
  if (!goes_on_)
    return control_->begin(members,
                           std::make_unique<SurvivorAgreement>(rank(), socket, rendezvous.token(), std::move(records)));
  ucx_ = Ucx::open(records[std::size_t(rank())].address, Ucx::Use::survives);
  std::vector<std::string> all;
  for (const AddressRecord& c : records) all.push_back(c.address);
  ucx_->hear_only(all);
  const auto addresses = control_->gather(ucx_->address());
  for (std::size_t r = 0; r < records.size(); r++) {
    records[r].ucx = addresses[r];
    members.slots[r].record = records[r].text();
  }
  control_->begin(members);
}

// Rejoins a running job.
void Job::rejoin(const Variables& variables, std::uint64_t incarnation) {
  Membership members;
  const auto record = [&](const std::string& address) {
    AddressRecord mine = AddressRecord::mine();
    mine.identity += pretended_host(variables, rank(), size());
    mine.address = address;
    ucx_ = Ucx::open(address, Ucx::Use::survives);
    ucx_->hear_only({});  // until the membership lists the ranks
    mine.ucx = ucx_->address();
    return mine.text();
  };
  Rendezvous rendezvous(place_, deadlines_, variables, {incarnation, agreement(variables), record}, members);
  control_ = std::make_shared<Control>(rendezvous, std::move(members), deadlines_);
}

int Job::hosts() const { return *std::max_element(hosts_.begin(), hosts_.end()) + 1; }

std::vector<int> Job::ranks_on(int host) const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); r++)
    if (this->host(r) == host) ranks.push_back(r);
  return ranks;
}

int Job::local_rank() const { return int(std::count(hosts_.begin(), hosts_.begin() + rank(), host(rank()))); }

std::vector<int> Job::lane() const {
  std::vector<int> ranks;
  for (int h = 0; h < hosts(); h++) {
    const auto there = ranks_on(h);
    if (there.size() != ranks_on(0).size())
      refuse("host ", record(there[0]).host, " has ", there.size(), " ranks and host ", record(0).host, " has ",
             ranks_on(0).size(), ": start as many on every host (with --hosts-as, a number that divides the ranks)");
    ranks.push_back(there[std::size_t(local_rank())]);
  }
  return ranks;
}

std::shared_ptr<Ucx> Job::open_ucx() const {
  std::vector<std::string> all;
  for (int r = 0; r < size(); r++) all.push_back(record(r).address);
  auto ucx = Ucx::open(record(rank()).address, hosts() == 1 ? Ucx::Use::memory : Ucx::Use::all);
  ucx->hear_only(all);
  return ucx;
}

std::unique_ptr<Communicator> Job::messages() {
  if (size() == 1) return alone();
  auto ucx = open_ucx();
  const auto addresses = control_->gather(ucx->address());
  return over_messages(ucx->connect(addresses, control_->membership().nonce, control_), deadlines_.wait, {});
}

std::unique_ptr<Communicator> Job::communicator() { return hierarchy(messages(), host(rank())); }
std::unique_ptr<Communicator> Job::on_host() { return hierarchy(messages()->split(host(rank()), rank()), 0); }
std::unique_ptr<Communicator> Job::across_hosts() { return messages()->split(local_rank(), rank()); }

std::unique_ptr<Channel> Job::channel(std::vector<int> group) {
  if (group.empty()) group.resize(std::size_t(size())), std::iota(group.begin(), group.end(), 0);
  require(std::find(group.begin(), group.end(), rank()) != group.end(), "a channel of rank ", rank(),
          " is between ranks of which it is one");
  if (size() == 1) return std::move(in_process_channels(1)[0]);
  require(!goes_on_ || ucx_, "a job that goes on without lost ranks has one channel for each rank");
  const auto ucx = ucx_ ? std::exchange(ucx_, nullptr) : open_ucx();
  const auto found = goes_on_ ? std::vector<std::string>() : control_->gather(ucx->address());
  std::vector<std::string> addresses;
  for (int r : group) addresses.push_back(goes_on_ ? record(r).ucx : found[std::size_t(r)]);
  return ucx->channel(std::move(addresses), control_->membership().nonce, control_, std::move(group));
}

}  // namespace tandem
