// A line chart as inline SVG, for pages of results. It scales with its box, and its colours are CSS variables, so that one chart
// is right on light and dark pages; chart_style() defines them.
#pragma once
#include <string>
#include <vector>

namespace tandem {

constexpr int chart_colours = 9;

struct Line {
  std::string label;         // at the line's end and in the tooltips
  std::vector<double> x = {}, y = {};  // of equal length; a y that is not finite leaves a gap
  int colour = 0;            // 0, 1, … ; chart_colours of them are told apart
  enum class Stroke { solid, dashed, dotted, faint, area } stroke = Stroke::solid;  // area: filled down to the axis, over earlier ones
  bool labelled = true;  // false: it belongs to another line of its colour
  std::vector<double> error = {};  // of each y, drawn as a bar of ± this much; may be shorter, or not finite
};

struct Chart {
  std::string title, x_unit, y_unit;  // "Loss", "epoch", "images/s"
  std::string note = {};              // under the title: "solid: training, dashed: test"
  std::vector<Line> lines = {};
  bool from_zero = false;            // the y axis begins at 0
  std::vector<double> x_holds = {};  // the x axis holds these too: charts beside each other then agree
  bool percent = false;              // y is a share of 1
  bool x_powers = false;             // x is a binary logarithm: the axis shows 2^x
  bool x_whole = false;              // x counts something: no ticks between whole numbers
};

// <svg>…</svg>, with title and description for screen readers. Without a finite point it says "no values".
std::string svg_of(const Chart& chart);

// The CSS that a page with charts needs, without <style> around it.
std::string chart_style();

// Round numbers that cover [low, high] in about `wanted` steps: 0, 0.2, 0.4, …
std::vector<double> round_ticks(double low, double high, int wanted);

std::string html_escaped(const std::string& text);

}  // namespace tandem
