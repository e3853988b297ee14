#include "layers/export/chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace tandem {
namespace {

// In the SVG's own units; text is 12 units high, so a chart should be shown about 300 to 650 pixels wide.
constexpr double width = 440, height = 258, left = 52, top = 46, bottom = 36;

std::string place(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", v);
  return text;
}

std::string labelled(double v, bool percent) { return percent ? short_number(100 * v, 4) + " %" : short_number(v, 4); }

// Labels at the right end, moved apart so that they do not cover each other, as near to their lines as that allows.
void spread(std::vector<double>& y, double gap, double low, double high) {
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

std::string short_number(double v, int digits) {
  if (!std::isfinite(v)) return "–";
  char text[400];  // more than any double needs
  // In thousands where more digits were before the point than are wanted.
  if (std::fabs(v) >= std::min(1e4, std::pow(10, digits)) && std::fabs(v) < 1e15) {
    int unit = std::fabs(v) >= 1e12 ? 4 : std::fabs(v) >= 1e9 ? 3 : std::fabs(v) >= 1e6 ? 2 : 1;
    std::snprintf(text, sizeof text, "%.*g%c", std::max(3, digits - 1), v / std::pow(1e3, unit), " kMGT"[unit]);
  } else {
    std::snprintf(text, sizeof text, "%.*g", digits, v);
    if (char* e = std::strchr(text, 'e'); e && e[2] == '0') std::memmove(e + 2, e + 3, std::strlen(e + 2));  // e-06
  }
  return text;
}

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

std::string svg_of(const Chart& chart) {
  double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
  for (const Line& l : chart.lines)
    for (std::size_t i = 0; i < std::min(l.x.size(), l.y.size()); i++)
      if (std::isfinite(l.x[i]) && std::isfinite(l.y[i])) {
        x0 = std::min(x0, l.x[i]), x1 = std::max(x1, l.x[i]);
        const double error = i < l.error.size() && std::isfinite(l.error[i]) ? l.error[i] : 0;
        y0 = std::min(y0, l.y[i] - error), y1 = std::max(y1, l.y[i] + error);
      }
  for (double x : chart.x_holds)
    if (x0 <= x1) x0 = std::min(x0, x), x1 = std::max(x1, x);
  std::string svg = "<svg class=\"chart\" viewBox=\"0 0 " + place(width) + " " + place(height) +
                    "\" role=\"img\" aria-label=\"" + html_escaped(chart.title + " by " + chart.x_unit) + "\">\n";
  auto text = [&](const char* kind, double x, double y, const char* anchor, const std::string& what,
                  const std::string& more = "") {
    svg += "<text class=\"" + std::string(kind) + "\" x=\"" + place(x) + "\" y=\"" + place(y) + "\" text-anchor=\"" +
           anchor + "\"" + more + ">" + html_escaped(what) + "</text>\n";
  };
  text("head", 8, 17, "start", chart.title + (chart.y_unit.empty() ? "" : " (" + chart.y_unit + ")"));
  if (!chart.note.empty()) text("note", 8, 33, "start", chart.note);
  if (!(x0 <= x1)) {
    text("note", width / 2, height / 2, "middle", "no values");
    return svg + "</svg>\n";
  }

  // Room on the right for the labels of the lines; about 7.4 units a bold letter.
  std::size_t letters = 0;
  for (const Line& l : chart.lines)
    if (l.labelled) letters = std::max(letters, std::min<std::size_t>(l.label.size(), 20));
  const double right = 14 + 7.4 * double(letters);
  const double plot_w = width - left - right, plot_h = height - top - bottom;
  if (chart.from_zero) y0 = std::min(y0, 0.0);
  if (y1 - y0 < 1e-12 * std::max(std::fabs(y0), std::fabs(y1)) || y0 == y1) {  // a constant gets room around it
    double room = y0 == 0 ? 1 : std::fabs(y0) / 10;
    y0 -= chart.from_zero ? 0 : room, y1 += room;
  }
  const double scale = chart.percent ? 100 : 1;
  std::vector<double> ys = round_ticks(scale * y0, scale * y1, 5), xs = round_ticks(x0, x1, std::clamp(int(plot_w / 50), 2, 6));
  if (chart.x_powers) {
    xs.clear();
    if (x0 >= 0)
      for (double t = std::ceil(x0 - 1e-9); t <= x1 + 1e-9; t += std::max(1.0, std::ceil((x1 - x0) / 8))) xs.push_back(t);
    else  // shares: 0.001, 0.003, 0.01, …
      for (double ten = std::floor(x0 / std::log2(10)); ten * std::log2(10) <= x1 + 1e-9; ten++)
        for (double t : {std::pow(10, ten), 3 * std::pow(10, ten)})
          if (std::log2(t) >= x0 - 1e-9 && std::log2(t) <= x1 + 1e-9) xs.push_back(std::log2(t));
    if (xs.empty()) xs = {x0};
  }
  if (chart.x_whole) std::erase_if(xs, [](double t) { return std::fabs(t - std::round(t)) > 1e-9; });
  auto shown_x = [&](double x) { return chart.x_powers ? std::exp2(x) : x; };
  double ylow = ys.front() / scale, yhigh = ys.back() / scale;
  if (x0 == x1) x0 -= 0.5, x1 += 0.5, xs = {x0 + 0.5};  // one point stands in the middle
  auto px = [&](double x) { return left + (x - x0) / (x1 - x0) * plot_w; };
  auto py = [&](double y) { return top + (yhigh - y) / (yhigh - ylow) * plot_h; };

  for (double t : ys) {
    svg += "<line class=\"grid\" x1=\"" + place(left) + "\" x2=\"" + place(left + plot_w) + "\" y1=\"" +
           place(py(t / scale)) + "\" y2=\"" + place(py(t / scale)) + "\"/>\n";
    text("tick", left - 6, py(t / scale) + 4, "end", short_number(std::fabs(t) < 1e-12 ? 0 : t, 3));
  }
  for (double t : xs) {
    if (t < x0 - 1e-9 * std::fabs(x0) || t > x1 + 1e-9 * std::fabs(x1)) continue;
    text("tick", px(t), top + plot_h + 16, "middle",
         short_number(chart.x_powers         ? shown_x(t)
                      : std::fabs(t) < 1e-12 ? 0
                                             : t,
                      4));
  }
  svg += "<line class=\"axis\" x1=\"" + place(left) + "\" x2=\"" + place(left + plot_w) + "\" y1=\"" +
         place(top + plot_h) + "\" y2=\"" + place(top + plot_h) + "\"/>\n";
  text("note", left + plot_w / 2, height - 4, "middle", chart.x_unit);

  struct Ending {
    const Line* line;
    double x, y;
  };
  std::vector<Ending> endings;
  for (const Line& l : chart.lines) {
    const std::size_t n = std::min(l.x.size(), l.y.size());
    std::string path, dots, bars;
    bool pen = false;
    Ending end{&l, NAN, NAN};
    for (std::size_t i = 0; i < n; i++) {
      if (!std::isfinite(l.x[i]) || !std::isfinite(l.y[i])) {
        pen = false;
        continue;
      }
      end.x = px(l.x[i]), end.y = py(l.y[i]);
      path += std::string(pen ? "L" : "M") + place(end.x) + " " + place(end.y);
      pen = true;
      if (i < l.error.size() && l.error[i] > 0 && std::isfinite(l.error[i]))
        bars += "<path d=\"M" + place(end.x) + " " + place(py(l.y[i] - l.error[i])) + "L" + place(end.x) + " " +
                place(py(l.y[i] + l.error[i])) + "\"/>";
      if (n <= 60 && l.stroke != Line::Stroke::faint)
        dots += "<circle cx=\"" + place(end.x) + "\" cy=\"" + place(end.y) + "\" r=\"" +
                (l.stroke == Line::Stroke::solid ? "2.6" : "1.8") + "\"><title>" +
                html_escaped(l.label + ", " + chart.x_unit + " " + short_number(shown_x(l.x[i]), 5) + ": " +
                             labelled(l.y[i], chart.percent)) +
                "</title></circle>";
    }
    if (path.empty()) continue;
    static constexpr const char* strokes[] = {"solid", "dashed", "dotted", "faint"};
    svg += "<g class=\"c" + std::to_string(l.colour % chart_colours) + " " + strokes[int(l.stroke)] + "\"><path d=\"" + path +
           "\"/>" + bars + dots + "</g>\n";
    if (l.labelled) endings.push_back(end);
  }
  std::vector<double> heights;
  for (const Ending& e : endings) heights.push_back(e.y);
  spread(heights, 14, top + 6, top + plot_h - 2);
  for (std::size_t i = 0; i < endings.size(); i++) {
    const Line& l = *endings[i].line;
    std::string label = l.label;
    if (label.size() > 20) {  // its end tells it from others more often than its middle
      std::size_t head = 7, tail = label.size() - 10;
      while ((label[head] & 0xC0) == 0x80) head--;  // not within a letter
      while ((label[tail] & 0xC0) == 0x80) tail++;
      label = label.substr(0, head) + "…" + label.substr(tail);
    }
    if (std::fabs(heights[i] - endings[i].y) > 5 || endings[i].x < left + plot_w - 3)
      svg += "<path class=\"lead c" + std::to_string(l.colour % chart_colours) + "\" d=\"M" + place(endings[i].x + 3) + " " +
             place(endings[i].y) + "L" + place(left + plot_w + 6) + " " + place(heights[i]) + "\"/>\n";
    text("end", left + plot_w + 8, heights[i] + 4, "start", label,
         " style=\"fill:var(--c" + std::to_string(l.colour % chart_colours) + ")\"");
  }
  return svg + "</svg>\n";
}

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
      "@media (prefers-color-scheme:dark){:root{" +
      variables(dark, "--page:#14161a;--card:#1c1f25;--ink:#e8eaed;--soft:#a2abb6;--rule:#333942;") + "}}\n" +
      "svg.chart{display:block;width:100%;height:auto;font:12px system-ui,sans-serif}\n"
      "svg.chart .head{font-weight:600;font-size:14px;fill:var(--ink)}\n"
      "svg.chart .note,svg.chart .tick{fill:var(--soft)}svg.chart .tick{font-variant-numeric:tabular-nums}\n"
      "svg.chart .end{font-weight:600}svg.chart .grid{stroke:var(--rule)}svg.chart .axis{stroke:var(--soft)}\n"
      "svg.chart g path{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}\n"
      "svg.chart .lead{fill:none;stroke-width:1;opacity:.6;stroke-dasharray:1 3}\n"
      "svg.chart g.dashed path{stroke-dasharray:5 4;stroke-width:1.5}\n"
      "svg.chart g.dotted path{stroke-dasharray:1 4}svg.chart g.faint path{stroke-width:1;opacity:.45}\n";
  for (int i = 0; i < chart_colours; i++) {
    std::string c = ".c" + std::to_string(i), v = "var(--c" + std::to_string(i) + ")";
    css += "svg.chart " + c + " path,svg.chart path" + c + "{stroke:" + v + "}svg.chart " + c + " circle{fill:" + v +
           "}\n";
  }
  return css;
}

}  // namespace tandem
