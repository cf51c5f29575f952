"use strict";
// Sortable tables and charts that can be zoomed into. Texts from runs reach the page as text nodes and attributes only.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 320;
const MARGIN = { top: 10, right: 14, bottom: 42, left: 64 };
// in pixels: how near a value must be to be read, and how high a selection must be to be a box
const NEAR = 60;
const BOX = 40;

function made(name, attributes = {}, text = null, space = null) {
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}
const drawn = (name, attributes, text = null) => made(name, attributes, text, SVG);

function tell(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(5)));
  const [digits, power] = value.toExponential(4).split("e");
  return `${Number(digits)}e${power}`;
}

// Tables -------------------------------------------------------------------------------------------------------------

function sortable(table) {
  const body = table.tBodies[0];
  if (!body || body.rows.length < 2) return;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    const button = made("button", { type: "button" });
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row, order) => ({ row, order, key: keyOf(row.cells[place]) }));
      rows.sort((a, b) => compared(a.key, b.key, down) || a.order - b.order);
      body.append(...rows.map((item) => item.row));
    });
  });
}

function keyOf(cell) {
  const text = cell.dataset.key ?? (cell.classList.contains("number") ? cell.textContent.trim() : null);
  if (text === null) return cell.textContent.trim();
  return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
}

function compared(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null); // what is missing comes last, up and down
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en");
  return down ? -order : order;
}

// Charts -------------------------------------------------------------------------------------------------------------

class Chart {
  constructor(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    this.title = data.title;
    this.unit = data.unit;
    this.logarithmic = data.logarithmic;
    this.curves = data.curves.map((curve) => ({ ...curve, shown: true, points: pointsOf(curve) }));
    this.runs = [...new Set(data.curves.map((curve) => curve.run))];
    this.quantities = [...new Set(data.curves.map((curve) => curve.quantity))];
    this.off = new Set();
    const xs = this.curves.flatMap((curve) => curve.points.map((point) => point.x));
    this.whole = [Math.min(...limits(xs)), Math.max(...limits(xs))];
    if (this.whole[0] === this.whole[1]) this.whole[1] += 1;
    this.window = [...this.whole];
    this.heights = null; // of a box that was zoomed into
    this.at = null; // the value that is read: curve and place in it
    this.build(figure);
    this.draw();
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  build(figure) {
    const anchor = figure.querySelector("details");
    this.tools = made("div", { class: "tools", role: "group", "aria-label": "Zoom" });
    for (const [name, act] of [
      ["Zoom in", () => this.zoom(0.5)], ["Zoom out", () => this.zoom(2)],
      ["Earlier", () => this.pan(-0.25)], ["Later", () => this.pan(0.25)], ["Show all", () => this.reset()],
    ]) {
      const button = made("button", { type: "button" }, name);
      button.addEventListener("click", act);
      this.tools.append(button);
    }
    this.plot = made("div", { class: "plot" });
    this.svg = drawn("svg", {
      role: "application", tabindex: "0", "aria-label": `${this.title}: arrow keys read the values`,
      "aria-roledescription": "chart",
    });
    this.plot.append(this.svg);
    this.readout = made("p", { class: "readout", "aria-live": "polite" }, "Point at a value to read it.");
    figure.insertBefore(this.tools, anchor);
    figure.insertBefore(this.plot, anchor);
    figure.insertBefore(this.readout, anchor);
    figure.insertBefore(this.keys("Runs", this.runs, "run"), anchor);
    if (this.quantities.length > 1) figure.insertBefore(this.keys("Quantities", this.quantities, "quantity"), anchor);
    this.listen();
  }

  keys(label, names, field) {
    const group = made("div", { class: "keys", role: "group", "aria-label": `${label} shown` });
    for (const name of names) {
      const button = made("button", { type: "button", "aria-pressed": "true" });
      const like = this.curves.find((curve) => curve[field] === name);
      const swatch = drawn("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
      if (field === "run") swatch.append(this.mark({ ...like, shape: "line" }, [{ px: 0, py: 5 }, { px: 22, py: 5 }]));
      else {
        const places = ["line", "dashed", "dotted"].includes(like.shape) ? [{ px: 0, py: 5 }, { px: 22, py: 5 }] : [{ px: 11, py: 5 }];
        swatch.append(this.mark({ ...like, color: "gray" }, places));
      }
      button.append(swatch, name);
      button.addEventListener("click", () => {
        const key = `${field}\n${name}`;
        this.off.has(key) ? this.off.delete(key) : this.off.add(key);
        button.setAttribute("aria-pressed", String(!this.off.has(key)));
        for (const curve of this.curves) {
          curve.shown = !this.off.has(`run\n${curve.run}`) && !this.off.has(`quantity\n${curve.quantity}`);
        }
        this.at = null;
        this.draw();
      });
      group.append(button);
    }
    return group;
  }

  listen() {
    let from = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      from = this.place(event);
      try { this.svg.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
    });
    this.svg.addEventListener("pointermove", (event) => {
      const here = this.place(event);
      if (from !== null && Math.abs(here.px - from.px) > 4) this.selection(from, here);
      else this.read(here);
    });
    const release = (event) => {
      if (from === null) return;
      const here = this.place(event);
      this.svg.querySelector(".zooming")?.remove();
      if (event.type === "pointerup" && Math.abs(here.px - from.px) > 8) {
        if (Math.abs(here.py - from.py) > BOX) this.heights = [this.y(from.py), this.y(here.py)].sort((a, b) => a - b);
        this.show(...[this.x(from.px), this.x(here.px)].sort((a, b) => a - b));
      }
      from = null;
    };
    this.svg.addEventListener("pointerup", release);
    this.svg.addEventListener("pointercancel", release);
    this.svg.addEventListener("dblclick", () => this.reset());
    this.svg.addEventListener("keydown", (event) => {
      const act = {
        ArrowRight: () => (event.shiftKey ? this.pan(0.1) : this.step(1)),
        ArrowLeft: () => (event.shiftKey ? this.pan(-0.1) : this.step(-1)),
        ArrowDown: () => this.change(1),
        ArrowUp: () => this.change(-1),
        "+": () => this.zoom(0.5),
        "=": () => this.zoom(0.5),
        "-": () => this.zoom(2),
        0: () => this.reset(),
        Escape: () => this.reset(),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }

  // the window of iterations
  show(low, high) {
    if (high - low < 1) {
      const middle = (low + high) / 2;
      [low, high] = [middle - 0.5, middle + 0.5];
    }
    const width = Math.min(high - low, this.whole[1] - this.whole[0]);
    low = Math.min(Math.max(low, this.whole[0]), this.whole[1] - width);
    this.window = [low, low + width];
    this.draw();
  }
  zoom(factor) {
    const [low, high] = this.window;
    const read = this.at && this.at.curve.points[this.at.place].x;
    const middle = read !== null && read >= low && read <= high ? read : (low + high) / 2;
    this.show(middle - (middle - low) * factor, middle + (high - middle) * factor);
  }
  pan(share) {
    const shift = share * (this.window[1] - this.window[0]);
    this.show(this.window[0] + shift, this.window[1] + shift);
  }
  reset() {
    this.heights = null;
    this.show(...this.whole);
  }

  // reading values
  step(direction) {
    if (!this.at) return this.change(0);
    const place = this.at.place + direction;
    if (place < 0 || place >= this.at.curve.points.length) return;
    this.tellOf({ curve: this.at.curve, place });
    const x = this.at.curve.points[place].x;
    if (x < this.window[0] || x > this.window[1]) this.pan(0.5 * direction);
  }
  change(direction) {
    const shown = this.curves.filter((curve) => curve.shown);
    if (!shown.length) return;
    const now = this.at ? shown.indexOf(this.at.curve) : 0;
    const curve = shown[(Math.max(now, 0) + direction + shown.length) % shown.length];
    const x = this.at ? this.at.curve.points[this.at.place].x : this.window[0];
    let place = curve.points.findIndex((point) => point.x >= x);
    if (place < 0) place = curve.points.length - 1;
    this.tellOf({ curve, place });
  }
  read(here) {
    let best = null;
    for (const curve of this.curves) {
      if (!curve.shown) continue;
      curve.points.forEach((point, place) => {
        if (point.x < this.window[0] || point.x > this.window[1]) return;
        if (this.scale(point.y) < this.range[0] || this.scale(point.y) > this.range[1]) return;
        const far = Math.hypot(this.px(point.x) - here.px, this.py(point.y) - here.py);
        if (far < NEAR && (!best || far < best.far)) best = { far, curve, place };
      });
    }
    if (best) this.tellOf(best);
  }
  tellOf(at) {
    this.at = { curve: at.curve, place: at.place };
    const { curve, place } = this.at;
    const point = curve.points[place];
    const sign = curve.shape === "bound" ? "≥ " : "";
    this.readout.textContent = `${curve.run} · ${curve.quantity} · iteration ${point.x}: ${sign}${tell(point.y)}${
      this.unit === "%" ? " %" : ""}`;
    this.cursor();
  }

  // drawing
  get shownPoints() {
    return this.curves.filter((curve) => curve.shown).flatMap((curve) =>
      curve.points.filter((point) => point.x >= this.window[0] && point.x <= this.window[1]));
  }
  scale(y) {
    return this.logarithmic ? Math.log10(y) : y;
  }
  px(x) {
    const [low, high] = this.window;
    return MARGIN.left + ((x - low) / (high - low)) * (this.width - MARGIN.left - MARGIN.right);
  }
  x(px) {
    const [low, high] = this.window;
    return low + ((px - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * (high - low);
  }
  py(y) {
    const [low, high] = this.range;
    return HEIGHT - MARGIN.bottom - ((this.scale(y) - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }
  y(py) {
    const [low, high] = this.range;
    return low + ((HEIGHT - MARGIN.bottom - py) / (HEIGHT - MARGIN.top - MARGIN.bottom)) * (high - low);
  }
  place(event) {
    const box = this.svg.getBoundingClientRect();
    return { px: ((event.clientX - box.left) * this.width) / box.width, py: ((event.clientY - box.top) * HEIGHT) / box.height };
  }
  selection(from, to) {
    this.svg.querySelector(".zooming")?.remove();
    const inside = (value, low, high) => Math.min(Math.max(value, low), high);
    const [left, right] = [from.px, to.px].map((px) => inside(px, MARGIN.left, this.width - MARGIN.right)).sort((a, b) => a - b);
    const whole = [MARGIN.top, HEIGHT - MARGIN.bottom];
    const box = Math.abs(to.py - from.py) > BOX;
    const [top, bottom] = box ? [from.py, to.py].map((py) => inside(py, ...whole)).sort((a, b) => a - b) : whole;
    this.svg.append(drawn("rect", { class: "zooming", x: left, y: top, width: right - left, height: bottom - top }));
  }
  cursor() {
    this.svg.querySelector(".cursor")?.remove();
    if (!this.at) return;
    const point = this.at.curve.points[this.at.place];
    if (point.x < this.window[0] || point.x > this.window[1]) return;
    this.inner.append(drawn("circle", { class: "cursor", r: 6, cx: this.px(point.x), cy: this.py(point.y) }));
  }
  draw() {
    this.width = Math.max(240, this.plot.clientWidth);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    const heights = limits(this.shownPoints.map((point) => this.scale(point.y)));
    let [low, high] = heights.length ? [Math.min(...heights), Math.max(...heights)] : [0, 1];
    const room = (high - low || 1) * 0.05;
    this.range = this.heights ?? [low - room, high + room];
    this.svg.replaceChildren(drawn("title", {}, this.title));
    this.axes();
    const box = { x: MARGIN.left - 5, y: MARGIN.top - 5 };
    box.width = this.width - MARGIN.right + 5 - box.x;
    box.height = HEIGHT - MARGIN.bottom + 5 - box.y;
    // an inner svg cuts off what a box leaves outside
    this.inner = drawn("svg", { ...box, viewBox: `${box.x} ${box.y} ${box.width} ${box.height}` });
    this.svg.append(this.inner);
    this.curves.filter((one) => one.shown).forEach((one) => this.curve(one));
    this.cursor();
  }
  axes() {
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const steps = Math.max(2, Math.floor(this.width / 110));
    for (const x of ticks(...this.window, steps)) {
      this.svg.append(drawn("line", { class: "grid", x1: this.px(x), x2: this.px(x), y1: MARGIN.top, y2: bottom }));
      this.svg.append(drawn("text", { x: this.px(x), y: bottom + 16, "text-anchor": "middle" }, tell(x)));
    }
    for (const mark of this.logarithmic ? powers(...this.range) : ticks(...this.range, 6)) {
      const y = this.py(this.logarithmic ? 10 ** mark : mark);
      this.svg.append(drawn("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }));
      const label = this.logarithmic ? tell(Number((10 ** mark).toPrecision(5))) : tell(mark);
      this.svg.append(drawn("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, label));
    }
    this.svg.append(drawn("rect", {
      class: "frame", x: MARGIN.left, y: MARGIN.top, width: right - MARGIN.left, height: bottom - MARGIN.top,
    }));
    this.svg.append(drawn("text", { x: (MARGIN.left + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "iteration"));
    const middle = (MARGIN.top + bottom) / 2;
    const turned = { transform: `rotate(-90 14 ${middle})`, x: 14, y: middle, "text-anchor": "middle" };
    this.svg.append(drawn("text", turned, this.unit));
  }
  curve(curve) {
    this.layer(curve, curve.points, curve.median ? "faint" : null);
    if (curve.median) this.layer(curve, pointsOf(curve.median), null);
  }
  layer(curve, points, extra) {
    const [low, high] = this.window;
    const inside = points.filter((point) => point.x >= low && point.x <= high);
    if (!inside.length) return;
    const element = this.mark(curve, inside.map((point) => ({ px: this.px(point.x), py: this.py(point.y) })));
    if (extra) element.classList.add(extra);
    this.inner.append(element);
  }
  mark(curve, places) {
    const spot = ({ px, py }) => `${px.toFixed(1)} ${py.toFixed(1)}`;
    const shapes = {
      line: ["curve", () => `M${places.map(spot).join("L")}`],
      dashed: ["curve dashed", () => `M${places.map(spot).join("L")}`],
      dotted: ["curve dotted", () => `M${places.map(spot).join("L")}`],
      point: ["filled", (p) => `M${spot(p)}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z`],
      square: ["filled", (p) => `M${spot(p)}m-4 -4h8v8h-8z`],
      diamond: ["filled", (p) => `M${spot(p)}m0 -5l5 5l-5 5l-5 -5z`],
      bound: ["hollow", (p) => `M${spot(p)}m0 -5l-4.5 8h9z`],
    };
    const [kind, path] = shapes[curve.shape];
    const single = ["line", "dashed", "dotted"].includes(curve.shape);
    if (single && places.length === 1) return this.mark({ ...curve, shape: "point" }, places);
    const element = drawn("path", { class: kind, d: single ? path() : places.map(path).join("") });
    element.style.setProperty("--c", curve.color);
    return element;
  }
}

function pointsOf(curve) {
  return curve.x.map((x, place) => ({ x, y: curve.y[place] }));
}

function limits(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [];
}

function ticks(low, high, number) {
  const rough = (high - low) / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function powers(low, high) {
  const first = Math.ceil(low);
  const last = Math.floor(high);
  if (last - first >= 2) {
    const step = Math.ceil((last - first) / 7);
    return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, k) => first + k * step);
  }
  const fine = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const digit of [1, 2, 5]) {
      const mark = power + Math.log10(digit);
      if (mark >= low && mark <= high) fine.push(mark);
    }
  }
  return fine.length >= 2 ? fine : [low + 0.1 * (high - low), high - 0.1 * (high - low)];
}

document.querySelectorAll("table").forEach(sortable);
document.querySelectorAll("figure.chart").forEach((figure) => new Chart(figure));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
