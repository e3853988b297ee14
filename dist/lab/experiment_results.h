// Lines of the file of an experiment's results (experiment_results.cpp reads them).
#pragma once
#include <string>

#include "dist/lab/experiment.h"

namespace tandem {

std::string header_line(const Plan& plan);  // of runs that are made by this build, under the plan's conditions
std::string line_of(const Trial& t, const Outcome& o);  // exact: what is read is what was written
std::string key_of(const Trial& t);                     // the members of that line that say which run it is

}  // namespace tandem
