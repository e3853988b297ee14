// The page of an experiment: one HTML file that needs nothing else.
#include "dist/lab/experiment.h"
#include "layers/export/chart.h"

namespace tandem {

std::string experiment_page(const Plan& plan, const Results& results) {
  const std::string title = html_escaped(plan.title);
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"generator\" content=\"Tandem\">\n<title>" + title +
         "</title>\n</head>\n<body>\n<h1>" + title + "</h1>\n<pre>" + html_escaped(experiment_table(plan, results)) + "</pre>\n</body>\n</html>\n";
}

}  // namespace tandem
