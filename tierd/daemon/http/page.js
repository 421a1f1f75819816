
// Every text goes into the document as text, never as markup: names come from buckets that others can write to.
const SVG = "http://www.w3.org/2000/svg";
const SHOWN = 12; // checkpoints of a run before "show all"
const MEASURED = 3; // metrics of a checkpoint
const DRAWN = 400; // checkpoints in a timeline
const EVENTS = 30;
const MINUTES = 30; // of throughput
const RUNS = 8; // runs on the page whose charts are drawn, unless two are compared
const whole = new Set(); // runs of which all checkpoints are shown
const chosen = new Set((new URLSearchParams(location.search).get("runs") || "").split(",").filter(Boolean)); // to compare
let status = null, runs = null, answered = 0;

function make(name, attributes, ...children) {
  const drawn = ["svg", "g", "circle", "line", "path", "rect", "text", "title"].includes(name);
  const element = drawn ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, String(value));
  for (const child of children.flat(3)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

function put(id, ...children) {
  document.getElementById(id).replaceChildren(...children.flat());
}

function chip(text, kind, title) {
  return make("span", { class: `chip ${kind || ""}`, ...(title ? { title } : {}) }, text);
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${count.toFixed(at && count < 100 ? 1 : 0)} ${units[at]}`;
}

function age(at) {
  if (!at) return "unknown";
  const seconds = Math.max(0, (Date.parse(status.at) - Date.parse(at)) / 1000);
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => seconds >= size) || [1, "s"];
  return `${Math.round(seconds / unit)} ${name} ago`;
}

function clock(at) { return make("time", { datetime: at, class: "soft" }, at.slice(0, 19).replace("T", " ")); }

// -- the node ----------------------------------------------------------------------------------------------------------

function showDaemon() {
  const trainers = status.trainers === 1 ? "1 trainer" : `${status.trainers} trainers`;
  const free = `${Math.round(status.spool_free * 100)} % of the spool's disk is free`;
  put("daemon", `tierd ${status.version}, pid ${status.pid}, ${status.spool}: ${trainers}, ${status.spool_parts} parts, ${free}`);
}

/** What to do next. A copy needs a page by TLS or on loopback; elsewhere the button selects the command. */
function nextStep(problem) {
  const command = make("code", {}, problem.command), button = make("button", { type: "button" }, "copy");
  const select = () => getSelection().selectAllChildren(command);
  button.addEventListener("click", () => {
    if (navigator.clipboard) navigator.clipboard.writeText(problem.command).then(() => { button.textContent = "copied"; }, select);
    else select();
  });
  return make("div", { class: "step" }, problem.do ? make("span", {}, problem.do) : "", problem.command ? [command, button] : "");
}

function showProblems() {
  const list = status.problems.map((one) => make("li", {}, chip(one.severity, one.severity), `${one.place}: ${one.why}`, nextStep(one)));
  put("problems", make("div", { class: "card" }, list.length ? make("ul", {}, list) : chip("none", "good")));
}

function throughput(tier) {
  const sent = runs.sent_bytes[tier] || new Array(MINUTES).fill(0), most = Math.max(...sent), width = 300, height = 34;
  const words = most ? `at most ${bytes(most / 60)}/s in a minute` : "nothing was sent";
  const minute = (back) => new Date(Date.parse(runs.at) - back * 60000).toISOString().slice(11, 16);
  const bars = sent.map((count, at) => {
    const tall = most ? (count / most) * (height - 4) : 0;
    return make("rect", { class: "bar", x: at * (width / MINUTES), y: height - tall, width: width / MINUTES - 2, height: tall },
      make("title", {}, `${minute(MINUTES - 1 - at)}: ${bytes(count)}`));
  });
  const line = make("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height });
  const label = `sent in each minute from ${minute(MINUTES - 1)} to ${minute(0)} UTC: ${words}`;
  return [make("svg", { viewBox: `0 0 ${width} ${height + 1}`, role: "img", "aria-label": label }, bars, line),
    make("p", { class: "soft" }, label)];
}

function showTier(tier) {
  const alert = status.alerts.some((one) => one.place === tier.name);
  const silent = !tier.reached || tier.waiting_since;
  const state = silent || alert ? chip(silent ? "does not answer" : "alert", "alert") : chip("answers", "good");
  const waits = tier.waiting_since ? `waiting for an answer since ${tier.waiting_since.slice(11, 19)} UTC` : "";
  const doing = [tier.doing, waits].filter(Boolean).join("; ") || (tier.retry_in_s ? `again in ${Math.round(tier.retry_in_s)} s` : "idle");
  const facts = [["doing", doing], ["pending", tier.pending_parts ? `${tier.pending_parts} part${tier.pending_parts === 1 ? "" : "s"}, ${bytes(tier.pending_bytes)}` : "nothing"],
    ["to prune", tier.append_only ? "append-only" : String(tier.pending_prunes)], ["compression", tier.compression]];
  if (tier.last_error) facts.push(["last error", tier.last_error]);
  return make("div", { class: "card" }, make("div", { class: "head" }, make("h3", {}, tier.name), state, make("span", { class: "soft" }, tier.url)),
    throughput(tier.name), make("dl", {}, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
}

function showWatch(watch) {
  const counts = `${watch.checkpoints} checkpoints, ${watch.not_taken} of them not taken; ${watch.files} files belong to none`;
  const left = watch.reasons.map((one) => make("li", {}, chip("not taken", "warning"), `${one.path}: ${one.why}`));
  const over = watch.passed_over.map((one) => {
    const more = one.count > one.names.length ? ` and ${one.count - one.names.length} more` : "";
    return make("li", {}, chip("passed over"), `${one.names.join(", ")}${more}${one.directory ? ` in ${one.directory}` : ""}: ${one.why}`);
  });
  return make("div", { class: "card" }, make("div", { class: "head" }, make("h3", {}, watch.run), make("span", { class: "soft" }, watch.directory)),
    watch.waits ? chip(`waits: ${watch.waits}`, "warning") : "", make("p", { class: "soft" }, counts), make("ul", {}, left, over));
}

function showWatches() {
  const found = status.watches || [];
  document.getElementById("watched").hidden = !found.length;
  put("watches", found.map(showWatch));
}

function showEvents() {
  const list = status.events.slice(-EVENTS).reverse().map((one) => {
    const kind = { failing: "alert", "persist failed": "alert", corrupt: "alert", quarantined: "alert", "given up": "alert",
      "two launches": "alert", "rolled back": "alert", "replicas differ": "alert", "fell back": "warning", durable: "good" }[one.what];
    const rank = one.world_size > 1 && one.rank !== undefined ? ` rank ${one.rank}` : "";
    const subject = one.step === undefined ? one.subject : `${one.run} step ${one.step}${rank}`;
    return make("li", { title: one.subject }, clock(one.at), " ", chip(one.what, kind), `${one.place} `, make("strong", {}, subject), one.why ? `: ${one.why}` : "");
  });
  put("events", make("div", { class: "card" }, list.length ? make("ul", {}, list) : "none yet"));
}

// -- runs --------------------------------------------------------------------------------------------------------------

function identity(one) { return `${one.run}/${String(one.step).padStart(12, "0")}.${one.attempt}`; }

function kindOf(checkpoint) {
  const states = checkpoint.copies.map((copy) => copy.state);
  if (states.some((state) => state === "corrupt" || state === "quarantined")) return "alert";
  if (checkpoint.copies.some((copy) => copy.state === "verified")) return "good";
  return checkpoint.complete ? "" : "warning";
}

function copyChip(copy, world) {
  const kind = { verified: "good", corrupt: "alert", quarantined: "alert", incomplete: "warning", unreadable: "warning" }[copy.state];
  const why = copy.reasons.length ? copy.reasons.join("; ") : "no rule was given";
  const size = copy.stored_size || copy.size, ranks = world > 1 && `${copy.ranks.length} of ${world} ranks`;
  const facts = [copy.state, ranks, size && bytes(size), `${copy.keep ? "kept" : "to be pruned"}: ${why}`];
  return make("div", {}, chip(`${copy.place}: ${facts.filter(Boolean).join(", ")}`, kind), copy.defects.map((one) => chip(one, "alert")));
}

function moving(checkpoint) {
  const found = runs.in_flight.filter((one) => identity(one) === identity(checkpoint)).map((one) => {
    const share = one.total ? ` ${Math.round((100 * one.done) / one.total)} %` : "";
    const to = one.tier ? ` to ${one.tier}` : "";
    return chip(`in flight: ${one.doing} of rank ${one.rank}${to}${share}`, "warning");
  });
  if (runs.held.includes(identity(checkpoint))) found.push(chip("held by a restore", "warning"));
  if (checkpoint.pinned) found.push(chip("pinned"));
  if (checkpoint.resumes) found.push(chip("a restore tries this first", "good"));
  if (!checkpoint.complete && kindOf(checkpoint) !== "alert") found.push(chip(`incomplete: not all of ${checkpoint.world_size} ranks`, "warning"));
  return found;
}

function launchesOf(name, checkpoints) {
  return runs.launches.filter((one) => one.run === name).map((one) => ({
    ...one, steps: checkpoints.filter((it) => it.attempt === one.attempt).sort((a, b) => a.step - b.step),
  })).filter((one) => one.steps.length);
}

function describe(launch) {
  const how = launch.from_step === null ? "from the beginning" : `resumed from step ${launch.from_step}`;
  const lost = launch.lost_steps ? `; rolled back by ${launch.lost_steps} steps` : "";
  return `launch ${launch.attempt}: ${how}, to step ${launch.last_step}${lost}`;
}

/** Pixels across a run's card, so that the text of drawings keeps its size. */
function roomForRun() {
  const place = document.getElementById("runs"), columns = getComputedStyle(place).gridTemplateColumns.split(" ").length;
  return Math.max(260, place.clientWidth / columns - 30);
}

function timeline(launches) {
  const width = roomForRun();
  const lane = 26, left = 12, right = 12;
  const steps = launches.flatMap((one) => [...one.steps.map((it) => it.step), ...(one.from_step === null ? [] : [one.from_step])]);
  const low = Math.min(...steps), high = Math.max(...steps);
  const x = (step) => left + ((step - low) / Math.max(1, high - low)) * (width - left - right);
  const y = new Map(launches.map((one, at) => [one.attempt, 14 + at * lane]));
  const drawn = [];
  for (const one of launches) {
    const at = y.get(one.attempt), first = one.from_step === null ? one.steps[0].step : one.from_step;
    if (one.from_step !== null && y.has(one.from_attempt)) {
      const path = `M ${x(one.from_step)} ${y.get(one.from_attempt)} L ${x(one.from_step)} ${at}`;
      drawn.push(make("path", { class: "rollback", d: path }));
    }
    // To where a later launch left it, also if retention has deleted that checkpoint since.
    const left_at = launches.filter((it) => it.from_attempt === one.attempt).map((it) => it.from_step);
    const last = Math.max(one.steps[one.steps.length - 1].step, ...left_at);
    drawn.push(make("line", { class: "lane", x1: x(first), x2: x(last), y1: at, y2: at }));
  }
  for (const one of launches) {
    for (const it of one.steps) {
      const title = `step ${it.step}: ${it.copies.map((copy) => `${copy.place} ${copy.state}`).join(", ") || "no copy"}`;
      drawn.push(make("circle", { class: `dot ${kindOf(it)}`, cx: x(it.step), cy: y.get(one.attempt), r: 6 }, make("title", {}, title)));
    }
  }
  const height = 14 + launches.length * lane + 10;
  drawn.push(make("text", { x: left, y: height - 4 }, `step ${low}`), make("text", { x: width - right, y: height - 4, "text-anchor": "end" }, `step ${high}`));
  return make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "timeline of launches" }, drawn);
}

function metricsOf(checkpoint) {
  const found = Object.entries(checkpoint.metrics).slice(0, MEASURED);
  const words = found.map(([name, value]) => `${name} ${value === null ? "none" : measure(value)}`);
  return make("div", { class: "soft" }, words.join(", "));
}

/** Whether tiers have what the policy wants there, by the daemon's own decision. */
function badge(name) {
  const lag = runs.lags.find((one) => one.run === name);
  return lag ? chip(lag.text, { current: "good", sending: "", local: "" }[lag.state] ?? "warning") : "";
}

function comparison(name) {
  const box = make("input", { type: "checkbox" });
  box.checked = chosen.has(name);
  box.addEventListener("change", () => {
    if (box.checked && chosen.size > 1) chosen.delete([...chosen][0]);
    box.checked ? chosen.add(name) : chosen.delete(name);
    const pair = chosen.size === 2 ? `?runs=${[...chosen].map(encodeURIComponent).join(",")}` : location.pathname;
    history.replaceState(null, "", pair);
    showRuns();
  });
  return make("label", { class: "soft" }, box, " compare");
}

function showRun(name, checkpoints, charts, scales, comparable) {
  const launches = launchesOf(name, checkpoints.slice(0, DRAWN));
  const shown = whole.has(name) ? checkpoints : checkpoints.slice(0, SHOWN);
  const rows = shown.map((one) => make("tr", {},
    make("td", {}, make("strong", { class: "number" }, `step ${one.step}`), make("div", { class: "soft" }, age(one.created)),
      launches.length > 1 ? make("div", { class: "soft" }, `of launch ${one.attempt}`) : "", metricsOf(one)),
    make("td", {}, one.copies.map((copy) => copyChip(copy, one.world_size))), make("td", {}, moving(one))));
  const card = make("div", { class: "card" }, make("div", { class: "head" }, make("h3", {}, name), badge(name), comparable ? comparison(name) : ""),
    charts.length ? make("div", { class: "charts" }, charts.map((chart) => drawChart(chart, scales))) : "",
    timeline(launches), make("ul", { class: "soft" }, launches.map((one) => make("li", {}, describe(one)))),
    make("table", {}, make("thead", {}, make("tr", {}, ["checkpoint", "copies, and why they are kept", "now"].map((it) => make("th", {}, it)))),
      make("tbody", {}, rows)));
  if (checkpoints.length > SHOWN) {
    const words = whole.has(name) ? `show the newest ${SHOWN}` : `show all ${checkpoints.length}`;
    const button = make("button", { type: "button" }, words);
    button.addEventListener("click", () => { whole.has(name) ? whole.delete(name) : whole.add(name); showRuns(); });
    card.append(button);
  }
  return card;
}

function showRuns() {
  const found = new Map();
  for (const one of runs.checkpoints) found.set(one.run, [...(found.get(one.run) || []), one]);
  const pair = [...chosen].filter((name) => found.has(name)), compared = pair.length === 2;
  document.getElementById("runs").className = compared ? "pair" : "";
  const names = compared ? pair : [...found.keys()];
  const charts = new Map(names.map((name, at) => [name, compared || at < RUNS
    ? chartsOf(runs.saves.filter((save) => save.run === name), found.get(name)) : []]));
  const room = roomForRun(), together = compared && scalesOf([...charts.values()].flat(), room);
  const cards = names.map((name) => showRun(name, found.get(name), charts.get(name),
    together || (charts.get(name).length && scalesOf(charts.get(name), room)), found.size > 1));
  if (runs.unreached.length) cards.unshift(make("p", {}, chip(`tiers that do not answer, so their copies are not known: ${runs.unreached.join(", ")}`, "warning")));
  put("runs", cards.length ? cards : make("div", { class: "card" }, "none in the spool"));
}

// -- live --------------------------------------------------------------------------------------------------------------

async function fetched(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function refresh() {
  if (answered && !getSelection().isCollapsed) return; // somebody marks a text, which drawing anew would take away
  const line = document.getElementById("daemon");
  try {
    [status, runs] = await Promise.all([fetched("/status"), fetched("/runs")]);
    answered = Date.now();
    line.classList.remove("stale");
    showDaemon();
    showProblems();
    put("tiers", make("div", { class: "grid" }, status.tiers.map(showTier)));
    showWatches();
    showRuns();
    showEvents();
  } catch (error) {
    line.classList.add("stale");
    const since = answered ? ` for ${Math.round((Date.now() - answered) / 1000)} s; below is what it said last` : "";
    line.textContent = `The daemon does not answer${since} (${error.message})`;
  }
}

async function live() {
  if (!document.hidden || !answered) await refresh();
  setTimeout(live, 2000);
}
live();
