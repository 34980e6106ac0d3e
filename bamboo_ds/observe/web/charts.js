// ---- charts ----

// Steps between ticks: the smallest of them that leaves at most `most` of them in `span`.
const STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000,
];
const stepOfTime = (span, most) => STEPS_S.find((each) => span / each <= most) ?? 31536000;

// Where the axis has labels, and how many decimals they need.
function ticks(low, high, most) {
  const rough = (high - low) / most,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5].find((each) => each * power >= rough * 0.999) ?? 10);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return [found, Math.max(0, (step / power === 2.5 ? 1 : 0) - Math.floor(Math.log10(step) + 1e-9))];
}

function timeAxis(into, begin, end, x, y) {
  const step = stepOfTime(end - begin, 6),
    zone = new Date(1000 * begin).getTimezoneOffset() * 60;
  for (let at = Math.ceil((begin - zone) / step) * step + zone; at <= end; at += step) {
    const label =
      step >= 86400
        ? new Date(1000 * at).toLocaleDateString("en-GB", { day: "numeric", month: "short" })
        : clock(at).slice(0, step < 60 ? 8 : 5);
    const anchor = x(at) > x(end) - 18 ? "end" : "middle";
    into.append(svg("text", { x: anchor === "end" ? x(end) : x(at), y, "text-anchor": anchor }, label));
  }
}

const GUTTER = 52; // for the labels of the values

class Chart {
  constructor(figure, title, unit, fromZero) {
    Object.assign(this, { title, unit, fromZero, data: null, others: [], pointed: null });
    this.caption = el("span", {}, title);
    this.reading = el("b");
    this.picture = svg("svg", { role: "img", tabindex: "0" });
    figure.append(el("figcaption", {}, this.caption, this.reading), this.picture);
    this.picture.addEventListener("pointermove", (event) => this.point(this.nearest(event.offsetX)));
    this.picture.addEventListener("pointerleave", () => this.point(null));
    this.picture.addEventListener("blur", () => this.point(null));
    this.picture.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !this.data?.time.length) return;
      event.preventDefault();
      const last = this.data.time.length - 1;
      this.point(Math.min(last, Math.max(0, (this.pointed ?? last + 1) + by)));
    });
  }

  nearest(offset) {
    if (!this.data?.time.length || !this.x) return null;
    let best = 0;
    for (let n = 1; n < this.data.time.length; n++)
      if (Math.abs(this.x(this.data.time[n]) - offset) < Math.abs(this.x(this.data.time[best]) - offset)) best = n;
    return best;
  }

  point(index) {
    for (const chart of [this, ...this.others]) {
      chart.pointed = index;
      chart.read();
    }
  }

  read() {
    if (this.data === null) return;
    const { data, pointed } = this,
      last = data.time.length - 1,
      at = pointed ?? last;
    this.cross?.remove();
    if (last < 0 || at > last) return say(this.reading, "");
    const value = data.value[at],
      steps = data.stride > 1 ? `${data.stride} steps up to ` : "step ";
    const slowest = data.high && data.stride > 1 ? `, slowest ${this.unit(data.high[at])}` : "";
    say(
      this.reading,
      `${value === null ? "not computed" : this.unit(value)}${slowest} · ${steps}${number(data.step[at])} · ${clock(data.time[at])}`,
    );
    if (pointed === null || !this.x) return;
    this.cross = svg("g");
    this.cross.append(
      svg("line", { class: "cross", x1: this.x(data.time[at]), x2: this.x(data.time[at]), y1: 4, y2: this.bottom }),
    );
    if (value !== null)
      this.cross.append(svg("circle", { class: "dot", r: 3.5, cx: this.x(data.time[at]), cy: this.y(value) }));
    this.picture.append(this.cross);
  }

  draw(data, strikes, second) {
    const width = this.picture.clientWidth,
      height = this.picture.clientHeight;
    const now = JSON.stringify([data, strikes, width]);
    if (this.drawn === now || !width) return;
    this.drawn = now;
    this.data = data;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.picture.replaceChildren();
    this.cross = null;
    const values = data.value.filter((value) => value !== null).sort((a, b) => a - b);
    if (!values.length) {
      this.x = null;
      this.picture.append(svg("text", { x: 0, y: 30 }, data.time.length ? "not computed" : "no step yet"));
      return say(this.reading, "");
    }
    const bottom = (this.bottom = height - 20),
      [begin, end] = [data.time[0], Math.max(data.time.at(-1), data.time[0] + 1)];
    // A few long iterations (the first one, interrupted ones) must not make all others a flat line.
    const usual = values[Math.floor(0.95 * (values.length - 1))],
      cut = this.fromZero && values.at(-1) > 3 * usual;
    let high = cut ? 2 * usual : values.at(-1),
      low = this.fromZero ? 0 : values[0];
    if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
    const pad = 0.06 * (high - low);
    [low, high] = [this.fromZero ? 0 : low - pad, high + pad];
    const x = (this.x = (time) => GUTTER + ((time - begin) / (end - begin)) * (width - GUTTER - 8));
    const y = (this.y = (value) => Math.max(3, bottom - ((value - low) / (high - low)) * (bottom - 8)));
    const [marks, digits] = ticks(low, high, 4);
    for (const each of marks) {
      this.picture.append(svg("line", { class: "rule", x1: GUTTER, x2: width, y1: y(each), y2: y(each) }));
      this.picture.append(svg("text", { x: GUTTER - 6, y: y(each) + 4, "text-anchor": "end" }, number(each, digits)));
    }
    timeAxis(this.picture, begin, end, x, height - 4);
    for (const time of strikes.filter((each) => each >= begin && each <= end)) {
      this.picture.append(svg("line", { class: "strike", x1: x(time), x2: x(time), y1: 12, y2: bottom }));
      this.picture.append(svg("text", { x: x(time), y: 11, "text-anchor": "middle", "aria-hidden": "true" }, "×"));
    }
    if (data.high && data.stride > 1)
      this.picture.append(svg("path", { class: "high", d: this.path(data.time, data.high) }));
    this.picture.append(svg("path", { class: second ? "curve second" : "curve", d: this.path(data.time, data.value) }));
    const newest = data.value.findLast((value) => value !== null);
    this.picture.setAttribute(
      "aria-label",
      `${this.title} from step ${data.step[0]} to ${data.step.at(-1)}: least ${this.unit(values[0])}, most ${this.unit(values.at(-1))}, newest ${this.unit(newest)}; ${counted(strikes.length, "loss", "losses")} marked. Arrow keys read single points.`,
    );
    say(this.caption, cut ? `${this.title}; up to ${this.unit(values.at(-1))}, beyond the top` : this.title);
    this.read();
  }

  path(times, values) {
    let drawn = "",
      pen = "M";
    for (let n = 0; n < times.length; n++) {
      if (values[n] === null) pen = "M";
      else {
        drawn += `${pen}${this.x(times[n]).toFixed(1)} ${this.y(values[n]).toFixed(1)}`;
        pen = "L";
      }
    }
    return drawn;
  }
}

const charts = {
  pace: new Chart($("chart-pace"), "Seconds per iteration", duration, true),
  loss: new Chart($("chart-loss"), "Loss", (value) => number(value, 4), false),
  whole: true,
};
charts.pace.others = [charts.loss];
charts.loss.others = [charts.pace];

for (const [id, whole] of [
  ["whole", true],
  ["newest", false],
]) {
  $(id).addEventListener("click", () => {
    charts.whole = whole;
    $("whole").setAttribute("aria-pressed", String(whole));
    $("newest").setAttribute("aria-pressed", String(!whole));
    charts.pace.point(null);
    redraw();
  });
}

function drawCharts() {
  const { time, step, seconds, slowest, loss, stride } = charts.whole ? view.history : view.recent;
  const strikes = view.losses.map((each) => each.time);
  charts.pace.draw({ time, step, stride, value: seconds, high: slowest }, strikes, false);
  charts.loss.draw({ time, step, stride, value: loss, high: null }, strikes, true);
}
