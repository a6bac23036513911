// The gateway's samples, and what is drawn from them. No DOM here.

const BINS = 90;
const MIN_STEPS = 20; // verify steps below which a bin's AL is chance

export class Past {
  constructor() {
    this.epoch = "";
    this.samples = [];
    this.gates = [];
    this.swaps = [];
    this.calibration = { pairs: [] };
    this.nowS = 0;
  }

  get lastNumber() {
    return this.samples.at(-1)?.number ?? 0;
  }

  // Returns false where the gateway has restarted and must be asked for everything.
  take(view) {
    const isSame = view.epoch === this.epoch;
    if (!isSame) {
      const askedForAll = this.lastNumber === 0;
      this.epoch = view.epoch;
      this.samples = [];
      if (!askedForAll) return false;
    }
    const last = this.lastNumber;
    this.samples.push(...view.samples.filter((sample) => sample.number > last));
    const oldest = view.now_s - view.kept_s;
    while (this.samples.length && this.samples[0].at_s < oldest) this.samples.shift();
    this.gates = view.gates;
    this.swaps = view.swaps;
    this.calibration = view.calibration;
    this.nowS = view.now_s;
    return true;
  }

  // Samples of the last `windowS` seconds, in bins of whole seconds that do not move between two refreshes.
  bins(windowS) {
    const widthS = Math.max(Math.ceil(windowS / BINS / 2) * 2, 2);
    const from = this.nowS - windowS;
    const bins = [];
    for (const sample of this.samples) {
      if (sample.at_s < from) continue;
      const start = Math.floor(sample.at_s / widthS) * widthS;
      if (bins.at(-1)?.start !== start) bins.push({ start, samples: [] });
      bins.at(-1).samples.push(sample);
    }
    return bins.map((bin) => ({ at: bin.samples.at(-1).at_s, samples: bin.samples }));
  }

  recent(windowS) {
    const from = this.nowS - windowS;
    return this.samples.filter((sample) => sample.at_s >= from);
  }
}

export const sum = (items, pick) => items.reduce((total, item) => total + pick(item), 0);
export const seconds = (samples) => sum(samples, (sample) => sample.span_s);
export const tokens = (samples) => sum(samples, (sample) => sample.num_tokens ?? 0);
export const ended = (samples, outcome) => sum(samples, (sample) => sample.ended?.[outcome] ?? 0);
export const spans = (samples) => samples.flatMap((sample) => sample.domains ?? []);

export function perSecond(samples, pick) {
  const duration = seconds(samples);
  return duration ? pick(samples) / duration : null;
}

// The time within which that share of the streamed answers had begun; null where none began.
export function firstByte(samples, share) {
  const classes = samples.flatMap((sample) => sample.first_bytes ?? []).sort((left, right) => left[0] - right[0]);
  let rank = Math.ceil(share * sum(classes, ([, number]) => number));
  for (const [time, number] of classes) {
    rank -= number;
    if (rank <= 0) return time;
  }
  return null;
}

// Mean time between two chunks of one answer; null where none had two.
export function meanGap(samples) {
  const number = sum(samples, (sample) => sample.num_gaps ?? 0);
  return number ? sum(samples, (sample) => sample.gaps_s ?? 0) / number : null;
}

// AL of some spans; null where too few steps were verified to tell.
export function acceptanceLength(domainSpans, minSteps = MIN_STEPS) {
  const steps = sum(domainSpans, (one) => one.num_verify_steps);
  if (steps < minSteps) return null;
  return 1 + sum(domainSpans, (one) => sum(one.accepted, (value) => value)) / steps;
}

// Accepted share of the proposals at each position.
export function positionRates(domainSpans) {
  const depth = Math.max(0, ...domainSpans.map((one) => one.proposed.length));
  return Array.from({ length: depth }, (_, position) => {
    const proposed = sum(domainSpans, (one) => one.proposed[position] ?? 0);
    return proposed >= MIN_STEPS ? sum(domainSpans, (one) => one.accepted[position] ?? 0) / proposed : null;
  });
}

// Domains by verify steps, the busiest first.
export function domains(samples) {
  const busy = new Map();
  for (const one of spans(samples)) {
    busy.set(one.domain, (busy.get(one.domain) ?? 0) + one.num_verify_steps);
  }
  return [...busy].sort((left, right) => right[1] - left[1] || left[0].localeCompare(right[0])).map(([name]) => name);
}

export function line(bins, pick) {
  return bins.map((bin) => [bin.at, pick(bin.samples)]).filter((point) => point[1] !== null);
}

// Tenants of some samples, the busiest first: verify steps, tokens.
export function tenants(samples) {
  const rows = new Map();
  for (const one of samples.flatMap((sample) => sample.tenants ?? [])) {
    const row = rows.get(one.tenant) ?? { tenant: one.tenant, steps: 0, tokens: 0 };
    row.steps += one.num_verify_steps;
    row.tokens += one.num_tokens;
    rows.set(one.tenant, row);
  }
  return [...rows.values()].sort((left, right) => right.tokens - left.tokens || left.tenant.localeCompare(right.tenant));
}

// Requests by path, each with its reasons, the most taken first.
export function paths(samples) {
  const rows = new Map();
  for (const sample of samples) {
    for (const [path, reasons] of Object.entries(sample.routed ?? {})) {
      const row = rows.get(path) ?? { path, total: 0, reasons: new Map() };
      for (const [reason, number] of Object.entries(reasons)) {
        row.total += number;
        row.reasons.set(reason, (row.reasons.get(reason) ?? 0) + number);
      }
      rows.set(path, row);
    }
  }
  return [...rows.values()].sort((left, right) => right.total - left.total);
}

export function byReason(samples, pick) {
  const total = {};
  for (const sample of samples) {
    for (const [reason, number] of Object.entries(pick(sample) ?? {})) total[reason] = (total[reason] ?? 0) + number;
  }
  return total;
}

// Which draft was active when: segments that cover `from` to `to`.
export function bands(swaps, active, from, to) {
  const changes = swaps.filter((swap) => swap.outcome === "committed" && swapEnd(swap) <= to);
  const segments = [];
  let end = to;
  let version = active;
  for (const swap of [...changes].reverse()) {
    const at = swapEnd(swap);
    if (at <= from) break;
    segments.unshift({ from: at, to: end, version: swap.version });
    end = at;
    version = swap.previous;
  }
  if (version !== null && version !== undefined) segments.unshift({ from, to: end, version });
  return segments;
}

export const swapEnd = (swap) => swap.started_at_s + swap.duration_ms / 1000;

// Every gate decision that is known of, the newest first: rejections as the learner reported them, acceptances with their drafts.
export function gateDecisions(gates, drafts) {
  const rejected = gates.filter((gate) => !gate.report.accepted).map((gate) => ({ at: gate.at_s, version: null, report: gate.report }));
  const published = drafts
    .filter((draft) => draft.manifest?.gate)
    .map((draft) => ({ at: draft.manifest.created_at_s, version: draft.version, report: draft.manifest.gate }));
  return [...rejected, ...published].sort((left, right) => right.at - left.at);
}
