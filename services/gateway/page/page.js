"use strict";
// Everything that the gateway sends is put in as text: strings become text nodes, and no markup is ever parsed.
(() => {
const POLL_MS = 1000, SLOWEST_MS = 10000, TIMEOUT_MS = 8000, MAX_LABELLED = 12;
// An answer that was made for another visitor less than a second ago will do.
const SHARED = { "cache-control": "max-age=1" };
// Behind a proxy that strips a prefix the routes are below it, else beside this page.
const ROOT = document.documentElement.dataset.root;
const at = (path) => (ROOT ? `${ROOT}/${path}` : path);
const byId = (id) => document.getElementById(id);
const body = (id) => byId(id).querySelector(".body");
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const round = (value, digits = 1) => (value == null ? "–" : Number(value).toFixed(digits));
const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);
const seconds = (value) => (value == null ? "none" : value < 1 ? `${round(1000 * value, value > 0 && value < 0.01 ? 1 : 0)} ms` : `${round(value)} s`);
const bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${round(value, unit ? 1 : 0)} ${units[unit]}`;
};

// ---- sections: one is drawn again only when what it shows has changed, so that text stays selected, and is hidden while
// there is nothing to show

const drawn = new Map();
function show(id, shown, build) {
  const key = JSON.stringify(shown);
  if (drawn.get(id) === key) return;
  drawn.set(id, key);
  const children = build();
  byId(id).hidden = !children.length;
  body(id).replaceChildren(...children);
}
const none = (text) => el("p", { class: "muted" }, text);
function table(heads, rows, label) {
  // A head that begins with # is that of a column of numbers.
  const head = heads.map((name) => el("th", name.startsWith("#") ? { scope: "col", class: "number" } : { scope: "col" }, name.replace(/^#/, "")));
  return el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
}
function tiles(pairs) {
  return el("dl", { class: "tiles" }, ...pairs.map(([name, value, mark]) =>
    el("div", {}, el("dt", {}, name), el("dd", mark ? { class: mark } : {}, String(value)))));
}

// Bars by bucket, oldest first. `parts` are [class, height by bucket], from the bottom; `line` is a level.
function chart(label, parts, top, line) {
  const count = parts[0][1].length, width = 600, height = 64, step = width / count;
  const figure = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none",
    role: "img", "aria-label": label });
  for (let index = 0; index < count; index += 1) {
    let base = height;
    for (const [mark, values] of parts) {
      const size = top > 0 ? (height - 2) * Math.min(1, (values[index] || 0) / top) : 0;
      if (size > 0) figure.append(draw("rect", { class: mark, x: index * step + 0.5, y: base - size,
        width: Math.max(1, step - 1), height: size }));
      base -= size;
    }
  }
  if (line != null) figure.append(draw("line", { class: "s-ink", x1: 0, x2: width, y1: height - (height - 2) * line,
    y2: height - (height - 2) * line, "stroke-dasharray": "6 4", "vector-effect": "non-scaling-stroke" }));
  return figure;
}

function kvBar(stats) {
  const width = 88, whole = Math.max(1, stats.slabs_total);
  const used = width * Math.min(1, stats.slabs_used / whole);
  const cached = Math.min(width - used, (width * stats.slabs_cached) / whole);
  return draw("svg", { width, height: 14, role: "img",
    "aria-label": `KV: ${stats.slabs_used} of ${stats.slabs_total} slabs used, ${stats.slabs_cached} cached` },
  draw("rect", { class: "f-free", width, height: 14 }), draw("rect", { class: "f-good", width: used, height: 14 }),
  draw("rect", { class: "f-cached", x: used, width: cached, height: 14 }));
}

function showService(status) {
  const history = status.history, whole = history.objectives.all?.whole, queue = status.queue;
  const shown = [["Open requests", status.open_requests], ["Sequences", status.sequences],
    ["Waiting for prefill", queue.sequences], ["Predicted wait", seconds(queue.predicted_wait_s),
      queue.predicted_wait_s > queue.max_wait_s ? "bad" : ""], ["Longest wait allowed", seconds(queue.max_wait_s)]];
  for (const [name, title] of LATENCIES) {
    const limit = status.objectives[`${name}_s`], measured = history.latencies[name]?.whole;
    if (limit != null) shown.push([`SLO of ${title}`, seconds(limit)]);
    if (measured) shown.push([`${title}, median of 15 min`, seconds(measured.p50_s)]);
  }
  if (whole) shown.push(["Attainment, 15 min", percent(whole.attainment)]);
  if (whole?.burn != null) shown.push(["Burn, 15 min", `${round(whole.burn, 2)} ×`, whole.burn > 1 ? "bad" : ""]);
  show("service", [shown, status.reasons], () => [tiles(shown),
    ...(status.reasons.length ? [el("ul", {}, ...status.reasons.map((one) => el("li", {}, one)))] : [])]);
}

const LATENCIES = [["ttft", "TTFT"], ["tpot", "TPOT"]];
function showLatency({ latencies, bucket_s }) {
  show("latency", [latencies], () => {
    const measured = LATENCIES.filter(([name]) => latencies[name]);
    if (!measured.length) return [];
    const cell = (value) => el("td", { class: "number" }, String(value));
    const rows = measured.map(([name, title]) => {
      const { recent, whole } = latencies[name];
      return el("tr", {}, el("td", {}, title), cell(whole.answers), cell(seconds(recent.p50_s)), cell(seconds(recent.p90_s)),
        cell(seconds(whole.p50_s)), cell(seconds(whole.p90_s)));
    });
    const charts = measured.flatMap(([name, title]) => {
      const most = Math.max(...latencies[name].p50_s);
      return [el("h3", {}, `${title}, median by ${bucket_s} s: at most ${seconds(most)}`),
        chart(`Median ${title} over the last 15 minutes`, [["f-good", latencies[name].p50_s]], most)];
    });
    return [table(["", "#answers", "#5 min, p50", "#p90", "#15 min, p50", "#p90"], rows, "TTFT and TPOT"), ...charts];
  });
}

const NAMES = { ttft: "TTFT", tpot: "TPOT", all: "All SLOs" };
function showSlo(history, limits) {
  show("slo", [history.objectives, limits, history.target], () => {
    const names = Object.keys(history.objectives);
    if (!names.length) return [];
    const rows = names.map((name) => {
      const { recent, whole } = history.objectives[name], limit = limits[`${name}_s`];
      const cell = (value, burn) => el("td", { class: burn > 1 ? "number bad" : "number" }, value);
      return el("tr", {}, el("td", {}, limit == null ? NAMES[name] : `${NAMES[name]} ≤ ${seconds(limit)}`),
        cell(String(whole.requests)), cell(percent(recent.attainment), recent.burn), cell(round(recent.burn, 2), recent.burn),
        cell(percent(whole.attainment), whole.burn), cell(round(whole.burn, 2), whole.burn));
    });
    const charts = names.flatMap((name) => {
      const { requests, met } = history.objectives[name];
      const share = requests.map((count, index) => (count ? met[index] / count : 0));
      const missed = requests.map((count, index) => (count ? 1 - share[index] : 0));
      return [el("h3", {}, `${NAMES[name]}, by ${history.bucket_s} s`),
        chart(`Attainment of ${NAMES[name]} over the last 15 minutes`, [["f-good", share], ["f-bad", missed]], 1, history.target)];
    });
    return [table(["SLO", "#count", "#5 min", "#burn", "#15 min", "#burn"], rows, "Attainment and burn rate"), ...charts,
      el("p", { class: "muted" }, `Line: the target, ${percent(history.target)}. Upper part of a bar: requests that missed. `
        + "Burn above 1 × spends the error budget too fast.")];
  });
}

function showTraffic(history) {
  show("traffic", [history.answered, history.failed, history.refused, history.left, history.queued, history.predicted_wait_s, history.tokens], () => {
    const lost = history.failed.map((count, index) => count + history.refused[index] + history.left[index]);
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const most = (values) => Math.max(0, ...values);
    const plot = (title, parts) => {
      const top = most(parts[0][1].map((_, index) => sum(parts.map(([, values]) => values[index]))));
      return top > 0 ? [el("h3", {}, title), chart(title, parts, top)] : [];
    };
    return [
      ...plot(`Requests: ${sum(history.answered)} answered, ${sum(lost)} failed, refused or given up`, [["f-good", history.answered], ["f-bad", lost]]),
      ...plot(`Tokens generated: ${sum(history.tokens)}`, [["f-good", history.tokens]]),
      ...plot(`Waiting in the gateway: at most ${most(history.queued)}`, [["f-good", history.queued]]),
      ...plot(`Predicted wait: at most ${seconds(most(history.predicted_wait_s))}`, [["f-good", history.predicted_wait_s]])];
  });
}

// ---- workers

let before = new Map(); // worker -> [incarnation, step_seconds, time in s], of the status before
let shares = new Map(), sharesOf = -1; // the time in s of the status that they are of: it may come twice
function busyShares(workers, now) {
  if (now === sharesOf) return shares;
  sharesOf = now;
  shares = new Map();
  const next = new Map();
  for (const one of workers) {
    const was = before.get(one.worker), spent = one.stats.step_seconds;
    if (was && was[0] === one.incarnation && now > was[2]) shares.set(one.worker, Math.min(1, Math.max(0, (spent - was[1]) / (now - was[2]))));
    next.set(one.worker, [one.incarnation, spent, now]);
  }
  before = next;
  return shares;
}

function lostWorkers(status) {
  const present = new Set(status.workers.map((one) => one.worker)), latest = new Map();
  for (const event of status.fleet_events) if (!latest.has(event.worker)) latest.set(event.worker, event);
  return [...latest.values()].filter((event) => event.what === "lost" && !present.has(event.worker));
}

function workerRow(one, share) {
  const stats = one.stats, stuck = stats.stuck_s > 0;
  const state = stuck ? `stuck ${round(stats.stuck_s, 0)} s` : one.state;
  const number = (value) => el("td", { class: "number" }, String(value));
  return el("tr", { "data-worker": one.worker, "data-state": one.state },
    el("td", { class: "name", title: one.worker }, one.worker),
    el("td", { class: one.state === "up" && !stuck ? "good" : "bad" }, state),
    number(share == null ? "–" : `${Math.round(100 * share)} %`), number(stats.running), number(stats.waiting),
    el("td", {}, kvBar(stats)), number(`${stats.slabs_used} / ${stats.slabs_total}`), number(stats.leases),
    el("td", { class: "name", title: `${one.host} ${one.pid}` }, one.pid ? `${one.host} ${one.pid}` : one.host));
}

function showWorkers(status, now) {
  const shares = busyShares(status.workers, now), lost = lostWorkers(status), heads = ["worker", "state", "#busy", "#running",
    "#waiting", "KV", "#slabs", "#leases", "host, process"];
  const order = (left, right) => left.worker.localeCompare(right.worker, "en", { numeric: true });
  const shown = status.workers.map((one) => [one.worker, one.role, one.state, one.host, one.pid, Math.round(100 * (shares.get(one.worker) ?? -1)),
    one.stats.running, one.stats.waiting, one.stats.slabs_used, one.stats.slabs_cached, one.stats.slabs_total, one.stats.leases, one.stats.stuck_s]);
  show("workers", [shown, lost.map((one) => [one.worker, one.reason]), status.plan.workers, status.split], () => {
    const pools = ["prefill", "decode"].filter((role) => status.plan.workers[role] || status.workers.some((one) => one.role === role));
    const blocks = pools.map((role) => {
      const members = status.workers.filter((one) => one.role === role).sort(order);
      const gone = lost.filter((one) => (one.role || "decode") === role).sort(order);
      const wanted = status.plan.workers[role] ?? 0, title = status.split ? `${role} workers` : "workers, prefill and decode";
      const rows = [...members.map((one) => workerRow(one, shares.get(one.worker))), ...gone.map((one) =>
        el("tr", { "data-worker": one.worker, "data-state": "lost" }, el("td", { class: "name", title: one.worker }, one.worker),
          el("td", { class: "bad" }, "lost"), el("td", { class: "text", colspan: heads.length - 2 }, one.reason)))];
      return el("div", { "data-pool": role },
        el("h3", members.length < wanted ? { class: "bad" } : {}, `${members.length} of ${wanted} ${title}`), table(heads, rows, title));
    });
    return [el("div", { class: "pools" }, ...blocks), el("p", { class: "muted" },
      "KV: dark is held by requests, light is cached prefixes. Busy: the share of the last second in steps of the engine.")];
  });
}

// ---- hand-off, KV, plan, errors

const linkKey = (one) => JSON.stringify([one.source, one.target]);
const linkTitles = new Map(); // the link's key -> its tooltip, which changes without a new drawing
function nameLinks(links) {
  for (const one of links) {
    const title = linkTitles.get(linkKey(one));
    const text = `${one.source} to ${one.target}: ${one.transport}, ${round(one.gb_per_s)} GB/s, ${round(one.latency_us, 0)} µs, ${bytes(one.moved_bytes)} moved`;
    if (title && title.textContent !== text) title.textContent = text;
  }
}

function showHandoff(status) {
  const rank = (names) => [...new Set(names)].sort((left, right) => left.localeCompare(right, "en", { numeric: true }));
  show("handoff", [status.links.map(({ moved_bytes, ...one }) => one), status.links_out.map((one) => [one.source, one.target, one.why]), status.split], () => {
    // Workers that prefill and decode hand no KV off.
    if (!status.split) return [];
    const every = [...status.links, ...status.links_out];
    if (!every.length) return [none("No prefill worker is linked to a decode worker.")];
    const sources = rank(every.map((one) => one.source)), targets = rank(every.map((one) => one.target));
    const links = new Map(status.links.map((one) => [linkKey(one), one]));
    const failed = new Map(status.links_out.map((one) => [linkKey(one), one]));
    linkTitles.clear();
    const numbers = targets.length <= MAX_LABELLED, cell = numbers ? 48 : 20, tall = numbers ? 26 : 20, left = 120, above = 84;
    const fastest = Math.max(1e-9, ...status.links.map((one) => one.gb_per_s));
    const clip = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);
    const figure = draw("svg", { class: "matrix", width: left + cell * targets.length + 60, height: above + tall * sources.length + 4,
      role: "img", "aria-label": `Hand-off links from ${sources.length} prefill to ${targets.length} decode workers: ${status.links.length} in use, ${status.links_out.length} not` });
    targets.forEach((name, column) => {
      const x = left + cell * column + cell / 2, y = above - 6;
      figure.append(draw("text", { x, y, transform: `rotate(-55 ${x} ${y})` }, clip(name), draw("title", {}, name)));
    });
    sources.forEach((name, row) => {
      const y = above + tall * row;
      figure.append(draw("text", { x: left - 6, y: y + tall / 2 + 4, "text-anchor": "end" }, clip(name), draw("title", {}, name)));
      targets.forEach((target, column) => {
        const x = left + cell * column, key = linkKey({ source: name, target }), link = links.get(key), why = failed.get(key);
        const box = { x: x + 1, y: y + 1, width: cell - 2, height: tall - 2 };
        if (link) {
          const share = 0.25 + (0.75 * link.gb_per_s) / fastest, title = draw("title");
          linkTitles.set(key, title);
          figure.append(draw("rect", { ...box, class: "f-good", "fill-opacity": share }, title));
          if (numbers) figure.append(draw("text", { x: x + cell / 2, y: y + tall / 2 + 4, "text-anchor": "middle", class: share > 0.6 ? "on" : "" }, round(link.gb_per_s)));
        } else {
          figure.append(draw("rect", { ...box, class: "f-free" }, draw("title", {}, why ? `${name} to ${target}: ${why.why}` : `${name} to ${target}: no link`)));
          if (why) figure.append(draw("path", { d: `M${x + 5} ${y + 5}l${cell - 10} ${tall - 10}m0 ${10 - tall}l${10 - cell} ${tall - 10}`, class: "s-bad", "stroke-width": 2, fill: "none" }));
        }
      });
    });
    const transports = rank(status.links.map((one) => one.transport)).map((name) => {
      const some = status.links.filter((one) => one.transport === name), speed = some.map((one) => one.gb_per_s);
      return `${name}: ${some.length} links, ${round(Math.min(...speed))} to ${round(Math.max(...speed))} GB/s`;
    });
    return [el("p", { class: "muted" }, `Rows send, columns receive; GB/s measured when a link was opened. ${transports.join("; ")}.`), figure,
      el("ul", {}, ...status.links_out.slice(0, 20).map((one) => el("li", { class: "bad" }, `${one.source} to ${one.target}: ${one.why}`)))];
  });
  nameLinks(status.links);
}

function showKv(status) {
  const classes = new Map();
  for (const one of status.workers) for (const [name, size] of Object.entries(one.kv_classes)) {
    const known = classes.get(name) ?? { workers: 0, slabs: 0, bytes: 0, chunk: new Set() };
    known.workers += 1; known.slabs += size.slabs; known.bytes += size.slabs * size.chunk_bytes; known.chunk.add(size.chunk_bytes);
    classes.set(name, known);
  }
  const pools = Object.entries(status.pools).filter(([, pool]) => pool.workers);
  const shown = [[...classes].map(([name, one]) => [name, one.workers, one.slabs, one.bytes, [...one.chunk]]),
    pools.map(([role, pool]) => [role, pool.slabs_total, pool.slabs_used, pool.slabs_cached, pool.leases, pool.staging_bytes, pool.prefix_hits, pool.prefix_queries])];
  show("kv", shown, () => {
    const number = (value) => el("td", { class: "number" }, String(value));
    const rows = [...classes].sort().map(([name, one]) => el("tr", {}, el("td", { class: "name", title: name }, name), number(one.workers),
      number(one.slabs), number([...one.chunk].map(bytes).join(", ")), number(bytes(one.bytes))));
    const held = pools.map(([role, pool]) => el("tr", {}, el("td", {}, role), el("td", {}, kvBar(pool)), number(pool.slabs_used),
      number(pool.slabs_cached), number(pool.slabs_total), number(pool.leases), number(bytes(pool.staging_bytes)),
      number(pool.prefix_queries ? percent(pool.prefix_hits / pool.prefix_queries) : "–")));
    if (!rows.length && !held.length) return [];
    return [el("div", { class: "pools" }, table(["KV class", "#workers", "#slabs", "#chunk", "#room"], rows, "KV by class"),
      table(["pool", "KV", "#used", "#cached", "#slabs", "#leases", "#on the way", "#prefix hits"], held, "KV by pool"))];
  });
}

function showPlan(plan, split) {
  show("plan", [plan, split], () => {
    const { prefill, decode } = plan.workers, replanner = plan.replanner;
    const counted = (pairs) => Object.entries(pairs).map(([name, count]) => `${name} ${typeof count === "object" ? `(${counted(count)})` : count}`).join(", ") || "none";
    const lines = [split ? `Wanted: ${prefill} prefill and ${decode} decode workers.` : `Wanted: ${decode} workers that prefill and decode.`];
    if (plan.note) lines.push(`Why: ${plan.note}.`);
    if (replanner) {
      lines.push(replanner.reason ? `Last review: ${replanner.reason}` : "The replanner has not decided anything yet.");
      if (Object.keys(replanner.target).length) lines.push(`Its fleet: ${counted(replanner.target)}; expected attainment ${percent(replanner.expected_attainment)}.`);
      lines.push(`Reviews: ${counted(replanner.decisions)}. Changes of traffic: ${counted(replanner.alarms)}. Actions: ${counted(replanner.actions)}.`);
    } else if (!plan.note) lines.push("Why: the settings say so. diptych plan finds the cheapest deployment for an SLO, --replan keeps it fitting.");
    return lines.map((line) => el("p", {}, line));
  });
}

const times = new Map(); // entry -> when it happened, kept so that it does not change with every answer
function timeOf(key, age) {
  if (!times.has(key)) {
    if (times.size > 500) times.clear();
    times.set(key, new Date(Date.now() - 1000 * age).toLocaleTimeString());
  }
  return times.get(key);
}

function showErrors(errors) {
  show("errors", errors.map((one) => [one.request_id, one.code, one.message]), () => {
    if (!errors.length) return [];
    return [table(["time", "status", "code", "request id", "route", "message"], errors.map((one) => el("tr", {},
      el("td", {}, timeOf(one.request_id, one.age_s)), el("td", { class: one.status >= 500 ? "bad" : "" }, String(one.status)), el("td", {}, one.code),
      el("td", {}, el("code", {}, one.request_id)), el("td", { class: "name", title: one.route }, one.route), el("td", { class: "text" }, one.message))), "Last errors"),
    el("p", { class: "muted" }, "The gateway's log has the cause of each under its request id. Of each code the last 8 are kept.")];
  });
}

function showEvents(events) {
  const keyed = events.map((one, index) => [`${one.worker} ${one.what} ${one.reason} ${events.length - index}`, one]);
  show("events", events.map((one) => [one.worker, one.what, one.reason]), () => {
    if (!events.length) return [];
    return [table(["time", "worker", "role", "what", "why"], keyed.map(([key, one]) => el("tr", { "data-event": one.what, "data-worker": one.worker },
      el("td", {}, timeOf(key, one.age_s)), el("td", { class: "name", title: one.worker }, one.worker), el("td", {}, one.role),
      el("td", { class: one.what === "up" ? "good" : "bad" }, one.what), el("td", { class: "text" }, one.reason))), "Last changes of the fleet")];
  });
}

// ---- asking for the status

let key = "", timer = 0, asking = false, delay = POLL_MS, model = "";
const bearer = (own) => (own ? { authorization: `Bearer ${own}` } : {});
function say(text, state) {
  const line = byId("state");
  line.dataset.state = state;
  line.className = state === "ready" ? "good" : state === "empty" ? "muted" : "bad";
  if (line.textContent !== text) line.textContent = text;
}

function showAll(status) {
  model = status.model;
  byId("model").textContent = status.model;
  say(status.ready ? (status.reasons.length ? "Ready, with less than there should be" : "Ready") : "Not ready", status.ready ? "ready" : "not-ready");
  showService(status);
  showLatency(status.history);
  showSlo(status.history, status.objectives);
  showTraffic(status.history);
  showWorkers(status, status.time_s);
  showHandoff(status);
  showKv(status);
  showPlan(status.plan, status.split);
  showErrors(status.errors);
  showEvents(status.fleet_events);
}

async function errorText(answer) {
  const reply = await answer.json().catch(() => null), id = answer.headers.get("x-request-id");
  return `${answer.status}: ${reply?.error?.message ?? answer.statusText}${id ? ` (${id})` : ""}`;
}

async function poll() {
  clearTimeout(timer);
  if (asking || document.visibilityState !== "visible") return;
  asking = true;
  const used = key;
  let again = true;
  try {
    const answer = await fetch(at("status"), { headers: { ...bearer(used), ...SHARED }, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.ok) {
      showAll(await answer.json());
      delay = POLL_MS;
    } else if (answer.status === 401 || answer.status === 403) {
      // Nothing changes until another key is typed.
      again = false;
      say(`The gateway refuses to show its status. ${await errorText(answer)}`, "refused");
    } else {
      delay = Math.min(SLOWEST_MS, 2 * delay);
      say(await errorText(answer), "failed");
    }
  } catch (error) {
    delay = Math.min(SLOWEST_MS, 2 * delay);
    say(`The gateway does not answer; what is shown is old. ${error.message}`, "failed");
  }
  asking = false;
  if (key !== used) poll();
  else if (again) timer = setTimeout(poll, delay);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  delay = POLL_MS;
  poll();
});
document.addEventListener("visibilitychange", poll);

// ---- the playground

let running = null;
// The data of the events of a stream, one after the other.
async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
  }
}

async function servedModel(headers, signal) {
  if (model) return model;
  const answer = await fetch(at("v1/models"), { headers, cache: "no-store", credentials: "omit", signal });
  if (!answer.ok) throw new Error(await errorText(answer));
  return (await answer.json()).data[0].id;
}

async function ask(signal) {
  const headers = { "content-type": "application/json", ...bearer(byId("api-key").value.trim() || key) };
  const line = byId("answer-state"), text = document.createTextNode(""), box = byId("answer");
  box.replaceChildren(text);
  line.className = "muted";
  line.textContent = "Waiting for the first token …";
  const request = { model: await servedModel(headers, signal), stream: true, stream_options: { include_usage: true },
    max_tokens: Number(byId("max-tokens").value) || 128, messages: [{ role: "user", content: byId("prompt").value }] };
  const began = performance.now();
  const answer = await fetch(at("v1/chat/completions"), { method: "POST", headers, body: JSON.stringify(request), credentials: "omit", signal });
  if (!answer.ok) throw new Error(await errorText(answer));
  const id = answer.headers.get("x-request-id");
  let first = null, finish = "", tokens = null;
  for await (const data of readEvents(answer.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(`${chunk.error.code}: ${chunk.error.message} (${id})`);
    const choice = chunk.choices[0], piece = choice?.delta?.content;
    if (piece) {
      first ??= performance.now() - began;
      const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
      text.appendData(piece);
      if (atEnd) box.scrollTop = box.scrollHeight;
      line.textContent = `First token after ${seconds(first / 1000)}, receiving …`;
    }
    finish = choice?.finish_reason ?? finish;
    tokens = chunk.usage?.completion_tokens ?? tokens;
  }
  const took = (performance.now() - began) / 1000;
  line.textContent = `First token after ${seconds(first == null ? null : first / 1000)}, ${tokens ?? "?"} tokens in ${seconds(took)}, ended by ${finish || "?"}. ${id}`;
}

async function send() {
  if (running) return;
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  try {
    await ask(running.signal);
  } catch (error) {
    const stopped = running.signal.aborted;
    byId("answer-state").className = stopped ? "muted" : "bad";
    byId("answer-state").textContent = stopped ? "Stopped." : error.message;
  }
  running = null;
  const atStop = document.activeElement === byId("stop");
  byId("send").disabled = false;
  if (atStop) byId("send").focus();
  byId("stop").disabled = true;
}

byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", () => running?.abort());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });

if (document.documentElement.dataset.needsKey === "true") say("This gateway asks for a key. Type it to see anything.", "empty");
else poll();
})();
