// The status page: asks the REST API each second and redraws. All text goes in as text, never as markup.
const API = "api/v1";
const INTERVAL_MS = 1000;
const SHOWN_EVENTS = 60;
const ROUTINE_KINDS = new Set(["checkpoint", "decision"]);
// A sign and a tone beside each state's word: none is told by colour alone.
const STATES = {
  queued: ["…", "quiet"], running: ["▶", "good"], cancelling: ["◐", "warn"], succeeded: ["✔", "good"],
  failed: ["✘", "bad"], cancelled: ["■", "warn"],
  launching: ["…", "warn"], stopping: ["◐", "warn"], ended: ["○", "quiet"],
  requested: ["…", "quiet"], ready: ["●", "good"], suspect: ["?", "warn"], draining: ["◐", "warn"],
  lost: ["✘", "bad"], gone: ["○", "quiet"],
};

const page = { chosen: null, events: [], lastEvent: 0, metrics: { job: null, steps: new Map() } };
const byId = (id) => document.getElementById(id);

class TokenWanted extends Error {}

// The token stays in this tab: it is gone when the tab is closed, and no other page can read it.
async function get(path) {
  const token = sessionStorage.getItem("varuna-token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(`${API}${path}`, { cache: "no-store", headers });
  if (response.status === 401) throw new TokenWanted((await response.json()).detail);
  if (!response.ok) throw new Error(`${path} answered ${response.status}`);
  return response.json();
}

function askForToken(reason) {
  byId("login").hidden = false;
  byId("login-reason").textContent = sessionStorage.getItem("varuna-token") ? reason : "";
  sessionStorage.removeItem("varuna-token");
  byId("connection").textContent = "signed out";
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("varuna-token", byId("token").value.trim());
  byId("token").value = "";
  byId("login").hidden = true;
  loop();
});

function element(tag, content, attributes = {}) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (content instanceof Node) made.append(content);
  else made.textContent = content ?? "–";
  return made;
}

function state(name) {
  const [sign, tone] = STATES[name] ?? ["·", "quiet"];
  return element("span", `${sign} ${name}`, { class: tone });
}

function row(...cells) {
  const made = document.createElement("tr");
  made.append(...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", cell))));
  return made;
}

function fill(tableId, rows) {
  byId(tableId).querySelector("tbody").replaceChildren(...rows);
}

const shape = (p, d) => (p && d ? `${p}×${d}` : "–");
const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const mebibytes = (bytes) => (bytes ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : "–");
const clock = (at) => new Date(at).toLocaleTimeString();

function drawJobs(jobs) {
  byId("no-jobs").hidden = jobs.length > 0;
  fill("jobs", jobs.map((job) => {
    const choose = element("button", job.name, { type: "button" });
    choose.addEventListener("click", () => { page.chosen = job.id; refresh(); });
    const made = row(choose, state(job.state), shape(job.plan?.p, job.plan?.d), job.generation, job.step, fixed(job.loss, 4));
    if (job.id === page.chosen) made.setAttribute("aria-current", "true");
    return made;
  }));
}

function whyVm(vm) {
  if (vm.quarantined_until) return `quarantined as slow until ${new Date(vm.quarantined_until).toLocaleTimeString()}`;
  return vm.slow_ratio ? `slow: ${vm.slow_reason}` : vm.reason ?? "";
}

function drawFleet(vms) {
  const ready = vms.filter((vm) => vm.state === "ready").length;
  byId("summary").textContent = `${ready} of ${vms.length} VMs ready`;
  byId("no-vms").hidden = vms.length > 0;
  fill("vms", vms.map((vm) => row(
    vm.id, state(vm.state), vm.gpus, mebibytes(vm.device_memory_bytes), vm.host,
    vm.last_heard_s === null || vm.last_heard_s === undefined ? "–" : `${vm.last_heard_s.toFixed(1)} s ago`,
    element("td", whyVm(vm), { class: "why" }),
  )));
}

function drawEvents() {
  const routine = byId("routine").checked;
  const events = page.events.filter((event) => routine || !ROUTINE_KINDS.has(event.kind));
  fill("events", events.slice(-SHOWN_EVENTS).reverse().map((event) => row(
    clock(event.at), event.kind, event.generation, event.vm_id, element("td", event.message, { class: "why" }),
  )));
}

function drawGenerations(generations) {
  fill("generations", generations.slice().reverse().map((g) => row(
    g.number, g.kind, state(g.state), shape(g.p, g.d), g.micro_batch,
    g.resumed_step === null || g.last_step === null ? "–" : `${g.resumed_step + 1}–${g.last_step}`,
    g.seconds_without_progress === null ? "–" : `${g.seconds_without_progress.toFixed(1)} s`,
    g.steps_redone, element("td", g.reason, { class: "why" }),
  )));
}

// Stages from left to right, one row per replica; a cell names the VM that holds that rank.
function drawPlacement(generation) {
  const rows = [];
  if (generation) {
    const stages = Array.from({ length: generation.p }, (_, stage) => element("th", `stage ${stage}`, { scope: "col" }));
    const head = document.createElement("tr");
    head.append(element("td", "", { class: "corner" }), ...stages);
    rows.push(head);
  }
  for (let replica = 0; generation && replica < generation.d; replica += 1) {
    const cells = [element("th", `replica ${replica}`, { scope: "row" })];
    for (let stage = 0; stage < generation.p; stage += 1) {
      const rank = replica * generation.p + stage;
      const place = generation.placement.find((one) => one.rank === rank);
      cells.push(element("td", place ? place.vm_id : "–", { title: `rank ${rank}, stage ${stage}` }));
    }
    const made = document.createElement("tr");
    made.append(...cells);
    rows.push(made);
  }
  byId("placement").replaceChildren(...rows);
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The loss by step, with a dashed line where a new generation took over.
function drawLoss(all) {
  const steps = all.filter((one) => one.loss !== null); // null: it was not a number
  const chart = byId("loss-chart");
  if (steps.length < 2) { chart.replaceChildren(); return; }
  const losses = steps.map((one) => one.loss);
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const [first, last] = [steps[0].step, steps[steps.length - 1].step];
  const x = (step) => (400 * (step - first)) / Math.max(1, last - first);
  const y = (loss) => 5 + (80 * (high - loss)) / (high - low || 1);
  const morphs = steps.filter((one, index) => index > 0 && one.generation !== steps[index - 1].generation);
  chart.replaceChildren(
    ...morphs.map((one) => svg("line", { x1: x(one.step), x2: x(one.step), y1: 0, y2: 90 })),
    svg("polyline", { points: steps.map((one) => `${x(one.step).toFixed(1)},${y(one.loss).toFixed(1)}`).join(" ") }),
  );
  byId("loss-note").textContent = `from ${high.toFixed(2)} to ${low.toFixed(2)}; dashed: a new generation took over`;
}

function drawJob(job, generations, steps) {
  byId("job").hidden = false;
  byId("job-title").replaceChildren(document.createTextNode(`${job.name} `), state(job.state));
  byId("job-error").hidden = !job.error;
  byId("job-error").textContent = job.error ?? "";
  const trained = generations.filter((g) => g.kind === "training");
  const generation = trained[trained.length - 1];
  byId("shape").textContent = generation ? `${shape(generation.p, generation.d)}, micro-batch ${generation.micro_batch}` : "–";
  byId("shape-note").textContent = generation ? `generation ${generation.number}: ${generation.reason}` : "not planned yet";
  drawPlacement(generation);
  const newest = steps[steps.length - 1];
  byId("loss").textContent = fixed(newest?.loss, 4);
  byId("step").textContent = newest ? newest.step : "–";
  const predicted = generation?.plan?.predicted_minibatch_s;
  byId("step-note").textContent = newest
    ? `${newest.step_s.toFixed(3)} s per step${predicted ? `, predicted ${predicted.toFixed(3)} s` : ""}` : "";
  drawLoss(steps);
  drawGenerations(generations);
}

async function stepsOf(job, generations) {
  if (page.metrics.job !== job.id) page.metrics = { job: job.id, steps: new Map() };
  const known = page.metrics.steps;
  // A new generation may redo steps: ask from where it resumed.
  const resumed = generations[generations.length - 1]?.resumed_step ?? known.size;
  const after = Math.min(known.size, resumed);
  for (const one of await get(`/jobs/${job.id}/metrics?after_step=${after}`)) known.set(one.step, one);
  return [...known.values()].sort((a, b) => a.step - b.step);
}

async function refresh() {
  const [jobs, vms] = await Promise.all([get("/jobs"), get("/vms?gone=false")]);
  const news = (await get(`/events?after=${page.lastEvent}`)).filter((event) => event.id > page.lastEvent);
  page.events = [...page.events, ...news].slice(-20 * SHOWN_EVENTS);
  page.lastEvent = news.length ? news[news.length - 1].id : page.lastEvent;
  const running = jobs.filter((job) => job.state === "running");
  const chosen = jobs.find((job) => job.id === page.chosen) ?? running[0] ?? jobs[0];
  page.chosen = chosen?.id ?? null;
  drawJobs(jobs);
  drawFleet(vms);
  drawEvents();
  if (chosen) {
    const generations = await get(`/jobs/${chosen.id}/generations`);
    drawJob(chosen, generations, await stepsOf(chosen, generations));
  } else {
    byId("job").hidden = true;
  }
}

async function loop() {
  const connection = byId("connection");
  try {
    await refresh();
    connection.textContent = `up to date at ${new Date().toLocaleTimeString()}`;
    connection.className = "";
  } catch (error) {
    if (error instanceof TokenWanted) { askForToken(error.message); return; } // asks no more until there is one
    connection.textContent = `✘ the manager does not answer (${error.message}); trying again`;
    connection.className = "bad";
  }
  setTimeout(loop, INTERVAL_MS);
}

byId("routine").addEventListener("change", drawEvents);
loop();
