"use strict";
// Draws GET /v1/state every two seconds. Everything goes in as text, never as markup.
const PERIOD_MS = 2000;
let key = sessionStorage.getItem("key") || "";
let timer = 0;

const find = (selector) => document.querySelector(selector);
const number = (value, digits = 0) => (value === null || value === undefined ? "-" : Number(value).toFixed(digits));
const ms = (value) => (value === null || value === undefined ? "-" : number(value, 1) + " ms");

function row(cells, bad = []) {
  const line = document.createElement("tr");
  cells.forEach((cell, index) => {
    const data = document.createElement("td");
    data.textContent = cell;
    if (bad.includes(index)) data.className = "bad";
    line.append(data);
  });
  return line;
}

function fill(id, rows) {
  find(`#${id} tbody`).replaceChildren(...rows);
}

function curve(points, field, title) {
  const figure = document.createElement("figure");
  const values = points.filter((point) => point[field] !== null && point[field] !== undefined);
  const caption = document.createElement("figcaption");
  const last = values.length ? values[values.length - 1][field] : null;
  caption.textContent = `${title}: ${last === null ? "not recorded" : Number(last).toPrecision(3)}`;
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawing.setAttribute("viewBox", "0 0 100 100");
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("aria-label", caption.textContent);
  if (values.length) {
    const heights = values.map((point) => point[field]);
    const low = Math.min(...heights), high = Math.max(...heights);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const at = (height, index) =>
      `${(100 * index) / Math.max(1, values.length - 1)},${high === low ? 50 : 97 - (94 * (height - low)) / (high - low)}`;
    line.setAttribute("points", heights.map(at).join(" "));
    drawing.append(line);
  }
  figure.append(drawing, caption);
  return figure;
}

function draw(state) {
  fill("engines", state.engines.map((engine) => row([
    engine.name + (engine.up ? (engine.draining ? " (draining)" : "") : " (down)"), number(engine.slots_used),
    number(engine.running), number(engine.waiting), number(100 * (engine.kv_usage || 0), 1) + " %",
    number(engine.rollout_seats), number(engine.seat_cuts), number(engine.mixed_steps),
  ], engine.up ? [] : [0])));
  fill("tenants", state.tenants.map((tenant) => row([
    tenant.name, number(tenant.requests), number(tenant.errors), number(tenant.prompt_tokens),
    number(tenant.completion_tokens), ms(tenant.ttft_ms_p50), ms(tenant.ttft_ms_p99),
    tenant.p99_ttft_ms ? ms(tenant.p99_ttft_ms) : "-", ms(tenant.tpot_ms_p50), ms(tenant.queue_ms_p99), tenant.weight,
  ], tenant.p99_ttft_ms && tenant.ttft_ms_p99 > tenant.p99_ttft_ms ? [6] : [])));
  fill("adapters", state.adapters.map((adapter) => row([
    adapter.owner || "(shared)", adapter.name, adapter.version, adapter.digest.slice(0, 12), adapter.rank,
    adapter.engines.join(", ") || "-",
  ])));
  fill("store", Object.entries(state.store).map(([what, value]) => row([what, value])));
  find("#jobs").replaceChildren(...state.jobs.map((job) => {
    const block = document.createElement("div");
    block.className = "job";
    const name = document.createElement("strong");
    name.textContent = `${job.name} (${job.versions} versions)`;
    block.append(name, curve(job.points, "reward", "reward"), curve(job.points, "mismatch", "mismatch"));
    return block;
  }));
}

async function show() {
  window.clearTimeout(timer);
  try {
    const answer = await fetch("v1/state", { headers: { Authorization: `Bearer ${key}` } });
    const body = await answer.json();
    if (!answer.ok) {
      find("#status").textContent = body.error.message;
      if (answer.status === 401 || answer.status === 403) {
        sessionStorage.removeItem("key");
        find("#state").hidden = true;
        find("#login").hidden = false;
        return;
      }
    } else {
      sessionStorage.setItem("key", key);
      draw(body);
      find("#status").textContent = `${number(body.running)} requests running, ${body.replicas.length} routers, ${new Date().toLocaleTimeString()}`;
      find("#state").hidden = false;
      find("#login").hidden = true;
    }
  } catch (err) {
    find("#status").textContent = `no answer: ${err.message}`;
  }
  timer = window.setTimeout(show, PERIOD_MS);
}

find("#login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("#key").value;
  show();
});
if (key) show();
