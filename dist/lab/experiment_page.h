// The figures of an experiment's page (experiment_figures.cpp).
#pragma once
#include <string>
#include <vector>

#include "dist/lab/experiment_report.h"

namespace tandem {

// <figure>…</figure>, or nothing where there is nothing to show.
std::string accuracy_figure(const ExperimentReport& report, const std::string& cluster);
std::string time_figures(const ExperimentReport& report, const std::string& cluster);
std::string delay_figure(const ExperimentReport& report, const std::string& cluster);
std::string search_figure(const ExperimentReport& report, const std::string& cluster);
std::string ablation_figure(const ExperimentReport& report, const std::string& cluster);

// Strategies with the same delays and participation at every number of workers.
std::vector<std::vector<std::size_t>> delay_groups(const ExperimentReport& report, const std::string& cluster);

// A figure or table with what it shows (text) and under which conditions (HTML) under it; nothing without one.
std::string captioned(const std::string& html, const std::string& shown, const std::string& conditions);

}  // namespace tandem
