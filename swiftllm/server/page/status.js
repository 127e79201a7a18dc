// Fetches the server's numbers once a second while the page is visible, and shows them.

const POLL_MS = 1000, SPAN_S = 300;
const STRATEGIES = {
  "gpu-only": "GPU-only: nothing was computed on the CPU. Either no request's cache is in host memory, or its attention would have slowed the iteration down.",
  "asymmetric-pipelining": "Asymmetric pipelining: CPU requests go through all layers in step with the GPU batch. Their attention runs on the CPU while the other requests' linear layers run in the GPU batch; where the CPU is late, the GPU batch waits.",
  "asynchronous-overlap": "Asynchronous overlap: CPU requests join when the GPU batch passes their layer and their attention is ready, one layer an iteration. The GPU batch never waits for them.",
};
const TIMELINE_LEGEND = [
  { title: "linear layers of all requests", colour: "c-gpu" }, { title: "attention of GPU requests", colour: "c-gpu-soft" },
  { title: "attention of CPU requests (a stripe below: they join the GPU batch)", colour: "c-cpu" },
  { title: "CPU requests' linear layers by themselves", colour: "c-pipe" }, { title: "the GPU batch waits", colour: "c-bad" },
];
const FINISHED = {
  stop: "ended by a stop", length: "ended at their length limit", abort: "aborted by the client", deadline: "past their deadline",
  engine_error: "failed", stalled: "stalled", shutdown: "ended by shutdown", slo_unattainable: "refused for their targets",
};

const OPERATIONS = { gpu_batch: "the GPU batch", cpu_attention: "CPU attention" };

const byId = (id) => document.getElementById(id);
const rate = (name, scale = 1) => (a, b) => scale * (b[name] - a[name]) / (b.time_s - a.time_s);
const perIteration = (name) => (a, b) => (b.iterations > a.iterations && b[name] > a[name] ? 1000 * (b[name] - a[name]) / (b.iterations - a.iterations) : null);
const share = (name) => (a, b) => (b.iterations > a.iterations ? 100 * (b[name] - a[name]) / (b.iterations - a.iterations) : 0);
const busy = (name) => (a, b) => Math.min(100, rate(name, 100)(a, b));
const level = (name) => (a, b) => b[name];

const state = { samples: [], timeline: null, engine: {}, cursor: null };
const onHover = (cursor) => { state.cursor = cursor; drawCharts(); };
const inUse = (tier) => (a, b) => (state.engine[`num_${tier}_blocks`] ? 100 * b[`${tier}_blocks_used`] / state.engine[`num_${tier}_blocks`] : null);
const charts = [
  { title: "Output tokens per second", stacked: true, series: [{ title: "tokens/s", colour: "c-gpu", value: rate("output_tokens") }] },
  { title: "Requests, by where their KV cache is", stacked: true, series: [
    { title: "GPU memory", colour: "c-gpu", value: level("running_gpu") }, { title: "host memory", colour: "c-cpu", value: level("running_cpu") },
    { title: "waiting", colour: "c-wait", value: level("waiting") }] },
  { title: "KV cache blocks in use", unit: "%", largest: 100, series: [
    { title: "GPU memory", colour: "c-gpu", value: inUse("gpu") }, { title: "host memory", colour: "c-cpu", value: inUse("cpu") }] },
  { title: "Strategy of the iterations", unit: "%", largest: 100, stacked: true, series: [
    { title: "GPU-only", colour: "c-gpu", value: share("gpu-only") }, { title: "pipelining", colour: "c-pipe", value: share("asymmetric-pipelining") },
    { title: "overlap", colour: "c-overlap", value: share("asynchronous-overlap") }] },
  { title: "Busy time", unit: "%", largest: 100, series: [
    { title: "GPU batch", colour: "c-gpu", value: busy("gpu_batch_busy_s") }, { title: "CPU worker", colour: "c-cpu", value: busy("cpu_busy_s") }] },
  { title: "Time of an iteration", unit: " ms", series: [
    { title: "measured", colour: "c-gpu", value: perIteration("duration_s") }, { title: "predicted", colour: "c-ink", dashed: true, value: perIteration("predicted_s") }] },
].map((description) => new Chart(byId("charts"), { ...description, onHover }));

function drawCharts() {
  const there_s = state.samples.length ? state.samples.at(-1).time_s - state.samples[0].time_s : 0;
  const span_s = Math.min(SPAN_S, Math.max(60, 60 * Math.ceil(there_s / 60)));
  for (const chart of charts) chart.draw(state.samples, span_s, state.cursor);
}

function counted(number, words, noun = "request") {
  return `${format(number)} ${noun}${number === 1 ? "" : "s"}${words}`;
}

function showBig(id, number) {
  byId(id).replaceChildren(format(number), " ", htmlElement("small", "", number === 1 ? "request" : "requests"));
}

function showTier(tier, used, cached, total) {
  const percent = total ? 100 * used / total : 0, {kv_bytes_per_block, cpu_kv_bytes_per_block} = state.engine;
  const bytes = used * (tier === "cpu" ? cpu_kv_bytes_per_block : kv_bytes_per_block);
  const meter = byId(`${tier}-meter`);
  meter.firstElementChild.style.width = `${percent}%`;
  meter.setAttribute("aria-valuenow", Math.round(percent));
  const size = bytes >= 2 ** 30 ? format(bytes / 2 ** 30, " GiB") : format(bytes / 2 ** 20, " MiB");
  byId(`${tier}-blocks`).textContent = total ? `${format(used)} of ${format(total)} blocks in use, ${size}` +
    (cached ? `; ${format(cached)} more keep prefixes` : "") : "no blocks here";
}

// What predictions are multiplied by; nothing for a system that predicts nothing.
function corrections(factors) {
  const parts = Object.entries(factors).map(([operation, factor]) => `${format(factor)} for ${OPERATIONS[operation] || operation}`);
  return parts.length ? ` Operations take as long as in the profile, times ${parts.join(" and ")}.` : "";
}

// A row for each service class, once there has been a best-effort request, and the targets of systems that have any.
function showClasses(classes, slo) {
  const rows = Object.entries(classes);
  byId("targets").textContent = slo ? `Targets: first token within ${slo.ttft_s} s, then ${slo.tpot_s} s a token.` : "";
  byId("classes").hidden = !rows.length;
  byId("class-rows").replaceChildren(...rows.map(([name, counts]) => {
    const row = htmlElement("tr"), title = htmlElement("th", "", name);
    title.scope = "row";
    const numbers = [counts.waiting, counts.running_gpu, counts.running_cpu, counts.output_tokens];
    row.append(title, ...numbers.map((number) => htmlElement("td", "", format(number))));
    return row;
  }));
}

// Found in the prefix cache, of all prompt tokens; nothing where there is none.
function cacheTotals({ prefix_queries: asked, prefix_hits: found }) {
  const ofTier = (tier) => [`prompt tokens found cached in ${tier === "gpu" ? "GPU" : "host"} memory`, found[tier] || 0];
  const hits = (found.gpu || 0) + (found.cpu || 0);
  return asked ? [...["gpu", "cpu"].map(ofTier), ["% of prompt tokens found cached", Math.round(100 * hits / asked)]] : [];
}

function showNow({ model, engine, now }) {
  document.title = `APEX: ${model}`;
  byId("model").textContent = model;
  const pill = byId("health");
  pill.className = `pill ${now.health.status === "ok" ? "ok" : "bad"}`;
  pill.textContent = (now.health.status === "ok" ? "serving" : now.health.status) + ` for ${duration(now.uptime_s)}`;
  pill.title = now.health.reason;
  byId("facts").textContent =
    `System ${engine.system}, ${engine.dtype}, GPU batch on ${engine.device}, CPU attention with ${counted(engine.cpu_threads, "", "thread")} of kernel ` +
    `${engine.cpu_kernel}, blocks of ${engine.block_size} tokens` + (engine.device_type === "cpu" ? ". Without a GPU, the CPU's cores run the GPU batch." : ".") +
    corrections(now.prediction_factors);
  byId("cpu-note").textContent = engine.decodes_on_cpu
    ? "Their attention is computed by the CPU worker, while the GPU batch continues."
    : "They wait here until GPU memory is free again: this system computes nothing on the CPU.";
  showBig("waiting", now.waiting);
  showBig("running-gpu", now.running_gpu);
  showBig("running-cpu", now.running_cpu);
  showTier("gpu", now.gpu_blocks_used, now.gpu_blocks_cached, engine.num_gpu_blocks);
  showTier("cpu", now.cpu_blocks_used, now.cpu_blocks_cached, engine.num_cpu_blocks);
  showClasses(now.classes, engine.slo);
  const finished = Object.entries(now.finished).map(([reason, count]) => [`requests ${FINISHED[reason] || reason}`, count]);
  const totals = [
    ["prompt tokens", now.prompt_tokens], ...cacheTotals(now), ["output tokens", now.output_tokens], ["iterations", now.iterations], ...finished,
    ["requests refused", now.refused], ["requests preempted", now.preemptions], ["blocks moved between tiers", now.swapped_blocks],
    ["iterations that failed", now.step_failures], ["CPU workers restarted", now.worker_restarts],
  ];
  byId("totals").replaceChildren(...totals.map(([title, value]) => {
    const entry = htmlElement("div");
    entry.append(htmlElement("dt", "", title), htmlElement("dd", "", format(value)));
    return entry;
  }));
}

function duration(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  return days ? `${days} d ${hours} h` : hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

function showTimeline(records) {
  const timeline = state.timeline;
  byId("gantt-legend").hidden = !timeline;
  if (!timeline) {
    byId("strategy").textContent = records ? "Nothing has run since this page was opened." : "This server records no timelines.";
    return;
  }
  byId("strategy").textContent = STRATEGIES[timeline.strategy] || timeline.strategy;
  const predicted = timeline.predicted_ms ? `, predicted ${format(timeline.predicted_ms)} ms` : "";
  const prompts = timeline.prefill_tokens ? ` and ${counted(timeline.prefill_tokens, "", "prompt token")}` : "";
  byId("iteration").textContent =
    `Iteration ${format(timeline.iteration)}, ${timeline.num_layers} layers: ${format(timeline.duration_ms)} ms${predicted}. In the GPU batch ` +
    `${counted(timeline.gpu_batch_decodes, " of GPU memory")}${prompts}, beside it ${counted(timeline.cpu_requests, " of host memory")}.`;
  drawGantt(byId("gantt"), timeline);
}

function take(answer) {
  if (state.samples.length && answer.now.time_s < state.samples.at(-1).time_s) state.samples = []; // the server has been restarted
  state.engine = answer.engine;
  for (const row of answer.history) state.samples.push(Object.fromEntries(answer.columns.map((name, i) => [name, row[i]])));
  state.samples = state.samples.filter((sample) => sample.time_s >= answer.now.time_s - SPAN_S);
  if (answer.timeline) state.timeline = answer.timeline;
  showNow(answer);
  drawCharts();
  showTimeline(answer.records);
}

async function poll() {
  if (!document.hidden) {
    const query = new URLSearchParams({ iteration: state.timeline ? state.timeline.iteration : -1 });
    if (state.samples.length) query.set("since_s", state.samples.at(-1).time_s);
    try {
      const response = await fetch(`/status.json?${query}`, { signal: AbortSignal.timeout(10 * POLL_MS) });
      if (!response.ok) throw new Error(`status ${response.status}`);
      take(await response.json());
    } catch (error) {
      byId("health").className = "pill bad";
      byId("health").textContent = "no answer";
      byId("health").title = String(error);
    }
  }
  setTimeout(poll, POLL_MS);
}

byId("gantt-legend").replaceChildren(...TIMELINE_LEGEND.map((one) => legendItem(one)));
addEventListener("resize", () => { drawCharts(); if (state.timeline) showTimeline(true); });
poll();
