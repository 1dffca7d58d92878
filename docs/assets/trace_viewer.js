// Steps through a step trace (shared/engine/trace.py): queues, batch and KV blocks of every step.
// The page holds recorded traces; others are read from a file of the reader's. Nothing is fetched.
(() => {
  "use strict";
  const root = document.getElementById("trace-steps");
  if (!root) return;
  const VERSION = 1;

  // ---- From lines to states

  function parse(text) {
    const records = text.split("\n").filter((line) => line.trim()).map((line, index) => {
      let record;
      try {
        record = JSON.parse(line);
      } catch (error) {
        throw new Error(`line ${index + 1} is not JSON: ${error.message}`);
      }
      if (record.version !== VERSION || !Array.isArray(record.decodes)) {
        throw new Error(`line ${index + 1} is not a step of trace version ${VERSION}`);
      }
      return record;
    });
    if (!records.length) throw new Error("the trace holds no steps");
    return records;
  }

  // What every step left behind: who holds which block, and how far every sequence is.
  function replay(records) {
    const names = new Map(); // sequence -> number, in order of first appearance
    const see = (name) => names.has(name) || names.set(name, names.size);
    const computed = new Map();
    let blocks = new Map(); // block -> {holders: [name], content: bool}
    const states = records.map((record) => {
      [...record.running, ...record.waiting, ...record.decodes, ...record.preemptions].forEach(see);
      record.prefills.forEach(([name]) => see(name));
      blocks = new Map([...blocks].map(([id, b]) => [id, { ...b, event: "" }]));
      for (const [id, event, name] of record.block_events) {
        see(name);
        const block = blocks.get(id) || { holders: [], content: false, event: "" };
        if (event === "alloc") {
          const evicted = block.event === "evict";
          blocks.set(id, { holders: [name], content: true, event: evicted ? "evict" : "alloc" });
        } else if (event === "hit") {
          blocks.set(id, { holders: [...block.holders, name], content: true, event: "hit" });
        } else if (event === "free") {
          blocks.set(id, { holders: [], content: true, event: "free" });
        } else {
          blocks.set(id, { holders: [], content: false, event: "evict" });
        }
      }
      // A shared block is freed by its last holder only; the others have left without an event.
      const running = new Set(record.running);
      for (const block of blocks.values()) {
        block.holders = block.holders.filter((name) => running.has(name));
      }
      record.preemptions.forEach((name) => computed.delete(name));
      record.prefix_hits.forEach(([name, tokens]) => computed.set(name, tokens));
      record.prefills.forEach(([name, start, length]) => computed.set(name, start + length));
      record.decodes.forEach((name) => computed.set(name, (computed.get(name) || 0) + 1));
      return { record, blocks: new Map(blocks), computed: new Map(computed) };
    });
    const held = ({ blocks: all }) => [...all.values()].filter((b) => b.holders.length).length;
    const pool = Math.max(...states.map((s) => s.record.free_blocks + held(s)));
    const used = Math.max(-1, ...records.flatMap((r) => r.block_events.map(([id]) => id))) + 1;
    return { states, names: [...names.keys()], pool, shown: Math.min(pool, Math.max(used, 1)) };
  }

  const milliseconds = (r) => r.schedule_ms + r.forward_ms + r.wait_ms;
  const numPrefilled = (r) => r.prefills.reduce((sum, [, , length]) => sum + length, 0);

  // ---- The page

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function shape(tag, attributes, parent) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    parent.append(node);
    return node;
  }

  root.innerHTML = `
    <div class="tv-bar">
      <label>trace <select class="tv-choice" aria-label="recorded trace"></select></label>
      <label class="tv-open">open a file <input type="file" accept=".jsonl,.json,.txt"></label>
    </div>
    <p class="tv-error" role="alert" hidden></p>
    <div class="tv-bar">
      <button class="tv-first" title="first step">|&lt;</button>
      <button class="tv-back" title="step back (left arrow)">&lt;</button>
      <button class="tv-play" title="play">play</button>
      <button class="tv-next" title="next step (right arrow)">&gt;</button>
      <button class="tv-last" title="last step">&gt;|</button>
      <input class="tv-slider" type="range" min="0" value="0" aria-label="step">
      <output class="tv-where"></output>
    </div>
    <svg class="tv-timeline" viewBox="0 0 900 96" preserveAspectRatio="none" role="img"
      aria-label="tokens of every step"></svg>
    <p class="tv-legend"><i class="tv-decode"></i> decode tokens <i class="tv-prefill"></i> prompt tokens
      <i class="tv-kv"></i> share of the pool in use. Width: the step's time. Click to go there.</p>
    <p class="tv-facts"></p>
    <h3>Batch</h3><div class="tv-batch"></div>
    <h3>Queues</h3><div class="tv-queues"></div>
    <h3>KV blocks</h3><p class="tv-pool"></p><div class="tv-blocks"></div>
    <p class="tv-legend"><b class="tv-new">new</b> taken in this step <b class="tv-hit">hit</b> found by its
      content <b class="tv-evict">evict</b> taken, old content lost <b class="tv-left">left</b> free, content
      still there <b>two colours</b> shared</p>`;
  const find = (name) => root.querySelector(name);
  const choice = find(".tv-choice"), slider = find(".tv-slider"), timeline = find(".tv-timeline");
  const error = find(".tv-error"), play = find(".tv-play");

  let trace = null, step = 0, timer = 0;
  const hue = (name) => (trace.names.indexOf(name) * 137.5 + 205) % 360;
  const colour = (name) => `hsl(${hue(name)} 52% 52%)`;

  function chip(name, detail) {
    const node = make("span", "tv-chip", detail ? `${name} ${detail}` : name);
    node.style.setProperty("--of", colour(name));
    return node;
  }

  function drawTimeline() {
    timeline.replaceChildren();
    const records = trace.states.map((s) => s.record);
    const total = records.reduce((sum, r) => sum + milliseconds(r), 0) || 1;
    const tokens = (r) => r.decodes.length + numPrefilled(r);
    const most = Math.max(...records.map(tokens), 1);
    // Square root: one decode stays visible beside a prompt of a thousand tokens.
    const height = (n) => 74 * Math.sqrt(n / most);
    let x = 0, line = "";
    records.forEach((record, index) => {
      const width = Math.max((900 * milliseconds(record)) / total, 0.5);
      const group = shape("g", { class: "tv-step", "data-step": index }, timeline);
      const gap = width > 4 ? 1 : 0;
      const all = height(tokens(record));
      const decodes = all * (record.decodes.length / Math.max(tokens(record), 1));
      const column = { x, width: width - gap };
      shape("rect", { ...column, y: 80 - decodes, height: decodes, class: "tv-decode" }, group);
      shape("rect", { ...column, y: 80 - all, height: all - decodes, class: "tv-prefill" }, group);
      shape("rect", { ...column, y: 84, height: 8, class: record.graph ? "tv-graph" : "tv-eager" }, group);
      shape("rect", { x, width, y: 0, height: 96, class: "tv-target" }, group);
      const y = 80 - 74 * (1 - record.free_blocks / trace.pool);
      line += `${line ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}L${(x + width).toFixed(1)},${y.toFixed(1)}`;
      x += width;
    });
    shape("path", { d: line, class: "tv-kv" }, timeline);
  }

  function draw() {
    const { record, blocks, computed } = trace.states[step];
    slider.value = step;
    find(".tv-where").textContent = `step ${record.step} of ${trace.states.at(-1).record.step}`;
    timeline.querySelectorAll(".tv-step").forEach((node, i) => node.classList.toggle("tv-here", i === step));

    const prefilled = numPrefilled(record);
    find(".tv-facts").textContent =
      `${(record.time * 1e3).toFixed(1)} ms: ${record.decodes.length} decodes, ${prefilled} prompt tokens in ` +
      `${record.prefills.length} chunks, ${record.graph ? "CUDA graph" : "eager"}. Schedule ` +
      `${record.schedule_ms.toFixed(2)} ms, forward ${record.forward_ms.toFixed(2)} ms, wait ` +
      `${record.wait_ms.toFixed(2)} ms.` +
      (record.prefix_hits.length
        ? ` Prefix hits: ${record.prefix_hits.map(([n, t]) => `${n} ${t} tokens`).join(", ")}.` : "") +
      (record.preemptions.length ? ` Preempted: ${record.preemptions.join(", ")}.` : "");

    const batch = find(".tv-batch");
    batch.replaceChildren();
    for (const name of record.decodes) {
      const row = chip(name, "decode");
      row.classList.add("tv-row");
      row.style.flexGrow = 0;
      batch.append(row);
    }
    for (const [name, start, length] of record.prefills) {
      const row = chip(name, `${start}..${start + length} (${length})`);
      row.classList.add("tv-row", "tv-chunk");
      row.style.flexGrow = length;
      batch.append(row);
    }

    const queues = find(".tv-queues");
    queues.replaceChildren();
    const lists = [["running", record.running], ["waiting", record.waiting]];
    for (const [label, names] of lists) {
      const line = make("div", "tv-queue");
      line.append(make("span", "tv-label", `${label} (${names.length})`));
      for (const name of names) {
        line.append(chip(name, label === "running" ? `${computed.get(name) || 0} computed` : ""));
      }
      queues.append(line);
    }

    const grid = find(".tv-blocks");
    grid.replaceChildren();
    let inUse = 0, shared = 0;
    for (let id = 0; id < trace.shown; id += 1) {
      const block = blocks.get(id) || { holders: [], content: false, event: "" };
      const cell = make("span", "tv-block", String(id));
      if (block.holders.length) {
        inUse += 1;
        const [first, second] = block.holders;
        cell.style.background = second
          ? `linear-gradient(135deg, ${colour(first)} 50%, ${colour(second)} 50%)` : colour(first);
        cell.classList.add("tv-held");
        if (second) shared += 1;
      } else if (block.content) cell.classList.add("tv-left");
      if (block.event) cell.classList.add(`tv-${block.event}`);
      cell.title = `block ${id}: ${block.holders.join(", ") || (block.content ? "free, content left" : "free")}`;
      grid.append(cell);
    }
    find(".tv-pool").textContent =
      `${inUse} of ${trace.pool} blocks in use, ${shared} shared, ${record.free_blocks} free` +
      (trace.shown < trace.pool ? `; the ${trace.shown} that this trace ever uses are shown.` : ".");
    root.dataset.step = step;
  }

  function go(to) {
    step = Math.min(Math.max(to, 0), trace.states.length - 1);
    draw();
  }

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "play";
  }

  function show(text) {
    stop();
    try {
      trace = replay(parse(text));
      error.hidden = true;
    } catch (problem) {
      error.textContent = `This file cannot be shown: ${problem.message}.`;
      error.hidden = false;
      return;
    }
    slider.max = trace.states.length - 1;
    drawTimeline();
    go(0);
  }

  // ---- Controls

  const recorded = [...document.querySelectorAll("script.recorded-trace")];
  for (const script of recorded) {
    const [stage, scenario] = script.dataset.name.split("__");
    choice.append(new Option(`${stage}: ${scenario.replaceAll("_", " ")}`, script.dataset.name));
  }
  const load = () => {
    show(recorded.find((script) => script.dataset.name === choice.value).textContent);
    history.replaceState(null, "", `#${choice.value}`);
  };
  choice.addEventListener("change", load);
  find("input[type=file]").addEventListener("change", async (event) => {
    const file = event.target.files[0];
    if (!file) return;
    const label = `file: ${file.name}`;
    if (!choice.querySelector("option[value=file]")) choice.append(new Option(label, "file"));
    show(await file.text());
  });
  slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
  find(".tv-first").addEventListener("click", () => { stop(); go(0); });
  find(".tv-last").addEventListener("click", () => { stop(); go(Infinity); });
  find(".tv-back").addEventListener("click", () => { stop(); go(step - 1); });
  find(".tv-next").addEventListener("click", () => { stop(); go(step + 1); });
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (step === trace.states.length - 1) go(0);
    play.textContent = "stop";
    timer = setInterval(() => (step < trace.states.length - 1 ? go(step + 1) : stop()), 350);
  });
  timeline.addEventListener("click", (event) => {
    const group = event.target.closest(".tv-step");
    if (group) { stop(); go(Number(group.dataset.step)); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowRight") { stop(); go(step + 1); }
    if (event.key === "ArrowLeft") { stop(); go(step - 1); }
  });

  const wanted = location.hash.slice(1);
  if (recorded.some((script) => script.dataset.name === wanted)) choice.value = wanted;
  load();
})();
