// The page: asks for the token once, then reads the admin port again and again and draws what it says.

import { CaptureControl, describe, installActions } from "./actions.js";
import { read, token } from "./api.js";
import { byId, h, patch } from "./dom.js";
import * as panels from "./panels.js";
import { Cursor, Plot, niceTicks, swatch } from "./plot.js";
import * as series from "./series.js";
import { clock, fixed, milliseconds, percent, rate, short, shortTime, span } from "./words.js";

const EVERY_MS = 2000;
const SLOW_EVERY = 5; // drafts and stores are read once in so many rounds
const STALE_AFTER_S = 7;
const MAX_LINES = 7;
const LEAST_LATENCY_S = 0.02; // the top of the axis where everything is faster

const state = {
  past: new series.Past(),
  status: null,
  drafts: null,
  routing: null,
  usage: null,
  windowS: 900,
  view: "domain",
  unit: "tokens",
  latency: "first",
  hidden: new Set(),
  lastOk: 0, // this machine's clock, ms
  shownAt: 0, // when the tab came to the front; nothing is read behind it
  why: "",
};
let rounds = 0;
let timer = 0;
let isReading = false;

const cursor = new Cursor();
const reading = byId("plot-reading");
const lengthPlot = new Plot(byId("plot-al"), cursor, { label: "Acceptance over time", tall: true, reading });
const throughputPlot = new Plot(byId("plot-throughput"), cursor, { label: "Throughput over time", tall: false, reading });
const latencyPlot = new Plot(byId("plot-latency"), cursor, { label: "Latency over time", tall: false, reading });
const capture = new CaptureControl(refresh);

// ---- reading

async function refresh() {
  if (isReading || !token.get()) return;
  isReading = true;
  clearTimeout(timer);
  try {
    if (await readAll()) {
      state.lastOk = Date.now();
      state.why = "";
      draw();
    }
  } catch (error) {
    if (error.status === 401) {
      signOut("The token is not accepted.");
      return;
    }
    state.why = describe(error);
  } finally {
    isReading = false;
  }
  freshness();
  if (!document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

// Returns false where what was read belongs to nobody any more: its reader has signed out meanwhile.
async function readAll() {
  const { past } = state;
  const isSlow = rounds % SLOW_EVERY === 0;
  const [status, history, routing, drafts, usage] = await Promise.all([
    read("/admin/status"),
    read(`/admin/history?after=${past.lastNumber}`),
    read("/admin/routing"),
    isSlow ? read("/admin/drafts") : state.drafts,
    isSlow ? read("/admin/state/usage").catch(() => state.usage) : state.usage,
  ]);
  if (!past.take(history)) past.take(await read("/admin/history?after=0"));
  const isNew = status.active_version !== state.status?.active_version || status.swaps.length !== state.status?.swaps.length;
  const published = status.learner.report?.num_published !== state.status?.learner.report?.num_published;
  const newest = !isSlow && (isNew || published) ? await read("/admin/drafts") : drafts;
  if (past !== state.past) return false;
  Object.assign(state, { status, routing, usage, drafts: newest });
  rounds += 1;
  return true;
}

function freshness() {
  if (document.hidden) return;
  if (!state.lastOk) {
    patch(byId("fresh"), state.why);
    return;
  }
  const ageS = (Date.now() - state.lastOk) / 1000;
  const isStale = Boolean(state.why) || Date.now() - Math.max(state.lastOk, state.shownAt) > 1000 * STALE_AFTER_S;
  document.body.classList.toggle("is-stale", isStale);
  byId("stale").hidden = !isStale;
  patch(byId("fresh"), isStale ? "" : "live");
  const why = state.why || "waiting for the gateway";
  if (isStale) patch(byId("stale"), `No data since ${clock(state.lastOk / 1000)}, for ${span(ageS)}: ${why}. What you see is as of then; the page goes on trying.`);
}

// ---- drawing

function draw() {
  panels.header(state);
  panels.tiles(state);
  drawPlots();
  panels.drafts(state);
  panels.decisions(state);
  panels.engines(state);
  panels.routing(state);
  panels.learner(state);
  panels.tenants(state);
  capture.update(state.status.capture.rate);
}

function drawPlots() {
  const { past, status, windowS } = state;
  const bins = past.bins(windowS);
  const to = past.nowS;
  const from = Math.max(to - windowS, Math.min((bins[0]?.at ?? to) - 2, to - 60));
  const time = { from, to, bands: series.bands(past.swaps, status.active_version, Math.max(from, bins[0]?.at ?? from), to) };
  const marks = timelineMarks(from);
  const lines = state.view === "domain" ? domainLines(bins) : positionLines(bins);
  legend(lines);
  const shown = lines.filter((line) => !state.hidden.has(line.name));
  lengthPlot.draw({ ...time, marks, lines: shown, ...(state.view === "domain" ? lengthScale(shown) : shareScale()) });
  const below = { ...time, marks: marks.filter((mark) => mark.lane === 0), area: true };
  const rates = state.unit === "tokens" ? tokenLines(bins) : requestLines(bins);
  throughputPlot.draw({ ...below, lines: rates, ...scaleFromZero(rates, 1), tickFormat: short, format: rate, empty: "No sample yet." });
  const times = state.latency === "first" ? firstByteLines(bins) : gapLines(bins);
  const empty = state.latency === "first" ? "No streamed answer began in this window." : "No answer had two chunks in this window.";
  latencyPlot.draw({ ...below, lines: times, ...scaleFromZero(times, LEAST_LATENCY_S), tickFormat: shortTime, format: milliseconds, empty });
}

function scaleFromZero(lines, least) {
  const ticks = niceTicks(0, Math.max(least, ...lines.flatMap((line) => line.points.map((point) => point[1]))), 3);
  return { min: 0, max: ticks.at(-1), ticks };
}

function tokenLines(bins) {
  return [{ name: "tok/s", style: "throughput", points: series.line(bins, (samples) => series.perSecond(samples, series.tokens)) }];
}

function requestLines(bins) {
  const of = (outcome) => series.line(bins, (samples) => series.perSecond(samples, (some) => series.ended(some, outcome)));
  const lines = [{ name: "served/s", style: "throughput", points: of("served") }];
  for (const [outcome, style] of [["failed", "series-1"], ["refused", "series-3"]]) {
    if (bins.some((bin) => series.ended(bin.samples, outcome))) lines.push({ name: `${outcome}/s`, style, points: of(outcome) });
  }
  return lines;
}

const firstByteLines = (bins) => [
  { name: "p50", style: "throughput", points: series.line(bins, (samples) => series.firstByte(samples, 0.5)) },
  { name: "p99", style: "series-1", points: series.line(bins, (samples) => series.firstByte(samples, 0.99)) },
];

const gapLines = (bins) => [{ name: "mean", style: "throughput", points: series.line(bins, series.meanGap) }];

function domainLines(bins) {
  const recent = bins.flatMap((bin) => bin.samples);
  const names = series.domains(recent);
  const of = (name) => series.line(bins, (samples) => series.acceptanceLength(series.spans(samples).filter((one) => one.domain === name)));
  const all = { name: "all", style: "main", points: series.line(bins, (samples) => series.acceptanceLength(series.spans(samples))) };
  if (names.length < 2) return [all];
  // By name, so that a domain keeps its colour when traffic shifts.
  const drawn = names.slice(0, MAX_LINES).sort();
  return [all, ...drawn.map((name, index) => ({ name, style: `series-${index}`, points: of(name) }))];
}

function positionLines(bins) {
  const depth = Math.max(0, ...bins.map((bin) => series.positionRates(series.spans(bin.samples)).length));
  return Array.from({ length: Math.min(depth, MAX_LINES) }, (_, position) => ({
    name: `p${position + 1}`,
    style: `position-${position}`,
    points: series.line(bins, (samples) => series.positionRates(series.spans(samples))[position] ?? null),
  }));
}

function lengthScale(lines) {
  const values = lines.flatMap((line) => line.points.map((point) => point[1]));
  const ticks = niceTicks(1, Math.max(1.5, ...values), 4);
  return { min: 1, max: ticks.at(-1), ticks, tickFormat: (value) => fixed(value, ticks[1] - ticks[0] < 0.5 ? 2 : 1), format: fixed, empty: "Nothing was verified in this window. Send a request, and its acceptance length appears here." };
}

const shareScale = () => ({ min: 0, max: 1, ticks: [0, 0.25, 0.5, 0.75, 1], tickFormat: percent, format: percent, empty: "Nothing was verified in this window." });

function timelineMarks(from) {
  const { past, drafts } = state;
  const swaps = past.swaps.map((swap) => ({ at: series.swapEnd(swap), lane: 0, kind: panels.swapKind(swap), text: `${panels.swapTitle(swap)}${swap.reason ? `: ${swap.reason}` : ""}` }));
  const gates = series.gateDecisions(past.gates, drafts?.drafts ?? []).map((gate) => ({
    at: gate.at,
    lane: 1,
    kind: gate.report.accepted ? "accepted" : "rejected",
    text: `${panels.gateTitle(gate)}: ${gate.report.reason}`,
  }));
  return [...swaps, ...gates].filter((mark) => mark.kind && mark.at >= from);
}

function legend(lines) {
  const entries = lines.map((line) =>
    h("button", { type: "button", class: "legend-entry", "data-key": line.name, "data-line": line.name, "aria-pressed": String(!state.hidden.has(line.name)) }, swatch(line.style), line.name));
  patch(byId("legend"), entries.length > 1 ? entries : null);
}

// ---- choices

function choose(groupId, name, value) {
  for (const button of byId(groupId).children) button.setAttribute("aria-pressed", String(button.dataset[name] === String(value)));
  byId("timeline-title").textContent = state.view === "domain" ? "Acceptance length" : "Acceptance rate";
  byId("latency-note").textContent = state.latency === "first" ? "from a request's arrival, p50 and p99 of streamed answers" : "mean over all answers, as the engines count it";
}

function installChoices() {
  byId("windows").addEventListener("click", ({ target }) => {
    if (!target.dataset.window) return;
    state.windowS = Number(target.dataset.window);
    choose("windows", "window", state.windowS);
    if (state.status) draw();
  });
  byId("views").addEventListener("click", ({ target }) => {
    if (!target.dataset.view) return;
    state.view = target.dataset.view;
    choose("views", "view", state.view);
    if (state.status) draw();
  });
  byId("units").addEventListener("click", ({ target }) => {
    if (!target.dataset.unit) return;
    state.unit = target.dataset.unit;
    choose("units", "unit", state.unit);
    if (state.status) drawPlots();
  });
  byId("latencies").addEventListener("click", ({ target }) => {
    if (!target.dataset.latency) return;
    state.latency = target.dataset.latency;
    choose("latencies", "latency", state.latency);
    if (state.status) drawPlots();
  });
  byId("legend").addEventListener("click", ({ target }) => {
    const name = target.closest("[data-line]")?.dataset.line;
    if (name === undefined) return;
    if (!state.hidden.delete(name)) state.hidden.add(name);
    drawPlots();
  });
  choose("windows", "window", state.windowS);
  choose("views", "view", state.view);
  choose("units", "unit", state.unit);
  choose("latencies", "latency", state.latency);
}

// ---- the token

function signOut(why = "") {
  clearTimeout(timer);
  token.forget();
  Object.assign(state, { past: new series.Past(), status: null, drafts: null, routing: null, usage: null, lastOk: 0, why: "" });
  rounds = 0;
  byId("app").hidden = true;
  byId("sign-in").hidden = false;
  patch(byId("token-error"), why);
  byId("token").focus();
}

async function signIn(event) {
  event.preventDefault();
  const field = byId("token");
  token.set(field.value.trim());
  patch(byId("token-error"));
  try {
    await read("/admin/status");
  } catch (error) {
    token.forget();
    patch(byId("token-error"), error.status === 401 ? "The token is not accepted." : describe(error));
    return;
  }
  field.value = "";
  open();
}

function open() {
  byId("sign-in").hidden = true;
  byId("app").hidden = false;
  refresh();
}

byId("token-form").addEventListener("submit", signIn);
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-action='sign-out']")) signOut();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  state.shownAt = Date.now();
  refresh();
});
setInterval(freshness, 1000);
installChoices();
installActions(state, () => {
  rounds = 0; // what an action changes is in the slow part
  refresh();
});
if (token.get()) open();
else signOut();
