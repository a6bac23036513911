// What each panel shows, as functions from the state to elements. `main` says when.

import { byId, h, patch, svg } from "./dom.js";
import { sparkline } from "./plot.js";
import * as series from "./series.js";
import { DETAILS, EMPTY, PATHS, REASONS, clock, count, fixed, milliseconds, moment, percent, plural, rate, signed, span } from "./words.js";

const NOW_S = 10; // over which a rate counts as that of now
const SHOWN_DECISIONS = 40;
const SHOWN_ROUTES = 12;
const SHOWN_DRAFTS = 40;
const SHOWN_TENANTS = 40;

const pill = (text, kind) => h("span", { class: `pill ${kind}` }, text);
const button = (text, data, more = {}) =>
  h("button", { type: "button", ...Object.fromEntries(Object.entries(data).map(([name, value]) => [`data-${name}`, value])), ...more }, text);
const bar = (share, label) =>
  h("meter", { min: 0, max: 1, value: Math.min(Math.max(share, 0), 1).toFixed(3), "aria-label": `${label}: ${percent(share)}` });

function table(columns, rows, nothing) {
  if (!rows.length) return h("p", { class: "empty-text" }, nothing);
  const kind = (column) => [column.number ? "number" : "", column.spare ? "spare" : ""].join(" ").trim() || null;
  const head = h("tr", {}, columns.map((column) => h("th", { scope: "col", class: kind(column) }, column.title)));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, rows));
}

const cell = (content, kind = "") => h("td", { class: kind || null }, content);

export function header(state) {
  const { status } = state;
  const health = byId("health");
  health.className = `pill ${status.ready ? "good" : "bad"}`;
  patch(health, status.ready ? "Serving" : "Not ready");
  patch(byId("uptime"), status.ready ? `up ${span(status.uptime_s)}` : status.reason);
}

// ---- tiles

export function tiles(state) {
  const { past, status } = state;
  const now = past.recent(NOW_S);
  const recent = past.recent(state.windowS);
  const bins = past.bins(state.windowS);
  const { traffic } = status;
  const failed = series.ended(recent, "failed");
  const refused = series.ended(recent, "refused");
  patch(
    byId("tiles"),
    tile("Tokens per second", rate(series.perSecond(now, series.tokens)), plural(traffic.num_in_flight, "request") + " in flight",
      sparkline(series.line(bins, (samples) => series.perSecond(samples, series.tokens)), "tokens per second over the window")),
    tile("Requests per second", rate(series.perSecond(past.recent(3 * NOW_S), (samples) => series.ended(samples, "served"))),
      [h("span", { class: failed ? "bad-text" : null }, `${count(failed)} failed`), ` · ${count(refused)} refused`],
      sparkline(series.line(bins, (samples) => series.perSecond(samples, (some) => series.ended(some, "served"))), "requests per second over the window")),
    lengthTile(state, recent, bins),
    positionTile(status),
    draftTile(state),
    enginesTile(state),
  );
}

function tile(title, value, note, extra) {
  return h("div", { class: "tile card" }, h("h2", {}, title), h("div", { class: "tile-row" }, h("strong", {}, value), extra), h("p", { class: "muted" }, note));
}

function lengthTile(state, recent, bins) {
  const { status, past } = state;
  const { acceptance } = status;
  const spark = sparkline(series.line(bins, (samples) => series.acceptanceLength(series.spans(samples))), "acceptance length over the window");
  if (!acceptance) return tile("Acceptance length", EMPTY, "nothing verified yet", spark);
  const previous = series.acceptanceLength(series.spans(recent).filter((one) => one.draft_version === status.previous_version), 50);
  const last = past.samples.findLast((sample) => sample.domains?.length);
  const isQuiet = !last || past.nowS - last.at_s > NOW_S;
  const change = acceptance.acceptance_length - (previous ?? 0);
  const note = isQuiet
    ? `nothing verified ${last ? `since ${clock(last.at_s)}` : "lately"}`
    : previous === null
      ? `draft v${acceptance.draft_version}, ${count(acceptance.num_verify_steps)} verify steps`
      : [h("span", { class: change < 0 ? "bad-text" : "good-text" }, signed(change)), ` against v${status.previous_version}`];
  return tile("Acceptance length", fixed(acceptance.acceptance_length), note, spark);
}

function positionTile(status) {
  const shares = status.acceptance?.per_position ?? [];
  const rows = shares.map((share, index) =>
    h("li", {}, h("span", { class: "muted" }, `p${index + 1}`), bar(share, `accepted at position ${index + 1}`), h("span", { class: "number" }, percent(share))));
  const depths = [...new Set(status.engines.map((engine) => engine.depth))].sort();
  const content = rows.length ? h("ol", { class: "positions" }, rows) : h("p", { class: "empty-text" }, "nothing verified yet");
  return h("div", { class: "tile card" }, h("h2", {}, "Accepted by position", h("span", { class: "muted" }, ` K ${depths.join("/") || EMPTY}`)), content);
}

function draftTile(state) {
  const { status, past } = state;
  const committed = past.swaps.findLast((swap) => swap.outcome === "committed" && swap.version === status.active_version);
  const notes = [committed ? `since ${moment(series.swapEnd(committed), past.nowS)}` : "since the gateway started"];
  const versions = new Set(status.engines.filter((engine) => engine.ready).map((engine) => engine.draft_version));
  if (versions.size > 1) notes.push(h("span", { class: "bad-text" }, ` · engines serve ${[...versions].map((one) => `v${one}`).join(" and ")}`));
  return tile("Active draft", status.active_version === null ? EMPTY : `v${status.active_version}`, notes, pill(`canary ${status.canary.state.replace("_", " ")}`, canaryKind(status.canary)));
}

const canaryKind = (canary) => ({ watching: "busy", passed: "good", rolled_back: "bad" })[canary.state] ?? "";

function enginesTile(state) {
  const { engines } = state.status;
  const loads = Object.values(state.past.samples.at(-1)?.engines ?? {});
  const running = series.sum(loads, (load) => load.num_running);
  const waiting = series.sum(loads, (load) => load.num_waiting);
  const ready = engines.filter((engine) => engine.ready && !engine.is_draining).length;
  const note = loads.length ? `${count(running)} running · ${count(waiting)} waiting` : "their metrics cannot be read";
  return tile("Engines ready", `${ready} of ${engines.length}`, note, null);
}

// ---- drafts and decisions

export function drafts(state) {
  const { drafts: list, status, past } = state;
  canary(status.canary);
  const target = status.previous_version ?? status.floor_version;
  const canGoBack = target !== null && target !== status.active_version;
  patch(byId("roll-back"), button(canGoBack ? `Roll back to v${target}` : "Roll back", { action: "roll-back" }, { disabled: !canGoBack }));
  if (!list) return;
  const live = series.spans(past.recent(state.windowS));
  const rows = [...list.drafts].reverse().slice(0, SHOWN_DRAFTS).map((draft) => draftRow(draft, live, past.nowS));
  const columns = [{ title: "Draft" }, { title: "Made", spare: true }, { title: "Gate: gain in AL" }, { title: "Live AL", number: true }, { title: "" }];
  patch(byId("drafts"), table(columns, rows, "There is no draft in the store."));
}

function canary(view) {
  const facts = view.acceptance_length === null || view.acceptance_length === undefined ? "" : ` AL ${fixed(view.acceptance_length)} against ${fixed(view.baseline_acceptance_length)}.`;
  const isShown = view.state !== "idle";
  patch(byId("canary"), isShown ? h("p", { class: "canary" }, pill(`canary ${view.state.replace("_", " ")}`, canaryKind(view)), ` v${view.version}: ${view.reason}.${view.reason.includes("AL ") ? "" : facts}`) : null);
}

function draftRow(draft, live, nowS) {
  const marks = draft.marks.map((mark) => pill(mark.replace("_", " "), { active: "good", rolled_back: "bad", unreadable: "bad" }[mark] ?? ""));
  const { manifest } = draft;
  const al = series.acceptanceLength(live.filter((one) => one.draft_version === draft.version), 20);
  const isActive = draft.marks.includes("active");
  return h(
    "tr",
    { "data-key": draft.version, class: isActive ? "current" : null },
    cell([h("b", {}, `v${draft.version}`), " ", marks, draft.reason ? h("div", { class: "muted small" }, draft.reason) : null]),
    cell(manifest ? [moment(manifest.created_at_s, nowS), h("div", { class: "muted small" }, manifest.origin)] : EMPTY, "spare"),
    cell(gain(manifest?.gate)),
    cell(fixed(al), "number"),
    cell(isActive ? null : button("Activate", { action: "activate", version: draft.version }, { "aria-label": `Activate draft ${draft.version}` }), "action"),
  );
}

function gain(gate) {
  if (!gate) return h("span", { class: "muted" }, "not asked");
  const mean = gate.candidate_al - gate.incumbent_al;
  const interval = `${signed(gate.gain_low)} to ${signed(gate.gain_high)}`;
  return [
    h("span", { class: gate.accepted ? "good-text" : "bad-text" }, `${gate.accepted ? "✓" : "✕"} ${signed(mean)}`),
    h("div", { class: "muted small", title: `interval over ${gate.num_requests} requests` }, interval),
  ];
}

export function decisions(state) {
  const { past } = state;
  const gates = series.gateDecisions(past.gates, state.drafts?.drafts ?? []);
  const entries = [
    ...past.swaps.map((swap) => ({ at: series.swapEnd(swap), element: swapEntry })).map((entry, index) => ({ ...entry, about: past.swaps[index] })),
    ...gates.map((gate) => ({ at: gate.at, element: gateEntry, about: gate })),
  ].sort((left, right) => right.at - left.at);
  const items = entries.slice(0, SHOWN_DECISIONS).map(({ at, element, about }) => element(about, moment(at, past.nowS)));
  patch(byId("decisions"), items.length ? h("ol", { class: "entries" }, items) : h("p", { class: "empty-text" }, "None since the gateway started."));
  const counts = state.status.learner.report?.num_gate_decisions;
  const decided = counts && `gate: ${count(counts.accepted ?? 0)} accepted, ${count(counts.rejected ?? 0)} rejected`;
  patch(byId("gate-counts"), [decided, calibrated(past.calibration)].filter(Boolean).join("; "));
}

// How far the gate's simulated AL can be trusted.
function calibrated({ pairs, bias, correlation }) {
  if (!pairs.length) return "";
  const known = correlation === null || correlation === undefined ? "" : `, correlation ${correlation.toFixed(2)}`;
  return `served less simulated AL ${signed(bias)}${known} (${count(pairs.length)} drafts)`;
}

export function swapKind(swap) {
  if (swap.outcome !== "committed") return swap.outcome === "unchanged" ? null : "refused";
  return swap.trigger === "activate" ? "activate" : "rollback";
}

export function swapTitle(swap) {
  const by = { activate: "activated", rollback: "rolled back to, by an operator", canary: "rolled back to, by the canary", floor: "activated by the floor watch" }[swap.trigger] ?? swap.trigger;
  if (swap.outcome === "committed") return `v${swap.version} ${by}${swap.forced && swap.trigger === "activate" ? ", forced" : ""}`;
  return `v${swap.version} ${{ refused: "refused", reverted: "taken back after a failed commit", unchanged: "was active already" }[swap.outcome] ?? swap.outcome}`;
}

function swapEntry(swap, when) {
  const stalls = Object.values(swap.commits ?? {}).map((commit) => commit.apply_ms);
  const facts = stalls.length ? [`took ${span(swap.duration_ms / 1000)}`, `stall ${Math.max(...stalls).toFixed(0)} ms`] : [];
  return entry(swapKind(swap) ?? "unchanged", swapTitle(swap), when, [swap.reason, facts.join(", ")]);
}

export const gateTitle = (gate) => (gate.report.accepted ? `Gate accepted v${gate.version}` : "Gate rejected a candidate");

function gateEntry(gate, when) {
  const { report } = gate;
  const numbers = `simulated AL ${fixed(report.incumbent_al)} → ${fixed(report.candidate_al)}, gain ${signed(report.gain_low)} to ${signed(report.gain_high)} over ${plural(report.num_requests, "request")}`;
  const evidence = report.evidence_needed ? `evidence ${fixed(report.evidence)} of ${count(Math.ceil(report.evidence_needed))} needed, ${plural(report.num_counted, "request")} counted` : "";
  const worst = report.worst_anchor_domain ? `worst domain ${report.worst_anchor_domain} ${signed(report.worst_anchor_change)}` : "";
  return entry(report.accepted ? "accepted" : "rejected", gateTitle(gate), when, [report.reason, numbers, evidence, worst]);
}

const GLYPHS = { activate: "▲", rollback: "▼", refused: "✕", unchanged: "·", accepted: "●", rejected: "◇" };

function entry(kind, title, when, lines) {
  const details = lines.filter((line) => line).map((line) => h("div", { class: "muted small" }, line));
  return h("li", {}, h("span", { class: `glyph ${kind}`, "aria-hidden": "true" }, GLYPHS[kind]), h("div", {}, h("div", { class: "entry-head" }, h("b", {}, title), h("time", { class: "muted" }, when)), details));
}

// ---- engines

export function engines(state) {
  const { status, past } = state;
  const loads = past.samples.at(-1)?.engines ?? {};
  const columns = [
    { title: "Engine" }, { title: "State" }, { title: "Running", number: true }, { title: "Lately", spare: true }, { title: "KV use" }, { title: "" },
  ];
  const bins = past.bins(state.windowS);
  const rows = status.engines.map((engine) => engineRow(engine, loads[engine.id], busy(bins, engine.id)));
  patch(byId("engines"), table(columns, rows, "There is no engine."));
  const kinds = new Map();
  for (const engine of status.engines) kinds.set(engine.kind, (kinds.get(engine.kind) ?? 0) + 1);
  patch(byId("engines-note"), [...kinds].map(([kind, number]) => `${number} ${kind}`).join(", "));
}

function engineState(engine) {
  if (!engine.ready) return pill("down", "bad");
  if (engine.is_draining) return pill(engine.num_in_flight ? `draining, ${engine.num_in_flight} left` : "draining, idle", "busy");
  return pill("ready", "good");
}

// Requests running on one engine over time.
function busy(bins, id) {
  return bins.map((bin) => [bin.at, bin.samples.at(-1).engines?.[id]?.num_running ?? null]).filter((point) => point[1] !== null);
}

function depth(engine) {
  if (!engine.num_speculative_tokens) return "no draft";
  return engine.depth === engine.num_speculative_tokens ? `K\u00a0${engine.depth}` : `K\u00a0${engine.depth} of ${engine.num_speculative_tokens}`;
}

function engineRow(engine, load, lately) {
  const wish = engine.is_draining ? "undrain" : "drain";
  const about = [engine.kind, engine.draft_version === null ? null : `draft\u00a0v${engine.draft_version}`, depth(engine)];
  return h(
    "tr",
    { "data-key": engine.id },
    cell([h("b", { class: "clip" }, engine.id), h("div", { class: "muted small" }, about.filter((part) => part).join(" · "))]),
    cell([engineState(engine), engine.reason ? h("div", { class: "muted small" }, engine.reason) : null]),
    cell(load ? [count(load.num_running), h("div", { class: "muted small" }, `${count(load.num_waiting)} waiting`)] : EMPTY, "number"),
    cell(sparkline(lately, `requests running on ${engine.id} over the window`), "spare"),
    cell(load ? h("span", { class: "meter-row" }, bar(load.kv_use, "KV use"), h("span", { class: "number" }, percent(load.kv_use))) : EMPTY),
    cell(button(wish === "drain" ? "Drain" : "Undrain", { action: wish, engine: engine.id }, { "aria-label": `${wish} ${engine.id}` }), "action"),
  );
}

// ---- KV paths

export function routing(state) {
  const rows = series.paths(state.past.recent(state.windowS));
  const total = series.sum(rows, (row) => row.total);
  patch(byId("paths"), total ? [stack(rows, total), pathList(rows, total)] : h("p", { class: "empty-text" }, "No request was routed in this window."));
  const view = state.routing;
  if (!view) return;
  const speeds = (perToken, mark) => Object.entries(perToken).map(([kind, seconds]) => `${kind} prefills ${rate(1 / seconds)} tok/s${mark}`);
  const known = [...speeds(view.prefill_seconds_per_token, ""), ...speeds(view.assumed_seconds_per_token, " (assumed)")];
  patch(byId("routing-note"), [view.policy, ...known].join(" · "));
  const latest = view.decisions.slice(-SHOWN_ROUTES).reverse();
  const columns = [{ title: "Latest" }, { title: "Went to" }, { title: "Because" }, { title: "Cached", number: true }, { title: "Cost", number: true, spare: true }];
  patch(byId("routes"), latest.length ? table(columns, latest.map(routeRow), "") : null);
}

function stack(rows, total) {
  const label = rows.map((row) => `${row.path} ${percent(row.total / total)}`).join(", ");
  let start = 0;
  const parts = rows.map((row) => {
    const x = start;
    start += (100 * row.total) / total;
    const place = { x: `${x.toFixed(2)}%`, width: `${(start - x).toFixed(2)}%`, height: "100%" };
    return svg("rect", { class: `path ${row.path}`, ...place }, svg("title", {}, `${row.path}: ${PATHS[row.path] ?? ""}`));
  });
  return svg("svg", { class: "stack", role: "img", "aria-label": label }, parts);
}

function pathList(rows, total) {
  const items = rows.map((row) => {
    const reasons = [...row.reasons].sort((left, right) => right[1] - left[1]);
    return h(
      "li",
      { "data-key": row.path },
      svg("svg", { class: "path-dot", "aria-hidden": "true" }, svg("rect", { class: `path ${row.path}`, width: "100%", height: "100%" })),
      h("div", {},
        h("b", {}, row.path), h("span", { class: "muted" }, ` ${percent(row.total / total)} · ${plural(row.total, "request")}`),
        h("div", { class: "muted small" }, reasons.map(([reason, number]) => `${REASONS[reason] ?? reason} (${count(number)})`).join(", "))),
    );
  });
  return h("ul", { class: "path-list" }, items);
}

function costOf(parts) {
  return parts.prefill_s + parts.queue_s + parts.active_s + (parts.disturbance_s ?? 0) + (parts.transfer_s ?? 0) + (parts.handshake_s ?? 0);
}

function routeRow(decision) {
  const { local, remote } = decision;
  const costs = remote && !remote.mismatch ? `${milliseconds(costOf(local))} / ${milliseconds(costOf(remote))}` : milliseconds(costOf(local));
  const why = REASONS[decision.reason] ?? decision.reason;
  return h(
    "tr",
    { title: `request ${decision.request_id}` },
    cell(clock(decision.decided_at_s), "muted"),
    cell([h("span", { class: "clip" }, decision.engine), decision.prefill ? h("div", { class: "muted small" }, `prefill on ${decision.prefill}`) : null]),
    cell([why, decision.detail ? h("div", { class: "muted small" }, DETAILS[decision.detail] ?? decision.detail) : null]),
    cell(decision.num_prompt_tokens === null ? EMPTY : `${count(decision.num_cached_tokens)}/${count(decision.num_prompt_tokens)}`, "number"),
    h("td", { class: "number spare", title: remote ? "estimated: alone / with the prefill engine" : "estimated" }, costs),
  );
}

// ---- learner

export function learner(state) {
  const { learner: view } = state.status;
  const { report } = view;
  const label = !report ? "not heard of" : !view.alive ? `silent for ${span(view.age_s)}` : view.paused && report.state !== "paused" ? "pausing" : report.state;
  const badge = byId("learner-state");
  badge.className = `pill ${!view.alive ? "bad" : view.paused ? "busy" : "good"}`;
  patch(badge, label);
  patch(byId("learner-button"), button(view.paused ? "Resume" : "Pause", { action: view.paused ? "resume-learner" : "pause-learner" }));
  patch(byId("learner"), report ? learnerFacts(state, report) : h("p", { class: "empty-text" }, "The learner has not reported yet. Serving does not wait for it."));
  dropped(state, report);
}

function learnerFacts(state, report) {
  const bins = state.past.bins(state.windowS);
  const losses = bins.map((bin) => [bin.at, bin.samples.at(-1).learner?.loss ?? null]).filter((point) => point[1] !== null);
  const recent = state.past.recent(60).filter((sample) => sample.learner);
  const duration = recent.length > 1 ? recent.at(-1).at_s - recent[0].at_s : 0;
  const steps = duration ? (recent.at(-1).learner.num_steps - recent[0].learner.num_steps) / duration : null;
  const facts = [
    ["Steps", [count(report.num_steps), steps !== null && steps >= 0 ? h("span", { class: "muted" }, ` ${rate(steps)}/s`) : null]],
    ["Loss", [fixed(report.loss, 3), losses.length > 1 ? sparkline(losses, "loss over the window") : null]],
    ["Training", `${rate(report.tokens_per_s)} tok/s`],
    ["Buffer", [`${count(report.buffer_tokens)} tokens`, h("span", { class: "muted" }, ` ${plural(report.buffer_requests, "request")}, oldest ${span(report.buffer_oldest_s)}`)]],
    ["Lag", span(report.capture_lag_s)],
    ["Simulated AL", fixed(report.simulated_al)],
    ["Published", plural(report.num_published, "draft")],
    ["Outcome", report.outcome || EMPTY],
  ];
  return h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function dropped(state, report) {
  const { capture } = state.status;
  const recent = series.byReason(state.past.recent(state.windowS), (sample) => sample.dropped_rows);
  const losses = [
    ...Object.entries(capture.num_dropped_rows).map(([reason, total]) => [`rows dropped, ${reason.replaceAll("_", " ")}`, total, recent[reason] ?? 0]),
    ["messages refused", report?.num_refused_messages ?? 0],
    ["falls back to a checkpoint", report?.num_restores ?? 0],
    ["late spans", report?.num_late_spans ?? 0],
    ["rows cut", report?.num_cut_rows ?? 0],
    ["requests timed out", report?.num_timed_out_requests ?? 0],
    ["requests evicted", report?.num_evicted_requests ?? 0],
    ["requests forgotten after a failure", report?.num_dropped_requests ?? 0],
  ].filter(([, total]) => total);
  const items = losses.map(([name, total, lately]) => h("li", {}, `${count(total)} ${name}`, lately ? h("span", { class: "bad-text" }, ` (${count(lately)} in this window)`) : null));
  const captured = h("li", {}, `${count(capture.num_captured_rows)} rows captured`);
  patch(byId("drops"), h("ul", { class: "losses muted small" }, captured, items.length ? items : h("li", {}, "nothing dropped")));
}

// ---- tenants

export function tenants(state) {
  const recent = state.past.recent(state.windowS);
  const duration = series.seconds(recent);
  const rows = series.tenants(recent);
  const total = series.sum(rows, (row) => row.tokens);
  const onDisk = new Map();
  for (const one of state.usage?.tenants ?? []) onDisk.set(one.tenant, (onDisk.get(one.tenant) ?? 0) + one.num_bytes);
  const columns = [{ title: "Tenant" }, { title: "Share" }, { title: "tok/s", number: true }, { title: "AL", number: true }];
  if (onDisk.size) columns.push({ title: "KV on disk", number: true });
  const body = rows.slice(0, SHOWN_TENANTS).map((row) =>
    h("tr", { "data-key": row.tenant },
      cell(h("b", { class: "clip", title: row.tenant }, row.tenant)),
      cell(h("span", { class: "meter-row" }, bar(row.tokens / total, "share of tokens"), h("span", { class: "number" }, percent(row.tokens / total)))),
      cell(rate(row.tokens / duration), "number"),
      cell(fixed(row.steps ? row.tokens / row.steps : null), "number"),
      onDisk.size ? cell(onDisk.has(row.tenant) ? `${(onDisk.get(row.tenant) / 1e6).toFixed(1)} MB` : EMPTY, "number") : null));
  patch(byId("tenants"), table(columns, body, "No tenant was served in this window."));
  patch(byId("tenants-note"), rows.length ? plural(rows.length, "tenant") : "");
}
