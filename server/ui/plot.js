// A timeline drawn as SVG: lines or an area over time, bands of draft versions, marks in lanes, a crosshair shared by all plots.

import { h, patch, svg } from "./dom.js";
import { clock } from "./words.js";

const LANE = 20;
const GAP = 14; // between the labels at the lines' ends
const STEPS_S = [10, 30, 60, 120, 300, 600];

const SHAPES = {
  activate: () => svg("path", { d: "M0-5 5 4H-5Z" }),
  rollback: () => svg("path", { d: "M0 5 5-4H-5Z" }),
  refused: () => svg("path", { d: "M-4-4 4 4M4-4-4 4" }),
  accepted: () => svg("circle", { r: 4.5 }),
  rejected: () => svg("path", { d: "M0-5 5 0 0 5-5 0Z" }),
};

// The moment looked at, on every plot at once.
export class Cursor {
  constructor() {
    this.at = null;
    this.plots = [];
  }

  move(at, source) {
    this.at = at;
    for (const plot of this.plots) plot.showCursor(plot === source);
  }
}

export class Plot {
  constructor(root, cursor, { label, tall, reading }) {
    this.root = root;
    this.cursor = cursor;
    this.label = label;
    this.tall = tall;
    this.reading = reading;
    this.data = null;
    this.svg = svg("svg", { "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", hidden: true });
    root.append(this.svg, this.tip);
    cursor.plots.push(this);
    root.addEventListener("pointermove", (event) => this.cursor.move(this.timeAt(event.clientX), this));
    root.addEventListener("pointerleave", () => this.cursor.move(null, this));
    root.addEventListener("keydown", (event) => this.onKey(event));
    root.addEventListener("blur", () => this.cursor.move(null, this));
    new ResizeObserver(() => this.data && this.draw(this.data)).observe(root);
  }

  // data: { from, to, max, min, format, lines, area, bands, marks, empty }
  draw(data) {
    this.data = data;
    const width = this.root.clientWidth;
    const height = this.root.clientHeight;
    if (!width || !height) return;
    const isNarrow = width < 640;
    const lanes = this.tall ? 2 * LANE + 6 : 0;
    this.area = { left: 48, right: width - (isNarrow ? 10 : 120), top: 10, bottom: height - 22 - lanes };
    this.scale(data);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const parts = [this.grid(data), this.shades(data), this.shape(data), this.lines(data)];
    if (this.tall) parts.push(this.lanes(data));
    if (!isNarrow) parts.push(this.endLabels(data));
    if (!data.lines.some((line) => line.points.length)) parts.push(this.emptyText(data));
    this.rule = svg("g", { class: "cursor" });
    this.svg.replaceChildren(...parts.flat(Infinity), this.rule);
    this.root.setAttribute("aria-label", `${this.label}. ${this.summary(data)} Arrow keys read values.`);
    this.showCursor(this.isSource);
  }

  scale(data) {
    const { left, right, top, bottom } = this.area;
    const height = (bottom - top) / (data.max - data.min || 1);
    this.x = (at) => left + ((at - data.from) / (data.to - data.from || 1)) * (right - left);
    this.y = (value) => bottom - (value - data.min) * height;
  }

  grid(data) {
    const { left, right, bottom } = this.area;
    const parts = [];
    for (const value of data.ticks) {
      const y = this.y(value);
      parts.push(svg("line", { class: "grid-line", x1: left, x2: right, y1: y, y2: y }));
      parts.push(svg("text", { class: "tick", x: left - 6, y: y + 4, "text-anchor": "end" }, data.tickFormat(value)));
    }
    const duration = data.to - data.from;
    const most = Math.max((right - left) / 90, 2);
    const step = STEPS_S.find((seconds) => duration / seconds <= most) ?? STEPS_S.at(-1);
    const y = bottom + 15 + (this.tall ? 2 * LANE + 6 : 0);
    for (let at = Math.ceil(data.from / step) * step; at <= data.to; at += step) {
      const x = this.x(at);
      if (x < left + 12 || x > right - 12) continue;
      parts.push(svg("text", { class: "tick", x, y, "text-anchor": "middle" }, clock(at, step < 60)));
    }
    return parts;
  }

  shades(data) {
    const { top, bottom } = this.area;
    const parts = data.bands.map((band) => {
      const x = this.x(band.from);
      const attributes = { class: `band ${band.version % 2 ? "odd" : "even"}`, x, y: top, height: bottom - top };
      return svg("rect", { ...attributes, width: Math.max(this.x(band.to) - x, 0) });
    });
    for (const mark of data.marks.filter((one) => one.lane === 0)) {
      const x = this.x(mark.at);
      parts.push(svg("line", { class: `swap-line ${mark.kind}`, x1: x, x2: x, y1: top, y2: bottom }));
    }
    return parts;
  }

  shape(data) {
    const points = data.lines[0]?.points ?? [];
    if (!data.area || points.length < 2) return [];
    const base = this.y(data.min);
    const [first, last] = [points[0], points.at(-1)];
    return [svg("path", { class: "area", d: `M${this.x(first[0])} ${base}${this.path(points, "L")}L${this.x(last[0])} ${base}Z` })];
  }

  path(points, start = "M") {
    return points.map(([at, value], index) => `${index ? "L" : start}${this.x(at).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
  }

  lines(data) {
    // The first line is the main one and lies on top.
    return [...data.lines].reverse().map((line) => {
      const attributes = { class: `line ${line.style}` };
      if (line.points.length !== 1) return svg("path", { ...attributes, d: this.path(line.points) });
      const [at, value] = line.points[0];
      return svg("circle", { class: `dot ${line.style}`, cx: this.x(at), cy: this.y(value), r: 2.5 });
    });
  }

  endLabels(data) {
    const labels = data.lines
      .filter((line) => line.points.length)
      .map((line) => ({ line, y: this.y(line.points.at(-1)[1]), value: line.points.at(-1)[1] }))
      .sort((left, right) => left.y - right.y);
    labels.forEach((label, index) => (label.y = Math.max(label.y, index ? labels[index - 1].y + GAP : this.area.top + 4)));
    const below = (labels.at(-1)?.y ?? 0) - this.area.bottom;
    if (below > 0) {
      labels.reverse().forEach((label, index) => {
        label.y = Math.min(label.y, index ? labels[index - 1].y - GAP : this.area.bottom);
      });
    }
    return labels.map(({ line, y, value }) =>
      svg(
        "text",
        { class: `end-label ${line.style}`, x: this.area.right + 8, y: y + 4 },
        svg("tspan", { class: "end-value" }, data.format(value)),
        svg("tspan", { dx: 6 }, shorten(line.name, 12)),
      ),
    );
  }

  lanes(data) {
    const { left, right, bottom } = this.area;
    const middle = (lane) => bottom + 8 + LANE * lane + LANE / 2;
    const parts = data.bands.flatMap((band) => {
      const x = this.x(band.from);
      const width = Math.max(this.x(band.to) - x - 1, 1);
      const text = `v${band.version}`;
      const box = { x, y: middle(0) - LANE / 2 + 2, width, height: LANE - 4, rx: 3 };
      const segment = svg("rect", { class: `segment ${band.version % 2 ? "odd" : "even"}`, ...box });
      const isHidden = (mark) => mark.lane === 0 && this.x(mark.at) > x + 4 && this.x(mark.at) < x + 7 * text.length + 18;
      const fits = width > 7 * text.length + 18 && !data.marks.some(isHidden);
      return [segment, fits ? svg("text", { class: "segment-text", x: x + 10, y: middle(0) + 4 }, text) : null];
    });
    parts.push(svg("line", { class: "grid-line", x1: left, x2: right, y1: middle(1), y2: middle(1) }));
    for (const mark of data.marks) {
      const place = `translate(${this.x(mark.at).toFixed(1)} ${middle(mark.lane)})`;
      parts.push(svg("g", { class: `mark ${mark.kind}`, transform: place }, SHAPES[mark.kind](), svg("title", {}, mark.text)));
    }
    parts.push(svg("text", { class: "tick", x: left - 6, y: middle(0) + 4, "text-anchor": "end" }, "draft"));
    parts.push(svg("text", { class: "tick", x: left - 6, y: middle(1) + 4, "text-anchor": "end" }, "gate"));
    return parts.filter((part) => part);
  }

  emptyText(data) {
    const { left, right, top, bottom } = this.area;
    return svg("text", { class: "empty", x: (left + right) / 2, y: (top + bottom) / 2 + 4, "text-anchor": "middle" }, data.empty);
  }

  summary(data) {
    const latest = data.lines.filter((line) => line.points.length).map((line) => `${line.name} ${data.format(line.points.at(-1)[1])}`);
    return latest.length ? `Latest: ${latest.join(", ")}.` : data.empty;
  }

  timeAt(clientX) {
    if (!this.data) return null;
    const { left, right } = this.area;
    const x = Math.min(Math.max(clientX - this.root.getBoundingClientRect().left, left), right);
    return this.data.from + ((x - left) / (right - left)) * (this.data.to - this.data.from);
  }

  onKey(event) {
    const points = this.data?.lines[0]?.points ?? [];
    if (!points.length) return;
    const times = points.map((point) => point[0]);
    const now = this.cursor.at === null ? times.length : nearest(times, this.cursor.at);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: times.length - 1 }[event.key];
    if (event.key === "Escape") this.cursor.move(null, this);
    if (next === undefined) return;
    event.preventDefault();
    this.cursor.move(times[Math.min(Math.max(next, 0), times.length - 1)], this);
    this.reading.textContent = this.tip.textContent;
  }

  // The rule on every plot, the values where it is looked at.
  showCursor(isSource) {
    this.isSource = isSource;
    const { at } = this.cursor;
    if (!this.data || !this.rule) return;
    if (at === null || at < this.data.from || at > this.data.to) {
      this.rule.replaceChildren();
      this.tip.hidden = true;
      return;
    }
    const x = this.x(at);
    const { top, bottom, right } = this.area;
    const end = bottom + (this.tall ? 2 * LANE + 6 : 0);
    const rows = this.valuesAt(at);
    const dots = rows.map(({ line, point }) => svg("circle", { class: `dot ${line.style}`, cx: this.x(point[0]), cy: this.y(point[1]), r: 3 }));
    this.rule.replaceChildren(svg("line", { class: "rule", x1: x, x2: x, y1: top, y2: end }), ...dots);
    this.tip.hidden = !isSource;
    if (!isSource) return;
    const version = this.data.bands.find((band) => band.from <= at && at <= band.to)?.version;
    const near = this.data.marks.filter((mark) => Math.abs(this.x(mark.at) - x) < 7);
    patch(
      this.tip,
      h("div", { class: "tip-head" }, clock(at), version === undefined ? "" : ` · draft v${version}`, " "),
      h("table", {}, h("tbody", {}, rows.map(({ line, point }) =>
        h("tr", {}, h("td", {}, swatch(line.style), line.name), h("td", { class: "number" }, ` ${this.data.format(point[1])} `))))),
      near.map((mark) => h("div", { class: "tip-mark" }, `${mark.text} `)),
    );
    const width = this.tip.offsetWidth;
    this.tip.style.left = `${x + 14 + width > right ? Math.max(x - width - 14, 4) : x + 14}px`;
  }

  valuesAt(at) {
    return this.data.lines.flatMap((line) => {
      if (!line.points.length) return [];
      const point = line.points[nearest(line.points.map((one) => one[0]), at)];
      return Math.abs(point[0] - at) <= (this.data.to - this.data.from) / 20 ? [{ line, point }] : [];
    });
  }
}

export function swatch(style) {
  const sample = svg("line", { class: `line ${style}`, x1: 0, x2: 18, y1: 5, y2: 5 });
  return svg("svg", { class: "swatch", viewBox: "0 0 18 10", "aria-hidden": "true" }, sample);
}

export function sparkline(points, label) {
  const values = points.map((point) => point[1]);
  if (values.length < 2) return svg("svg", { class: "spark", viewBox: "0 0 120 28", "aria-hidden": "true" });
  const low = Math.min(...values);
  const height = Math.max(...values) - low || 1;
  const [start, end] = [points[0][0], points.at(-1)[0]];
  const place = ([at, value]) => `${((120 * (at - start)) / (end - start || 1)).toFixed(1)} ${(25 - (22 * (value - low)) / height).toFixed(1)}`;
  const attributes = { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", role: "img", "aria-label": label };
  return svg("svg", attributes, svg("path", { d: `M${points.map(place).join("L")}` }));
}

// Round numbers that cover `low` to `high`.
export function niceTicks(low, high, number = 4) {
  const raw = (high - low || 1) / number;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const ticks = [];
  for (let value = Math.floor(low / step) * step; value < high + step; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks;
}

function nearest(times, at) {
  let best = 0;
  times.forEach((time, index) => {
    if (Math.abs(time - at) < Math.abs(times[best] - at)) best = index;
  });
  return best;
}

const shorten = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
