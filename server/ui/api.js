// Requests to the admin port. The operator token lives in this tab's sessionStorage and in the Authorization header only.

const KEY = "paceline.operator-token";
const TIMEOUT_MS = 10000;
const ACTION_TIMEOUT_MS = 120000; // a swap stages a draft on every engine

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

// What the server, or the way to it, had to say.
export class Problem extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const read = (path) => call("GET", path, undefined, {}, TIMEOUT_MS);

export function act(path, body) {
  return call("POST", path, body, { "Idempotency-Key": newKey() }, ACTION_TIMEOUT_MS);
}

async function call(method, path, body, headers, timeoutMs) {
  if (!/^[\x21-\x7e]+$/.test(token.get())) throw new Problem("The token is not accepted.", 401, "unauthorized");
  let response;
  let text;
  try {
    response = await fetch(path, {
      method,
      headers: { Authorization: `Bearer ${token.get()}`, "Content-Type": "application/json", ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(timeoutMs),
      cache: "no-store",
      credentials: "omit",
    });
    text = await response.text();
  } catch (error) {
    const why = error.name === "TimeoutError" ? `no answer within ${timeoutMs / 1000} s` : "the gateway does not answer";
    throw new Problem(why, 0, "unreachable");
  }
  let answer;
  try {
    answer = JSON.parse(text);
  } catch {
    throw new Problem(`HTTP ${response.status}: not the answer of a gateway`, response.status, "bad_answer");
  }
  if (!response.ok) throw new Problem(answer.error?.message ?? `HTTP ${response.status}`, response.status, answer.error?.code ?? "");
  return answer;
}

function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
