// Numbers, times and reasons as people read them.

export const EMPTY = "–";

export function count(value) {
  if (value === null || value === undefined) return EMPTY;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  if (value === null || value === undefined) return EMPTY;
  return value < 10 ? value.toFixed(1) : count(value);
}

export const fixed = (value, digits = 2) => (value === null || value === undefined ? EMPTY : value.toFixed(digits));
export const percent = (share, digits = 0) => (share === null || share === undefined ? EMPTY : `${(100 * share).toFixed(digits)}%`);
export const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);

export function span(seconds) {
  if (seconds === null || seconds === undefined) return EMPTY;
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(seconds < 1 ? 1 : 0)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return EMPTY;
  return seconds < 10 ? `${(1000 * seconds).toFixed(0)} ms` : span(seconds);
}

// For the ends of axes, of seconds.
export const shortTime = (value) => (value === 0 ? "0" : value < 1 ? milliseconds(value) : `${short(value)} s`);

export function clock(atS, withSeconds = true) {
  const at = new Date(1000 * atS);
  const part = (value) => String(value).padStart(2, "0");
  return `${part(at.getHours())}:${part(at.getMinutes())}${withSeconds ? `:${part(at.getSeconds())}` : ""}`;
}

// For the ends of axes.
export const short = (value) => (value >= 1000 ? `${Number((value / 1000).toPrecision(3))}k` : String(Number(value.toPrecision(3))));

// With the date where it is not today's.
export function moment(atS, nowS) {
  const at = new Date(1000 * atS);
  if (at.toDateString() === new Date(1000 * nowS).toDateString()) return clock(atS);
  return `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock(atS, false)}`;
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export const PATHS = {
  combined: "one engine prefills and decodes",
  kv_reuse: "the engine has part of the prompt already",
  remote_prefill: "a prefill engine computes the prompt, a decode engine pulls it",
  recompute: "the decode engine prefills, as no other can or should",
};

export const REASONS = {
  cached: "part is cached there",
  not_cached: "nothing is cached",
  short_prompt: "too short to move",
  prompt_too_long: "longer than the engine takes",
  local_cheaper: "its own prefill is cheaper",
  remote_cheaper: "a remote prefill is cheaper",
  tokens_unknown: "by load alone: the prompt was not read here",
  no_prefill_engine: "no prefill engine takes requests",
  mismatch: "the two engines cannot share KV",
  prefill_failed: "the prefill leg failed",
};

// Why a prompt was not read.
export const DETAILS = {
  one_engine: "there is one engine only",
  no_tokenizer: "the target's tokenizer is not here",
  too_long: "it is longer than any engine takes",
  slow: "reading it took too long",
  no_template: "the target has no chat template",
  template_refused: "the chat template refuses it",
  tools: "it uses tools",
  not_text: "it holds more than text",
  unsupported_field: "a field changes how it is read",
  cache_not_read: "it keeps the engine from reading its cache",
  several_prompts: "it holds several prompts",
  unreadable: "it cannot be read",
  other_route: "it came by another route",
};
