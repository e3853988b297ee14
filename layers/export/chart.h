// Charts as inline SVG, for pages of results: lines, heat maps, values with intervals. They scale with their box, and
// their colours are CSS variables, so that one chart is right on light and dark pages; chart_style() defines them.
#pragma once
#include <cmath>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

constexpr int chart_colours = 9;

struct Line {
  std::string label;                   // at the line's end and in the tooltips
  std::vector<double> x = {}, y = {};  // of equal length; a y that is not finite leaves a gap
  int colour = 0;                      // 0, 1, … ; chart_colours of them are told apart
  enum class Stroke {
    solid,
    dashed,
    dotted,
    faint,
    area,
    strong
  } stroke = Stroke::solid;          // area: filled down to the axis, over earlier ones
  bool labelled = true;              // false: it belongs to another line of its colour
  std::vector<double> error = {};    // of each y, drawn as a bar of ± this much; may be shorter, or not finite
  std::vector<bool> open = {};       // of each point: an open marker; may be shorter
  std::vector<double> crosses = {};  // x that have no value: each a cross above the x axis
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
  std::vector<double> y_holds = {};  // the y axis holds these too
  std::optional<double> y_from =
      {};            // the y axis begins about here: lower points are triangles at the axis, which lines run into
  bool dots = true;  // a marker at each point
};

// A grid of which some cells have a value.
struct HeatMap {
  std::string title, x_unit, y_unit;
  std::vector<std::string> x = {}, y = {};  // names of the columns, from the left, and of the rows, from below
  struct Cell {
    std::size_t x = 0, y = 0;
    double value = NAN;                   // decides the colour; NaN: a cross
    std::string text = {}, tooltip = {};  // text: of four letters or so
    bool outlined = false;
  };
  std::vector<Cell> cells = {};
  double low = 0, high = 1;  // values of the faintest and the strongest colour
};

// Values with intervals, a row each, beside a line at 0.
struct DotPlot {
  std::string title, x_unit;
  struct Row {
    std::string label;
    double value = NAN, low = NAN, high = NAN;  // not finite: it is not drawn
    std::string note = {};                      // at the right
  };
  std::vector<Row> rows = {};
  std::vector<double> x_holds = {};
};

// <svg>…</svg>, with title and description for screen readers. Without a finite point it says "no values".
std::string svg_of(const Chart& chart);
std::string svg_of(const HeatMap& map);  // as wide as it needs, at most as wide as its box
std::string svg_of(const DotPlot& plot);

// The CSS that a page with charts needs, without <style> around it.
std::string chart_style();

// Round numbers that cover [low, high] in about `wanted` steps: 0, 0.2, 0.4, …
std::vector<double> round_ticks(double low, double high, int wanted);

std::string html_escaped(const std::string& text);

}  // namespace tandem
