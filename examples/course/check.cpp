#include "examples/course/check.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>

#include "core/files/json.h"
#include "dist/collectives/in_process.h"
#include "dist/job/environment.h"

namespace tandem::course {
namespace {

struct Wrong : Error {
  Wrong(const std::string& what, std::string hint) : Error(what), hint(std::move(hint)) {}
  std::string hint;
};

// The first number that differs; −1: none.
std::ptrdiff_t first_difference(const Numbers& a, const Numbers& b, double tolerance) {
  auto near = [&](double x, double y) { return std::fabs(x - y) <= tolerance; };  // false for NaN
  const auto [at, other] = std::mismatch(a.begin(), a.end(), b.begin(), b.end(), near);
  return at == a.end() && other == b.end() ? -1 : at - a.begin();
}

// The error of the body on one rank; null: none.
struct Outcome {
  std::exception_ptr error;
  bool by_others = false;  // another rank failed or does not answer
};
Outcome outcome_of(Communicator& ranks, const std::function<void(Communicator&)>& body) {
  try {
    body(ranks);
    ranks.barrier().wait();
  } catch (const CommunicationError&) {
    return {std::current_exception(), true};
  } catch (...) {
    return {std::current_exception()};
  }
  return {};
}

// Throws Wrong if every rank waits for another one; its text names them.
void check_for_deadlock(const std::vector<int>& waits_for) {
  if (waits_for.empty() || std::count(waits_for.begin(), waits_for.end(), -1) > 0) return;
  std::string text = std::to_string(waits_for.size()) + " ranks, deadlock:";
  for (std::size_t r = 0; r < waits_for.size(); r++)
    text += (r ? ", rank " : " rank ") + std::to_string(r) + " waits for rank " + std::to_string(waits_for[r]);
  throw Wrong(text, "A send is complete when its receiver has it. Start the send, receive, then wait for the send.");
}

std::int64_t on_threads(int n, const std::function<void(Communicator&)>& body) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(n));
  tandem::Outcome job;
  std::vector<std::thread> threads;
  auto ranks = in_process(n, {.deadline = 2, .outcome = &job});
  for (int r = 0; r < n; r++)
    threads.emplace_back([&, r, communicator = std::move(ranks[std::size_t(r)])] {
      outcomes[std::size_t(r)] = outcome_of(*communicator, body);
    });
  for (std::thread& t : threads) t.join();  // the communicators are destroyed with the threads' functions
  for (bool by_others : {false, true}) {
    if (by_others) check_for_deadlock(job.waits_for);
    for (const Outcome& o : outcomes)
      if (o.error && o.by_others == by_others) std::rethrow_exception(o.error);
  }
  return job.messages;
}

}  // namespace

void expect_equal(const std::string& what, const Numbers& yours, const Numbers& right, double tolerance,
                  const std::vector<Mistake>& mistakes, const std::string& otherwise) {
  expect(yours.size() == right.size(),
         what + ": " + std::to_string(yours.size()) + " numbers, not " + std::to_string(right.size()), otherwise);
  double largest = 1;
  for (double v : right) largest = std::max(largest, std::fabs(v));
  tolerance *= largest;
  const std::ptrdiff_t i = first_difference(yours, right, tolerance);
  if (i < 0) return;
  std::string hint = otherwise;
  for (const Mistake& m : mistakes)
    if (first_difference(yours, m.result, tolerance) < 0) hint = m.hint;
  throw Wrong(what + ": number " + std::to_string(i) + " is " + digits(yours[std::size_t(i)], 6) + " and should be " +
                  digits(right[std::size_t(i)], 6),
              hint);
}

void expect(bool right, const std::string& what, const std::string& hint) {
  if (!right) throw Wrong(what, hint);
}

std::string named(const Communicator& ranks) {
  return std::to_string(ranks.size()) + (ranks.size() == 1 ? " rank, rank " : " ranks, rank ") +
         std::to_string(ranks.rank());
}

std::int64_t on_ranks(std::initializer_list<int> sizes, const std::function<void(Communicator&)>& body) {
  std::int64_t messages = 0;
  if (const auto processes = process_ranks()) {
    if (const Outcome o = outcome_of(*processes, body); o.error) std::rethrow_exception(o.error);
    return messages;
  }
  for (int n : sizes) messages = on_threads(n, body);
  return messages;
}

int run_exercise(int argc, char** argv, int number, const std::string& title,
                 const std::function<std::string()>& check) {
  std::string result = "wrong", text, hint;
  int status = 1;
  try {
    text = check();
    result = "passed";
    status = 0;
  } catch (const NotWritten& e) {
    result = std::string("not written yet: ") + e.function + "()";
    status = 3;
  } catch (const std::exception& e) {
    text = e.what();
    if (const auto* wrong = dynamic_cast<const Wrong*>(&e)) hint = wrong->hint;
    if (dynamic_cast<const std::length_error*>(&e)) hint = "A length is negative: in C++ (-1) % 3 is -1.";
  }
  if (place_in().rank > 0 && status != 1) return status;  // only rank 0 prints
  if (argc > 1 && std::strcmp(argv[1], "--json") == 0) {
    std::printf("{\"exercise\": %d, \"title\": %s, \"result\": %s, \"text\": %s, \"hint\": %s}\n", number,
                json_quoted(title).c_str(), json_quoted(result).c_str(), json_quoted(text).c_str(),
                json_quoted(hint).c_str());
    return status;
  }
  std::printf("%d  %-32s %s\n", number, title.c_str(), result.c_str());
  for (const std::string& line : {text, hint})
    if (!line.empty()) std::printf("     %s\n", line.c_str());
  return status;
}

}  // namespace tandem::course
