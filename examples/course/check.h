// What the checks of the exercises share: comparisons with hints, ranks, and the row that is printed.
#pragma once
#include <initializer_list>
#include <string>

#include "core/text.h"
#include "examples/course/course.h"

namespace tandem::course {

// A result that a usual mistake gives, and what to tell who made it.
struct Mistake {
  Numbers result;
  std::string hint;
};

// Ends the exercise, with the first number that differs, unless |yours − right| ≤ tolerance · max(1, largest |right|).
void expect_equal(const std::string& what, const Numbers& yours, const Numbers& right, double tolerance,
                  const std::vector<Mistake>& mistakes = {}, const std::string& otherwise = {});
void expect(bool right, const std::string& what, const std::string& hint);

// Runs the body on every rank: for each size on threads with a communicator that is strict (a send is complete when it
// has been received), or, started by tandem-run, on the processes of the job. Ends the exercise with what the first
// rank found wrong. Ranks that wait for each other are named. Returns the number of messages of the last size.
std::int64_t on_ranks(std::initializer_list<int> sizes, const std::function<void(Communicator&)>& body);
std::string named(const Communicator& ranks);   // "3 ranks, rank 1"
std::unique_ptr<Communicator> process_ranks();  // of the job that this process is a rank of; null: of none

// The main function of a check, which returns a remark or nothing. Prints the exercise's row, or with --json a line of
// JSON. Returns the exit status: 0: passed, 1: wrong, 3: not written yet.
int run_exercise(int argc, char** argv, int number, const std::string& title,
                 const std::function<std::string()>& check);

}  // namespace tandem::course
