#include "layers/export/chart.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/text.h"

namespace tandem {
namespace {

// In the SVG's own units; text is 12 units high, so a chart should be shown about 300 to 650 pixels wide.
constexpr double width = 440, height = 258, left = 52, top = 46, bottom = 36;

std::string place(double v) { return printed("%.1f", v); }

// Labels at the right end, moved apart so that they do not cover each other, as near to their lines as that allows.
void separate(std::vector<double>& y, double gap, double low, double high) {
  std::vector<std::size_t> order(y.size());
  for (std::size_t i = 0; i < order.size(); i++) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return y[a] < y[b]; });
  for (int round = 0; round < 50; round++)
    for (std::size_t i = 0; i + 1 < order.size(); i++) {
      double& a = y[order[i]];
      double& b = y[order[i + 1]];
      if (double lack = gap - (b - a); lack > 0) a -= lack / 2, b += lack / 2;
    }
  double over = y.empty() ? 0 : std::max(0.0, y[order.back()] - high);
  for (double& v : y) v -= over;
  double under = y.empty() ? 0 : std::max(0.0, low - y[order.front()]);
  for (double& v : y) v += under;
}

}  // namespace

std::string html_escaped(const std::string& text) {
  std::string out;
  for (char c : text) switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
    }
  return out;
}

std::vector<double> round_ticks(double low, double high, int wanted) {
  if (!(high > low)) high = low + (low == 0 ? 1 : std::fabs(low) / 10);
  double rough = (high - low) / std::max(1, wanted), power = std::pow(10, std::floor(std::log10(rough)));
  double step = power * (rough / power < 1.5 ? 1 : rough / power < 3.5 ? 2 : rough / power < 7.5 ? 5 : 10);
  std::vector<double> ticks;
  const double first = std::floor(low / step + 1e-9);
  for (double k = first; ticks.size() < 100; k++) {
    ticks.push_back(k * step);
    if (k * step >= high - step * 1e-9) break;
  }
  return ticks;
}

namespace {

// One chart while it is drawn.
class Drawing {
 public:
  explicit Drawing(const Chart& chart) : chart_(chart) {}
  std::string svg() {
    find_bounds();
    svg_ = "<svg class=\"chart\" viewBox=\"0 0 " + place(width) + " " + place(height) +
           "\" role=\"img\" aria-label=\"" + html_escaped(chart_.title + " by " + chart_.x_unit) + "\">\n";
    text("head", 8, 17, "start", chart_.title + (chart_.y_unit.empty() ? "" : " (" + chart_.y_unit + ")"));
    if (!chart_.note.empty()) text("note", 8, 33, "start", chart_.note);
    if (x0_ <= x1_) {
      axes();
      for (const Line& l : chart_.lines) line(l);
      labels();
    } else {
      text("note", width / 2, height / 2, "middle", "no values");
    }
    return svg_ + "</svg>\n";
  }

 private:
  struct Ending {
    const Line* line;
    double x, y;
  };

  void find_bounds() {
    for (const Line& l : chart_.lines)
      for (std::size_t i = 0; i < std::min(l.x.size(), l.y.size()); i++)
        if (std::isfinite(l.x[i]) && std::isfinite(l.y[i])) {
          x0_ = std::min(x0_, l.x[i]);
          x1_ = std::max(x1_, l.x[i]);
          y0_ = std::min(y0_, l.y[i] - error(l, i));
          y1_ = std::max(y1_, l.y[i] + error(l, i));
        }
    for (const Line& l : chart_.lines)
      for (double x : l.crosses) x0_ = std::min(x0_, x), x1_ = std::max(x1_, x);
    if (x0_ <= x1_ && y0_ > y1_) y0_ = 0, y1_ = 1;  // nothing but crosses
    for (double x : chart_.x_holds)
      if (x0_ <= x1_) x0_ = std::min(x0_, x), x1_ = std::max(x1_, x);
    for (double y : chart_.y_holds) y0_ = std::min(y0_, y), y1_ = std::max(y1_, y);
    if (chart_.y_from && *chart_.y_from < y1_) y0_ = std::max(y0_, *chart_.y_from);
    // Room on the right for the labels of the lines; about 7.4 units a bold letter.
    std::size_t letters = 0;
    for (const Line& l : chart_.lines)
      if (l.labelled) letters = std::max(letters, std::min<std::size_t>(l.label.size(), 20));
    plot_width_ = width - left - (14 + 7.4 * double(letters));
    if (chart_.from_zero) y0_ = std::min(y0_, 0.0);
    if (y1_ - y0_ < 1e-12 * std::max(std::fabs(y0_), std::fabs(y1_)) || y0_ == y1_) {  // a constant gets room around it
      double room = y0_ == 0 ? 1 : std::fabs(y0_) / 10;
      y0_ -= chart_.from_zero ? 0 : room;
      y1_ += room;
    }
  }

  std::vector<double> x_ticks() const {
    std::vector<double> xs;
    if (!chart_.x_powers)
      xs = round_ticks(x0_, x1_, std::clamp(int(plot_width_ / 50), 2, 6));
    else if (x0_ >= 0)
      for (double t = std::ceil(x0_ - 1e-9); t <= x1_ + 1e-9; t += std::max(1.0, std::ceil((x1_ - x0_) / 8)))
        xs.push_back(t);
    else  // shares: 0.001, 0.003, 0.01, …
      for (double ten = std::floor(x0_ / std::log2(10)); ten * std::log2(10) <= x1_ + 1e-9; ten++)
        for (double t : {std::pow(10, ten), 3 * std::pow(10, ten)})
          if (std::log2(t) >= x0_ - 1e-9 && std::log2(t) <= x1_ + 1e-9) xs.push_back(std::log2(t));
    if (chart_.x_powers && xs.empty()) xs = {x0_};
    if (chart_.x_whole) std::erase_if(xs, [](double t) { return std::fabs(t - std::round(t)) > 1e-9; });
    return xs;
  }

  void axes() {
    const double scale = chart_.percent ? 100 : 1;
    const std::vector<double> ys = round_ticks(scale * y0_, scale * y1_, 5);
    std::vector<double> xs = x_ticks();
    y0_ = ys.front() / scale;
    y1_ = ys.back() / scale;
    if (x0_ == x1_) x0_ -= 0.5, x1_ += 0.5, xs = {x0_ + 0.5};  // one point stands in the middle
    for (double t : ys) {
      rule("grid", py(t / scale));
      text("tick", left - 6, py(t / scale) + 4, "end", short_number(std::fabs(t) < 1e-12 ? 0 : t, 3));
    }
    for (double t : xs) {
      if (t < x0_ - 1e-9 * std::fabs(x0_) || t > x1_ + 1e-9 * std::fabs(x1_)) continue;
      text("tick", px(t), plot_bottom + 16, "middle",
           short_number(!chart_.x_powers && std::fabs(t) < 1e-12 ? 0 : shown_x(t), 4));
    }
    rule("axis", plot_bottom);
    text("note", left + plot_width_ / 2, height - 4, "middle", chart_.x_unit);
  }

  void line(const Line& l) {
    const std::size_t n = std::min(l.x.size(), l.y.size());
    std::string path, marks;
    bool pen = false;
    Ending end{&l, NAN, NAN};
    for (double x : l.crosses) marks += cross(l, x, end);
    for (std::size_t i = 0; i < n; i++) {
      if (!std::isfinite(l.x[i]) || !std::isfinite(l.y[i])) {
        pen = false;
        continue;
      }
      end.x = px(l.x[i]);
      end.y = std::min(py(l.y[i]), plot_bottom);
      path += std::string(pen ? "L" : "M") + place(end.x) + " " + place(py(l.y[i]));
      pen = true;
      marks += bar(l, i);
      if (chart_.dots && n <= 60 && l.stroke != Line::Stroke::area && l.stroke != Line::Stroke::faint)
        marks += dot(l, i);
    }
    if (path.empty() && marks.empty()) return;
    static constexpr const char* strokes[] = {"solid", "dashed", "dotted", "faint", "area", "strong"};
    if (l.stroke == Line::Stroke::area)
      path += "L" + place(end.x) + " " + place(plot_bottom) + "L" + place(px(l.x[0])) + " " + place(plot_bottom) + "Z";
    if (!path.empty()) path = "<path d=\"" + path + "\"/>";
    if (chart_.y_from) path = cut_off(path);
    const std::string tooltip = chart_.dots ? "" : "<title>" + html_escaped(l.label) + "</title>";
    svg_ += "<g class=\"" + colour(l) + " " + strokes[int(l.stroke)] + "\">" + tooltip + path + marks + "</g>\n";
    if (l.labelled) endings_.push_back(end);
  }

  // An inner <svg> shows nothing outside its box.
  std::string cut_off(const std::string& path) const {
    const std::string x = place(left - 2), y = place(top - 8), w = place(plot_width_ + 4),
                      h = place(plot_bottom - top + 8);
    return "<svg x=\"" + x + "\" y=\"" + y + "\" width=\"" + w + "\" height=\"" + h + "\" viewBox=\"" + x + " " + y +
           " " + w + " " + h + "\">" + path + "</svg>";
  }
  std::string bar(const Line& l, std::size_t i) const {
    const double high = l.y[i] + error(l, i), low = std::max(l.y[i] - error(l, i), y0_);
    if (high <= low) return "";
    return "<path d=\"M" + place(px(l.x[i])) + " " + place(py(low)) + "V" + place(py(high)) + "\"/>";
  }
  std::string dot(const Line& l, std::size_t i) const {
    const bool open = i < l.open.size() && l.open[i], below = l.y[i] < y0_ - 1e-12 * std::fabs(y0_);
    const std::string x = place(px(l.x[i])),
                      radius = l.stroke == Line::Stroke::solid || l.stroke == Line::Stroke::strong
                                   ? open ? "3.4" : "2.6"
                                   : "1.8",
                      tooltip = tooltip_of(l, l.x[i],
                                           chart_.percent ? short_number(100 * l.y[i]) + " %" : short_number(l.y[i]));
    if (below)
      return "<path class=\"mark\" d=\"M" + place(px(l.x[i]) - 4) + " " + place(plot_bottom - 7) + "h8l-4 6z\">" +
             tooltip + "</path>";
    return "<circle" + std::string(open ? " class=\"open\"" : "") + " cx=\"" + x + "\" cy=\"" + place(py(l.y[i])) +
           "\" r=\"" + radius + "\">" + tooltip + "</circle>";
  }
  std::string cross(const Line& l, double x, Ending& end) {  // those at the same x stand above each other
    end.x = px(x), end.y = plot_bottom - 7 - 10 * crosses_[x]++;
    return "<path class=\"mark\" d=\"M" + place(end.x - 3) + " " + place(end.y - 3) + "l6 6m0 -6l-6 6\">" +
           tooltip_of(l, x, "no value") + "</path>";
  }
  std::string tooltip_of(const Line& l, double x, const std::string& value) const {
    return "<title>" + html_escaped(l.label + ", " + chart_.x_unit + " " + short_number(shown_x(x), 5) + ": " + value) +
           "</title>";
  }

  void labels() {
    const double edge = left + plot_width_;
    std::vector<double> heights;
    for (const Ending& e : endings_) heights.push_back(e.y);
    separate(heights, 14, top + 6, plot_bottom - 2);
    for (std::size_t i = 0; i < endings_.size(); i++) {
      const auto& [line, x, y] = endings_[i];
      std::string label = line->label;
      if (label.size() > 20) {  // its end tells it from others more often than its middle
        std::size_t head = 7, tail = label.size() - 10;
        while ((label[head] & 0xC0) == 0x80) head--;  // not within a letter
        while ((label[tail] & 0xC0) == 0x80) tail++;
        label = label.substr(0, head) + "…" + label.substr(tail);
      }
      if (std::fabs(heights[i] - y) > 5 || x < edge - 3)
        svg_ += "<path class=\"lead " + colour(*line) + "\" d=\"M" + place(x + 3) + " " + place(y) + "L" +
                place(edge + 6) + " " + place(heights[i]) + "\"/>\n";
      text("end", edge + 8, heights[i] + 4, "start", label, " style=\"fill:var(--" + colour(*line) + ")\"");
    }
  }

  void text(const char* kind, double x, double y, const char* anchor, const std::string& what,
            const std::string& more = "") {
    svg_ += "<text class=\"" + std::string(kind) + "\" x=\"" + place(x) + "\" y=\"" + place(y) + "\" text-anchor=\"" +
            anchor + "\"" + more + ">" + html_escaped(what) + "</text>\n";
  }
  void rule(const char* kind, double y) {
    svg_ += "<line class=\"" + std::string(kind) + "\" x1=\"" + place(left) + "\" x2=\"" + place(left + plot_width_) +
            "\" y1=\"" + place(y) + "\" y2=\"" + place(y) + "\"/>\n";
  }
  static std::string colour(const Line& l) { return "c" + std::to_string(l.colour % chart_colours); }
  static double error(const Line& l, std::size_t i) {
    return i < l.error.size() && std::isfinite(l.error[i]) ? l.error[i] : 0;
  }
  double shown_x(double x) const { return chart_.x_powers ? std::exp2(x) : x; }
  double px(double x) const { return left + (x - x0_) / (x1_ - x0_) * plot_width_; }
  double py(double y) const { return top + (y1_ - y) / (y1_ - y0_) * (plot_bottom - top); }

  static constexpr double plot_bottom = height - bottom;
  const Chart& chart_;
  double x0_ = INFINITY, x1_ = -INFINITY, y0_ = INFINITY, y1_ = -INFINITY;  // what the axes hold
  double plot_width_ = 0;
  std::vector<Ending> endings_;    // of lines that have a label
  std::map<double, int> crosses_;  // drawn, by x
  std::string svg_;
};

}  // namespace

std::string svg_of(const Chart& chart) { return Drawing(chart).svg(); }

std::string chart_style() {
  // Hues that differ in lightness too, for eyes that see fewer of them; each at least 4.5 : 1 on its background.
  static constexpr const char* light[chart_colours] = {"#2257d6", "#c04a00", "#11803b", "#8a35d0", "#cf1466",
                                                       "#6e6400", "#007f99", "#6d727d", "#14171c"};
  static constexpr const char* dark[chart_colours] = {"#6fa3ff", "#ff9a4d", "#5fd67a", "#c792ff", "#ff78b0",
                                                      "#e3d74a", "#45d3e6", "#959ca9", "#ffffff"};
  auto variables = [](const char* const* colours, const char* rest) {
    std::string css = rest;
    for (int i = 0; i < chart_colours; i++) css += "--c" + std::to_string(i) + ":" + colours[i] + ";";
    return css;
  };
  std::string css =
      ":root{color-scheme:light dark;" +
      variables(light, "--page:#fbfbfa;--card:#fff;--ink:#1c1f24;--soft:#5c6570;--rule:#e1e4e8;") + "}\n" +
      "@media screen and (prefers-color-scheme:dark){:root{" +
      variables(dark, "--page:#14161a;--card:#1c1f25;--ink:#e8eaed;--soft:#a2abb6;--rule:#333942;") + "}}\n" +
      "svg.chart{display:block;width:100%;height:auto;font:12px system-ui,sans-serif}\n"
      "svg.chart .head{font-weight:600;font-size:14px;fill:var(--ink)}\n"
      "svg.chart .note,svg.chart .tick{fill:var(--soft)}svg.chart .tick{font-variant-numeric:tabular-nums}\n"
      "svg.chart .end{font-weight:600}svg.chart .grid{stroke:var(--rule)}svg.chart .axis{stroke:var(--soft)}\n"
      "svg.chart g path{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}\n"
      "svg.chart .lead{fill:none;stroke-width:1;opacity:.6;stroke-dasharray:1 3}\n"
      "svg.chart g.dashed path{stroke-dasharray:5 4;stroke-width:1.5}\n"
      "svg.chart g.dotted path{stroke-dasharray:1 4}svg.chart g.faint path{stroke-width:1;opacity:.45}\n"
      "svg.chart g.strong path{stroke-width:3}svg.chart g path.mark{stroke-width:1.5;stroke-dasharray:none}\n"
      "svg.chart .heat{fill:var(--c0)}svg.chart .box{fill:none;stroke:var(--rule)}svg.chart "
      ".chosen{fill:none;stroke:var(--ink);stroke-width:2}\n"
      "svg.chart .small{font-size:10px;fill:var(--soft)}svg.chart "
      ".value{font-size:11px;fill:var(--ink);font-variant-numeric:tabular-nums}\n";
  for (int i = 0; i < chart_colours; i++) {
    std::string c = ".c" + std::to_string(i), v = "var(--c" + std::to_string(i) + ")";
    css += "svg.chart " + c + " path,svg.chart path" + c + "{stroke:" + v + "}svg.chart " + c + " circle,svg.chart " +
           c + ".area path{fill:" + v + "}svg.chart " + c + " circle.open{fill:var(--card);stroke:" + v +
           ";stroke-width:1.5}\n";
  }
  return css;
}

}  // namespace tandem
