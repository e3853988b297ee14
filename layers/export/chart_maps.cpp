// Heat maps and dot plots (chart.h).
#include <algorithm>

#include "core/text.h"
#include "layers/export/chart.h"

namespace tandem {
namespace {

std::string place(double v) { return printed("%.1f", v); }

// An SVG while it is drawn, in its own units; text is 11 to 14 units high.
class Canvas {
 public:
  void text(const char* kind, double x, double y, const char* anchor, const std::string& what) {
    parts_ += "<text class=\"" + std::string(kind) + "\" x=\"" + place(x) + "\" y=\"" + place(y) + "\" text-anchor=\"" +
              anchor + "\">" + html_escaped(what) + "</text>\n";
  }
  void rectangle(const char* kind, double x, double y, double w, double h, const std::string& more = "") {
    parts_ += "<rect class=\"" + std::string(kind) + "\" x=\"" + place(x) + "\" y=\"" + place(y) + "\" width=\"" +
              place(w) + "\" height=\"" + place(h) + "\"" + more + "/>\n";
  }
  void line(const char* kind, double x1, double y1, double x2, double y2) {
    parts_ += "<line class=\"" + std::string(kind) + "\" x1=\"" + place(x1) + "\" y1=\"" + place(y1) + "\" x2=\"" +
              place(x2) + "\" y2=\"" + place(y2) + "\"/>\n";
  }
  void add(const std::string& svg) { parts_ += svg; }
  std::string svg(double w, double h, const std::string& description, const std::string& style = "") const {
    return "<svg class=\"chart\" viewBox=\"0 0 " + place(w) + " " + place(h) + "\" role=\"img\" aria-label=\"" +
           html_escaped(description) + "\"" + style + ">\n" + parts_ + "</svg>\n";
  }

 private:
  std::string parts_;
};

std::string tooltip(const std::string& text) { return "<title>" + html_escaped(text) + "</title>"; }

}  // namespace

std::string svg_of(const HeatMap& map) {
  constexpr double left = 40, top = 22, w = 40, h = 20;
  const double columns = double(map.x.size()), rows = double(map.y.size()), bottom = top + h * rows;
  const double width = std::max(left + w * columns + 4, 110.0);
  Canvas c;
  c.text("head", 2, 14, "start", map.title);
  for (double i = 0; i < columns; i++)
    for (double j = 0; j < rows; j++) c.rectangle("box", left + w * i, top + h * j, w, h);
  for (const HeatMap::Cell& cell : map.cells) {
    const double x = left + w * double(cell.x), y = bottom - h * double(cell.y + 1);
    const double share = (cell.value - map.low) / std::max(map.high - map.low, 1e-12);
    c.add("<g>" + tooltip(cell.tooltip));
    if (std::isfinite(cell.value))
      c.rectangle("heat", x + 1, y + 1, w - 2, h - 2,
                  printed(" fill-opacity=\"%.2f\"", 0.04 + 0.5 * std::clamp(share, 0.0, 1.0)));
    c.text("value", x + w / 2, y + 14, "middle", std::isfinite(cell.value) ? cell.text : "×");
    c.add("</g>");
  }
  for (const HeatMap::Cell& cell : map.cells)
    if (cell.outlined)
      c.rectangle("chosen", left + w * double(cell.x) + 1, bottom - h * double(cell.y + 1) + 1, w - 2, h - 2);
  for (std::size_t i = 0; i < map.x.size(); i++)
    c.text("small", left + w * (double(i) + 0.5), bottom + 14, "middle", map.x[i]);
  for (std::size_t j = 0; j < map.y.size(); j++) c.text("value", left - 5, bottom - h * double(j) - 6, "end", map.y[j]);
  c.text("note", 2, bottom + 14, "start", map.y_unit);
  c.text("note", left + w * columns / 2, bottom + 29, "middle", map.x_unit);
  return c.svg(width, bottom + 34, map.title + ": " + map.y_unit + " by " + map.x_unit,
               printed(" style=\"max-width:%.0fpx\"", width));
}

std::string svg_of(const DotPlot& plot) {
  constexpr double width = 440, top = 30, row = 22, right = 84;
  std::size_t letters = 4;
  double x0 = 0, x1 = 0;
  auto hold = [&](double x) {
    if (std::isfinite(x)) x0 = std::min(x0, x), x1 = std::max(x1, x);
  };
  for (const DotPlot::Row& r : plot.rows) {
    letters = std::max(letters, std::min<std::size_t>(r.label.size(), 24));
    for (double x : {r.value, r.low, r.high}) hold(x);
  }
  for (double x : plot.x_holds) hold(x);
  if (x0 == x1) x0 = -1, x1 = 1;
  const std::vector<double> ticks = round_ticks(x0, x1, 4);
  x0 = ticks.front();
  x1 = ticks.back();
  const double left = 16 + 7.2 * double(letters), bottom = top + row * double(plot.rows.size());
  auto px = [&](double x) { return left + (x - x0) / (x1 - x0) * (width - right - left); };
  Canvas c;
  c.text("head", 8, 17, "start", plot.title);
  for (double t : ticks) {
    c.line(std::fabs(t) < 1e-12 ? "axis" : "grid", px(t), top, px(t), bottom);
    c.text("tick", px(t), bottom + 15, "middle", short_number(std::fabs(t) < 1e-12 ? 0 : t, 3));
  }
  double y = top + row / 2;
  for (const DotPlot::Row& r : plot.rows) {
    c.text("tick", left - 8, y + 4, "end", r.label);
    if (std::isfinite(r.value)) {
      c.add("<g class=\"c0 solid\">" + tooltip(r.label + ": " + r.note));
      if (std::isfinite(r.low) && std::isfinite(r.high))
        c.add("<path d=\"M" + place(px(r.low)) + " " + place(y) + "H" + place(px(r.high)) + "\"/>");
      c.add("<circle cx=\"" + place(px(r.value)) + "\" cy=\"" + place(y) + "\" r=\"4\"/></g>\n");
    }
    c.text("note", width - right + 10, y + 4, "start", r.note);
    y += row;
  }
  c.text("note", (left + width - right) / 2, bottom + 31, "middle", plot.x_unit);
  return c.svg(width, bottom + 36, plot.title + " by " + plot.x_unit);
}

}  // namespace tandem
