// What an operator can do, each behind one question where it changes what is served.

import { act } from "./api.js";
import { byId, h, patch } from "./dom.js";
import { fixed, signed, span } from "./words.js";

let pending = null;

// Ask, then do; an error is shown where the question is, with its reason.
function ask({ title, body, go, force, work }) {
  pending = work;
  patch(byId("confirm-title"), title);
  patch(byId("confirm-body"), body.map((line) => h("p", {}, line)));
  patch(byId("confirm-go"), go);
  patch(byId("confirm-problem"));
  byId("confirm-force").hidden = !force;
  byId("force").checked = false;
  byId("confirm-go").disabled = false;
  byId("confirm").showModal();
  byId("confirm-go").focus();
}

async function submit(event, refresh) {
  event.preventDefault();
  if (!pending) return;
  const dialog = byId("confirm");
  byId("confirm-go").disabled = true;
  patch(byId("confirm-problem"));
  try {
    notice(await pending(byId("force").checked), "done");
    dialog.close();
  } catch (error) {
    patch(byId("confirm-problem"), describe(error));
    byId("confirm-go").disabled = false;
  }
  refresh();
}

export const describe = (error) => (error.status && error.code ? `${error.message} (${error.code})` : error.message);

export function notice(text, kind) {
  const line = h("div", { class: `notice ${kind}` }, h("span", {}, text), h("button", { type: "button", class: "quiet", "data-action": "dismiss", "aria-label": "Dismiss" }, "✕"));
  byId("notices").append(line);
  while (byId("notices").children.length > 4) byId("notices").firstChild.remove();
  if (kind === "done") setTimeout(() => line.remove(), 8000);
}

const swapped = (report) => `Draft v${report.version}: ${report.outcome}${report.reason ? `, ${report.reason}` : ""} in ${span(report.duration_ms / 1000)}.`;

function activate(state, version) {
  const active = state.status.active_version;
  const gate = state.drafts.drafts.find((draft) => draft.version === version)?.manifest?.gate;
  const verdict = !gate
    ? "The gate was never asked about it."
    : `The gate ${gate.accepted ? "accepted" : "rejected"} it: ${gate.reason} (simulated AL ${fixed(gate.incumbent_al)} → ${fixed(gate.candidate_al)}, ${signed(gate.candidate_al - gate.incumbent_al)}).`;
  ask({
    title: `Activate draft v${version}?`,
    body: [`It replaces v${active} on every engine between two steps. Running answers go on, and their text does not change.`, verdict],
    go: "Activate",
    force: true,
    work: async (force) => swapped(await act(`/admin/drafts/${version}/activate`, { expected_active: active, force })),
  });
}

function rollBack(state) {
  const { active_version: active, previous_version: previous, floor_version: floor } = state.status;
  const target = previous ?? floor;
  ask({
    title: `Roll back to draft v${target}?`,
    body: [`v${active} is active. ${previous === null ? "There is no draft before it, so the floor serves." : "The draft before it serves again."} Running answers go on.`],
    go: "Roll back",
    work: async () => swapped(await act("/admin/drafts/rollback", { expected_active: active })),
  });
}

function drain(engineId) {
  ask({
    title: `Drain ${engineId}?`,
    body: ["It gets no new requests and ends those it has. A gateway that restarts forgets this."],
    go: "Drain",
    work: async () => {
      const view = await act(`/admin/engines/${encodeURIComponent(engineId)}/drain`);
      return `${engineId} is draining: ${view.num_in_flight} in flight.`;
    },
  });
}

async function atOnce(work, refresh) {
  try {
    notice(await work(), "done");
  } catch (error) {
    notice(describe(error), "failed");
  }
  refresh();
}

const undrain = async (engineId) => {
  await act(`/admin/engines/${encodeURIComponent(engineId)}/undrain`);
  return `${engineId} takes requests again.`;
};
const setLearner = async (wish) => {
  await act(`/admin/learner/${wish}`);
  return wish === "pause" ? "The learner pauses after its step." : "The learner goes on.";
};

// The slider keeps what is being chosen; what the gateway says shows once nothing is.
export class CaptureControl {
  constructor(refresh) {
    this.isEdited = false;
    const slider = byId("capture");
    slider.addEventListener("input", () => this.show(true));
    byId("capture-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const rate = Number(slider.value) / 100;
      atOnce(async () => {
        await act("/admin/capture", { rate });
        return `${slider.value}% of requests are captured.`;
      }, () => {
        this.show(false);
        refresh();
      });
    });
  }

  show(isEdited) {
    this.isEdited = isEdited;
    patch(byId("capture-value"), `${byId("capture").value}%`);
    byId("capture-form").querySelector("button").disabled = !isEdited;
  }

  update(rate) {
    byId("capture").disabled = rate === null;
    if (this.isEdited || rate === null) return;
    byId("capture").value = Math.round(100 * rate);
    this.show(false);
  }
}

export function installActions(state, refresh) {
  byId("confirm-form").addEventListener("submit", (event) => submit(event, refresh));
  byId("confirm").addEventListener("close", () => {
    // Told a turn after it closed; by then the next question may stand.
    if (!byId("confirm").open) pending = null;
  });
  document.addEventListener("click", (event) => {
    const source = event.target.closest("[data-action]");
    if (!source) return;
    const { action, version, engine } = source.dataset;
    if (action === "activate") activate(state, Number(version));
    else if (action === "roll-back") rollBack(state);
    else if (action === "drain") drain(engine);
    else if (action === "undrain") atOnce(() => undrain(engine), refresh);
    else if (action === "pause-learner") atOnce(() => setLearner("pause"), refresh);
    else if (action === "resume-learner") atOnce(() => setLearner("resume"), refresh);
    else if (action === "cancel") byId("confirm").close();
    else if (action === "dismiss") source.closest(".notice").remove();
  });
}
