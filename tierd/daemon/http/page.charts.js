
"use strict";
// Charts over steps. A bin is a fixed range of steps, so that a bar keeps its place and value while newer ones come.
const CHART = { least: 256, gap: 16, height: 128, left: 56, right: 6, top: 8, bottom: 20 }; // CSS has `least` and `gap` too
const BINS = 60; // of a chart at most
const CHARTED = 4; // metrics of a run

function span(seconds) {
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [0.001, "ms"]].find(([size]) => seconds >= size) || [0.001, "ms"];
  return `${Number((seconds / unit).toPrecision(2))} ${name}`;
}

function plain(value, digits = 4) {
  return value && Math.abs(value) < 0.001 ? value.toExponential(1) : String(Number(value.toFixed(Math.min(6, digits))));
}

function measure(value) { return value && Math.abs(value) < 0.001 ? value.toExponential(3) : String(Number(value.toPrecision(4))); }

/** The next number of the form 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value * 0.999);
}

/** The next time whose half is short to write, too. */
function roundTime(seconds) {
  if (seconds <= 50) return seconds > 0 ? roundUp(seconds) : 1;
  return [60, 120, 300, 600, 1200, 3600, 7200, 18000, 43200, 86400].find((time) => time >= seconds) || 86400 * roundUp(seconds / 86400);
}

/** Bins for steps: each as wide as the usual distance between two saves, or a round number of these. */
function axisOf(steps) {
  const sorted = [...new Set(steps)].sort((a, b) => a - b);
  const gaps = sorted.slice(1).map((step, at) => step - sorted[at]).sort((a, b) => a - b);
  const gap = gaps.length ? gaps[Math.floor(gaps.length / 2)] : 1;
  const size = gap * roundUp(Math.max(1, (sorted[sorted.length - 1] - sorted[0]) / gap / BINS));
  const first = Math.floor(sorted[0] / size);
  return { size, first, count: Math.floor(sorted[sorted.length - 1] / size) - first + 1 };
}

/** One value for each bin that has any: the largest time, or the last value of a metric. */
function binned(points, axis, largest) {
  const bins = new Map();
  for (const [step, value] of points) {
    const bin = Math.floor(step / axis.size), before = bins.get(bin);
    bins.set(bin, before === undefined || !largest ? value : Math.max(before, value));
  }
  return [...bins].sort(([a], [b]) => a - b);
}

/** What can be drawn of a run: for each chart its key, title, form of numbers, and one series for each place or metric. */
function chartsOf(saves, checkpoints) {
  const series = (name, value) => ({ name, points: saves.map((save) => [save.step, value(save)]).filter(([, number]) => Number.isFinite(number)) });
  const tiers = status.tiers.map((tier) => tier.name); // in the same order, and so in the same colour, for each run
  const measured = new Map();
  for (const { step, metrics } of [...checkpoints, ...saves].sort((a, b) => a.attempt.localeCompare(b.attempt) || a.step - b.step)) {
    for (const [name, value] of Object.entries(metrics)) {
      if (Number.isFinite(value)) measured.set(name, [...(measured.get(name) || []), [step, value]]);
    }
  }
  return [
    { key: "blocked", title: "training blocked by a save", words: span, series: [series("blocked", (save) => save.blocked_s)] },
    { key: "durable", title: "until durable in the spool", words: span, series: [series("local", (save) => save.durable_s)] },
    { key: "tiers", title: "from the spool to a tier", words: span, series: tiers.map((tier) => series(tier, (save) => save.tier_s[tier])) },
    ...[...measured].sort().slice(0, CHARTED).map(([name, points]) => ({ key: `metric ${name}`, title: name, words: plain, series: [{ name, points }] })),
  ].map((chart) => ({ ...chart, series: chart.series.filter((one) => one.points.length) })).filter((chart) => chart.series.length);
}

/** Of several runs' charts, by key: the bins and the range of values, so that they can be compared; in `room` pixels. */
function scalesOf(charts, room) {
  const axis = axisOf(charts.flatMap((chart) => chart.series.flatMap((one) => one.points.map(([step]) => step))));
  const scales = new Map();
  for (const chart of charts) {
    const values = chart.series.flatMap((one) => one.points.map(([, value]) => value));
    const [low, high] = scales.get(chart.key) || [Infinity, -Infinity];
    scales.set(chart.key, [Math.min(low, ...values), Math.max(high, ...values)]);
  }
  const width = room / Math.max(1, Math.floor((room + CHART.gap) / (CHART.least + CHART.gap))) - CHART.gap;
  return { axis, scales, width: Math.max(CHART.least, width) };
}

/** From zero for times; a metric may be negative, or vary little. The top is a round number, so that it seldom changes. */
function rangeOf([low, high], isTime) {
  if (isTime) return [0, roundTime(high)];
  const unit = roundUp((high - low || Math.abs(high) || 1) / 4);
  const bottom = low >= 0 && low < (high - low) ? 0 : Math.floor(low / unit) * unit, top = Math.ceil(high / unit) * unit;
  return [bottom, top > bottom ? top : bottom + unit];
}

function drawChart(chart, { axis, scales, width }) {
  const { height, left, right, top, bottom } = CHART, isTime = chart.words === span;
  const [low, high] = rangeOf(scales.get(chart.key), isTime), digits = Math.max(0, 1 - Math.floor(Math.log10((high - low) / 2)));
  const wide = (width - left - right) / axis.count;
  const x = (bin) => left + (bin - axis.first) * wide, y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  const grid = [low, (low + high) / 2, high].map((value) => [
    make("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    make("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, chart.words(value, digits))]);
  const steps = make("text", { x: left, y: height - 5 }, `step ${axis.first * axis.size}`);
  const last = make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, String((axis.first + axis.count - 1) * axis.size));
  const drawn = chart.series.map((one, at) => {
    const bins = binned(one.points, axis, isTime), name = (bin, value) => `step ${bin * axis.size}: ${one.name} ${chart.words(value)}`;
    if (isTime && chart.series.length === 1) {
      return bins.map(([bin, value]) => make("rect", { class: "bar", x: x(bin) + wide * 0.1, y: y(value), width: Math.max(1, wide * 0.8), height: y(0) - y(value) },
        make("title", {}, name(bin, value))));
    }
    const middle = (bin) => x(bin) + wide / 2;
    const path = bins.map(([bin, value], number) => `${number ? "L" : "M"} ${middle(bin)} ${y(value)}`).join(" ");
    return [make("path", { class: `series s${at % 4}`, d: path }), ...bins.map(([bin, value]) =>
      make("circle", { class: `point s${at % 4}`, cx: middle(bin), cy: y(value), r: 2.5 }, make("title", {}, name(bin, value))))];
  });
  const legend = chart.series.map((one, at) => {
    const value = chart.words(one.points[one.points.length - 1][1]);
    return make("span", { class: chart.series.length > 1 ? `key s${at % 4}` : "soft" }, chart.series.length > 1 ? `${one.name} ${value}` : `last ${value}`);
  });
  return make("figure", {}, make("figcaption", {}, `${chart.title} `, legend),
    make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title}, by step` }, grid, drawn.flat(2), steps, last));
}
