// Shared by the checks of the exercises: comparisons with hints, ranks, and the printed row.
#pragma once
#include <initializer_list>
#include <string>

#include "core/text.h"
#include "examples/course/course.h"

namespace tandem::course {

// The result of a common mistake, and the hint to print for it.
struct Mistake {
  Numbers result;
  std::string hint;
};

// Ends the exercise, with the first number that differs, unless |yours − right| ≤ tolerance · max(1, largest |right|).
void expect_equal(const std::string& what, const Numbers& yours, const Numbers& right, double tolerance,
                  const std::vector<Mistake>& mistakes = {}, const std::string& otherwise = {});
void expect(bool right, const std::string& what, const std::string& hint);

// Runs the body on every rank. The ranks are threads, for each size in turn, with a strict communicator (a send is
// complete when it has been received); under tandem-run they are the processes of the job. Ends the exercise with the
// error of the first rank that has one; the error of a deadlock names the rank for which each rank waits. Returns the
// number of messages of the last size; 0 on processes.
std::int64_t on_ranks(std::initializer_list<int> sizes, const std::function<void(Communicator&)>& body);
std::string named(const Communicator& ranks);   // "3 ranks, rank 1"
std::unique_ptr<Communicator> process_ranks();  // of this process's job; null: the job has one process

// The main function of a check. `check` returns a remark, or an empty text. Prints the exercise's row, or with --json a
// line of JSON. Returns the exit status: 0: passed, 1: wrong, 3: not written yet.
int run_exercise(int argc, char** argv, int number, const std::string& title,
                 const std::function<std::string()>& check);

}  // namespace tandem::course
