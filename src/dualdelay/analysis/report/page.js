"use strict";
// The pictures of a report. All that it draws is in the element "data"; a text of a run goes in as text, never as HTML.
(() => {
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);

  // --- numbers and texts ---

  const TYPES = { f8: Float64Array, f4: Float32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
  const unpack = (column) => {
    if (!column.values) {
      const bytes = Uint8Array.from(atob(column.b), (letter) => letter.charCodeAt(0));
      column.values = new TYPES[column.t](bytes.buffer);
    }
    return column.values;
  };
  const shown = (value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "-";
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
    return String(Number(value.toPrecision(5)));
  };
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;"); // the library reads <b> and <a> in texts
  const short = (text) => (text.length > 70 ? text.slice(0, 45) + " … " + text.slice(-20) : text);
  const named = (name) => name.replace(/_/g, " ");
  const option = (text, value) => Object.assign(document.createElement("option"), { textContent: text, value });

  // --- colours ---

  const rgb = (colour) => {
    if (colour.startsWith("#")) return [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
    return colour.match(/[\d.]+/g).slice(0, 3).map(Number);
  };
  const light = (colour) => {
    const [r, g, b] = rgb(colour).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const mixed = (colour, other, share) => {
    const there = rgb(other);
    return "#" + rgb(colour).map((part, k) => Math.round(part + (there[k] - part) * share).toString(16).padStart(2, "0")).join("");
  };
  const faded = (colour, opacity) => `rgba(${rgb(colour).join(",")},${opacity})`;
  let theme = {};
  const readTheme = () => {
    const of = (element, name) => getComputedStyle(element)[name];
    theme = { paper: of(document.body, "backgroundColor"), ink: of(document.body, "color") };
    theme.dark = light(theme.paper) < 0.2;
    theme.faint = of(document.querySelector(".note"), "color");
    theme.line = of(document.querySelector("footer"), "borderTopColor");
  };
  const visible = (colour) => { // a method's colour, moved away from the paper as far as it must be to be seen
    for (let share = 0; share <= 1; share += 0.08) {
      const tried = mixed(colour, theme.dark ? "#ffffff" : "#000000", share);
      if (contrast(tried, theme.paper) >= 3) return tried;
    }
    return theme.ink;
  };
  const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
  const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
  const along = (scale, share) => {
    const place = Math.max(0, Math.min(0.9999, share)) * (scale.length - 1);
    return mixed(scale[Math.floor(place)], scale[Math.floor(place) + 1], place % 1);
  };
  const MARKS = ["circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "pentagon", "star", "hexagon"];

  // --- a picture: drawn, zoomed, walked through with the keyboard, and written out as a table ---

  const BUTTONS = 36; // what the library's buttons need above a picture, or they cover what stands at its top
  const views = {};
  const trace = (heads, rows, more) => ({ // rows: the texts that the point's hover and the table of numbers have
    heads, rows, hoverinfo: "text",
    hovertext: rows.map((row) => row.map((cell, k) => (heads[k] ? `${heads[k]}: ${plain(cell)}` : `<b>${plain(short(cell))}</b>`)).join("<br>")),
    ...more,
  });
  const axis = (title, more) => ({
    title: { text: plain(title), standoff: 8 }, gridcolor: theme.line, linecolor: theme.faint, zeroline: false, ticks: "outside",
    tickcolor: theme.line, automargin: true, exponentformat: "power", ...more,
  });
  const draw = (id, traces, layout, key, said) => {
    const place = $(id), view = (views[id] ??= { resets: 0 });
    const narrow = place.clientWidth < 560;
    view.traces = traces;
    view.at = null;
    const whole = {
      paper_bgcolor: theme.paper, plot_bgcolor: theme.paper, font: { family: "inherit", size: 13, color: theme.ink },
      margin: { l: narrow ? 48 : 64, r: narrow ? 8 : 16, t: narrow ? 10 : BUTTONS, b: 48 }, showlegend: false, hovermode: "closest", dragmode: "zoom",
      hoverlabel: { bgcolor: theme.paper, bordercolor: theme.faint, font: { family: "inherit", size: 13, color: theme.ink }, align: "left", namelength: -1 },
      uirevision: `${key}/${view.resets}`, ...structuredClone(layout), // a zoom writes into what it was given
    };
    const config = { displaylogo: false, responsive: true, doubleClick: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], displayModeBar: narrow ? false : "hover" };
    view.redraw = () => { view.resets += 1; draw(id, traces, layout, key, said); };
    $(`${id}-said`).textContent = said;
    Plotly.react(place, traces, whole, config);
    if (!view.listens) {
      view.listens = true;
      place.on("plotly_doubleclick", () => view.redraw());
    }
    const details = document.querySelector(`details[data-table="${id}"]`);
    if (details.open) fill(details);
  };
  const move = (id, what) => {
    const place = $(id), full = place._fullLayout, change = {};
    if (what === "reset") return views[id].redraw();
    for (const name of ["xaxis", "yaxis"]) {
      const [from, to] = full[name].range.map(Number), middle = (from + to) / 2, half = (to - from) / 2;
      if (full[name].fixedrange) continue;
      if (what === "left" || what === "right") {
        if (name === "xaxis") change[`${name}.range`] = [from, to].map((end) => end + (what === "right" ? half : -half));
      } else {
        const factor = what === "in" ? 0.5 : 2;
        change[`${name}.range`] = [middle - half * factor, middle + half * factor];
      }
    }
    return Plotly.relayout(place, change);
  };
  const walk = (id, key) => {
    const view = views[id], places = view.traces.map((one, k) => (one.rows && one.rows.length ? k : -1)).filter((k) => k >= 0);
    if (!places.length) return;
    let { curve, point } = view.at ?? { curve: 0, point: -1 };
    const count = () => view.traces[places[curve]].rows.length;
    if (key === "ArrowUp" || key === "ArrowDown") {
      curve = (curve + (key === "ArrowDown" ? 1 : places.length - 1)) % places.length;
      point = Math.max(0, Math.min(point, count() - 1));
    } else if (key === "Home" || key === "End") point = key === "Home" ? 0 : count() - 1;
    else point = Math.max(0, Math.min(count() - 1, point + (key === "ArrowRight" ? 1 : -1)));
    view.at = { curve, point };
    const one = view.traces[places[curve]];
    Plotly.Fx.hover($(id), [{ curveNumber: places[curve], pointNumber: point }]);
    $(`${id}-point`).textContent = one.rows[point].map((cell, k) => (one.heads[k] ? `${one.heads[k]} ${cell}` : cell)).join(", ");
  };
  const fill = (details) => {
    const most = 600, table = document.createElement("table"), view = views[details.dataset.table];
    const traces = view.traces.filter((one) => one.rows && one.rows.length);
    let left = most, total = 0, heads = "";
    for (const one of traces) {
      total += one.rows.length;
      if (left > 0 && heads !== one.heads.join()) {
        heads = one.heads.join();
        const row = table.insertRow();
        for (const head of one.heads) row.append(Object.assign(document.createElement("th"), { textContent: head || "what", scope: "col" }));
      }
      for (const cells of one.rows.slice(0, Math.max(left, 0))) {
        const row = table.insertRow();
        for (const cell of cells) row.insertCell().textContent = cell;
      }
      left -= one.rows.length;
    }
    const said = document.createElement("p");
    said.className = "note";
    said.textContent = total > most ? `The first ${most} of ${shown(total)} points.` : `${shown(total)} points.`;
    details.querySelector(".scroll").replaceChildren(said, table);
  };
  for (const details of document.querySelectorAll("details[data-table]")) {
    details.addEventListener("toggle", () => details.open && fill(details));
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-do]");
    if (button) move(button.dataset.plot, button.dataset.do);
  });
  for (const place of document.querySelectorAll(".plot")) {
    place.addEventListener("keydown", (event) => {
      if (event.target !== place || event.ctrlKey || event.metaKey || event.altKey) return;
      const does = { "+": "in", "=": "in", "-": "out", 0: "reset" }[event.key];
      if (does) move(place.id, does);
      else if (/^(Arrow|Home|End)/.test(event.key)) walk(place.id, event.key);
      else return;
      event.preventDefault();
    });
    place.addEventListener("blur", () => { if (place.data) Plotly.Fx.unhover(place); });
  }

  // --- curves ---

  const value = (id, otherwise) => ($(id) ? $(id).value : otherwise);
  const hidden = new Set();
  const groups = (setting, metric) => { // the runs of each label; not all have every metric
    const found = new Map();
    for (const run of data.runs) {
      if (run.setting === setting && (!metric || run.columns[metric])) found.set(run.label, [...(found.get(run.label) ?? []), run]);
    }
    return found;
  };
  const over = (runs, x, y) => { // at every time of any run, until the first of them ends; between evaluations the earlier stands
    const all = runs.map((run) => [unpack(run.columns[x]), unpack(run.columns[y])]).filter(([xs]) => xs.length);
    if (!all.length) return { grid: [], values: [] };
    const end = Math.min(...all.map(([xs]) => xs[xs.length - 1]));
    const begin = Math.max(...all.map(([xs]) => xs[0]));
    const grid = [...new Set(all.flatMap(([xs]) => [...xs]))].filter((at) => at <= end && at >= begin).sort((a, b) => a - b);
    const values = all.map(([xs, ys]) => {
      let k = 0;
      return grid.map((at) => {
        while (k + 1 < xs.length && xs[k + 1] <= at) k += 1;
        return ys[k];
      });
    });
    return { grid, values };
  };
  const last = (runs, metric) => {
    const ends = runs.map((run) => unpack(run.columns[metric])).map((ys) => ys[ys.length - 1]);
    const mean = ends.reduce((sum, end) => sum + end, 0) / ends.length;
    return Number.isFinite(mean) ? mean : Infinity;
  };
  const best = (metric, setting, count) => {
    const sign = data.larger.includes(metric) ? -1 : 1;
    const ends = [...groups(setting, metric)].map(([label, runs]) => [label, last(runs, metric)]);
    ends.sort((a, b) => (Number.isFinite(a[1]) ? sign * a[1] : Infinity) - (Number.isFinite(b[1]) ? sign * b[1] : Infinity));
    return ends.slice(0, count).map(([label]) => label);
  };
  const capped = (metric, start) => (/loss|objective/.test(metric) && Number.isFinite(start) ? 3 * Math.abs(start) : Infinity); // what diverges is followed a little way
  const spanned = (low, high, log) => {
    if (!(low < high)) return {};
    const room = 0.04 * (log ? Math.log10(high / low) : high - low);
    return { range: log ? [Math.log10(low) - room, Math.log10(high) + room] : [low - room, high + room] };
  };
  const drawCurves = () => {
    const metric = value("metric"), x = value("axis"), setting = Number(value("setting", 0)), each = value("each", "") !== "";
    const band = value("band", "none"), ylog = $("ylog").checked, xlog = $("xlog").checked;
    const xname = x === "time" ? data.clock : "updates", traces = [];
    $("xlog-name").textContent = xname;
    if ($("band")) $("band").disabled = each;
    let low = Infinity, high = -Infinity, count = 0;
    const see = (values, start) => {
      const most = capped(metric, start);
      for (const one of values) if (Number.isFinite(one) && (!ylog || one > 0)) {
        low = Math.min(low, one);
        high = Math.max(high, Math.min(one, most));
      }
    };
    const own = groups(setting, metric);
    for (const [label, runs] of own) {
      if (hidden.has(label)) continue;
      count += 1;
      const look = data.labels[label], colour = visible(look.colour);
      const line = { color: colour, width: 2, dash: look.dash }, marker = { color: colour, symbol: look.mark, size: 7, maxdisplayed: 9 };
      const heads = ["", "seed", xname, named(metric)];
      if (each || runs.length === 1) {
        for (const run of runs) {
          const xs = [...unpack(run.columns[x])], ys = [...unpack(run.columns[metric])];
          see(ys, ys[0]);
          const rows = xs.map((at, k) => [look.text, run.seed || "-", shown(at), shown(ys[k])]);
          traces.push(trace(heads, rows, { x: xs, y: ys, mode: "lines+markers", line: { ...line, width: runs.length > 1 ? 1.3 : 2 }, marker }));
        }
        continue;
      }
      const { grid, values } = over(runs, x, metric);
      const across = grid.map((_, k) => values.map((one) => one[k]));
      const means = across.map((one) => one.reduce((sum, part) => sum + part, 0) / one.length);
      const stds = across.map((one, k) => Math.sqrt(one.reduce((sum, part) => sum + (part - means[k]) ** 2, 0) / Math.max(one.length - 1, 1)));
      let lows = across.map((one) => Math.min(...one)), highs = across.map((one) => Math.max(...one));
      if (band === "std") [lows, highs] = [means.map((mean, k) => mean - stds[k]), means.map((mean, k) => mean + stds[k])];
      if (ylog) { // what is not above zero has no place on a log scale: the band ends at the lowest mean
        const least = Math.min(...means.filter((mean) => mean > 0));
        lows = lows.map((one) => (one > 0 ? one : least));
      }
      if (band !== "none") {
        const edge = { x: grid, mode: "lines", line: { width: 0, color: colour }, hoverinfo: "skip" };
        traces.push({ ...edge, y: lows }, { ...edge, y: highs, fill: "tonexty", fillcolor: faded(colour, 0.15) });
      }
      see([...means, ...(band === "none" ? [] : [...lows, ...highs])], means[0]);
      const rows = grid.map((at, k) => [look.text, String(values.length), shown(at), shown(means[k]), `${shown(lows[k])} to ${shown(highs[k])}`, shown(stds[k])]);
      const between = band === "std" ? "mean ± std" : "range";
      traces.push(trace(["", "runs", xname, named(metric), between, "std"], rows, { x: grid, y: means, mode: "lines+markers", line, marker }));
    }
    const layout = { xaxis: axis(xname, { type: xlog ? "log" : "linear" }), yaxis: axis(named(metric), { type: ylog ? "log" : "linear", ...spanned(low, high, ylog) }) };
    const total = own.size, where = data.settings.length > 1 ? `On ${data.settings[setting] || "the others"}. ` : "";
    const several = [...own.values()].some((runs) => runs.length > 1) ? (each ? "Each run by itself. " : `The mean over seeds${band === "none" ? "" : band === "std" ? " with its standard deviation" : " with their range"}. `) : "";
    const ended = best(metric, setting, total).filter((label) => data.labels[label].ended); // a run without an end is not ranked
    const said = !total ? ` No run here has ${named(metric)}.` : !count || ended.length < 2 ? "" : ` ${data.larger.includes(metric) ? "Highest" : "Lowest"} at the end: ${data.labels[ended[0]].text}, ${shown(last(own.get(ended[0]), metric))}.`;
    draw("plot-curves", traces, layout, [metric, x, ylog, xlog, setting].join(), `${where}${several}${count < total ? `${count} of ${total} curves are shown. ` : ""}${data.thinned}${said}`);
  };
  const SVG = "http://www.w3.org/2000/svg";
  const sample = (look) => {
    const picture = document.createElementNS(SVG, "svg"), colour = visible(look.colour);
    const part = (kind, attributes) => {
      const element = document.createElementNS(SVG, kind);
      for (const [name, text] of Object.entries(attributes)) element.setAttribute(name, text);
      picture.append(element);
    };
    const dashes = { solid: "", dash: "9 5", dot: "2 4", dashdot: "9 4 2 4", longdash: "14 5", longdashdot: "14 4 2 4" };
    for (const [name, text] of Object.entries({ width: 44, height: 14, "aria-hidden": "true" })) picture.setAttribute(name, text);
    part("line", { x1: 0, y1: 7, x2: 44, y2: 7, stroke: colour, "stroke-width": 2, "stroke-dasharray": dashes[look.dash] ?? look.dash.replace(/px/g, "") });
    const marks = { square: "M18 3h8v8h-8z", diamond: "M22 2l5 5l-5 5l-5 -5z", "diamond-tall": "M22 2l3 5l-3 5l-3 -5z", cross: "M20.5 2.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z", x: "M18 5l2 -2l2 2l2 -2l2 2l-2 2l2 2l-2 2l-2 -2l-2 2l-2 -2l2 -2z", "triangle-up": "M22 2l5 9h-10z", "triangle-down": "M22 12l5 -9h-10z", "triangle-left": "M17 7l9 -5v10z", "triangle-right": "M27 7l-9 -5v10z", star: "M22 2l1.4 3.4l3.6 .2l-2.8 2.4l1 3.6l-3.2 -2l-3.2 2l1 -3.6l-2.8 -2.4l3.6 -.2z", pentagon: "M22 2l5 4l-2 5h-6l-2 -5z" };
    if (look.mark === "circle-open") part("circle", { cx: 22, cy: 7, r: 4, fill: theme.paper, stroke: colour });
    else if (marks[look.mark]) part("path", { d: marks[look.mark], fill: colour });
    else part("circle", { cx: 22, cy: 7, r: 4, fill: colour });
    return picture;
  };
  const drawLegend = () => {
    const items = [...groups(Number(value("setting", 0))).keys()].map((label) => {
      const item = document.createElement("label"), box = document.createElement("input");
      Object.assign(box, { type: "checkbox", checked: !hidden.has(label) });
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(label);
        else hidden.add(label);
        drawCurves();
      });
      item.append(box, sample(data.labels[label]), data.labels[label].text);
      return item;
    });
    $("legend").hidden = items.length < 2;
    $("legend-all").hidden = items.length <= 8;
    $("legend-items").replaceChildren(...items);
  };
  const show = (which) => {
    const setting = Number(value("setting", 0)), labels = [...groups(setting).keys()];
    const kept = which === "all" ? labels : which === "none" ? [] : best(value("metric"), setting, 8);
    hidden.clear();
    for (const label of labels) if (!kept.includes(label)) hidden.add(label);
    drawLegend();
  };
  const drawSteps = () => {
    const steps = data.steps[value("setting", 0)], traces = [];
    $("steps-picture").hidden = !steps;
    if (!steps) return;
    const { metric, curves, over: name, start } = steps;
    let low = Infinity, high = -Infinity;
    for (const curve of curves) {
      const colour = visible(curve.colour), known = curve.points.filter((point) => point[1] !== null);
      const rows = known.map((point) => [curve.text, shown(point[0]), shown(point[1]), `${shown(point[2])} to ${shown(point[3])}`]);
      const bars = { type: "data", symmetric: false, array: known.map((p) => p[3] - p[1]), arrayminus: known.map((p) => p[1] - p[2]), color: colour, thickness: 1.2, width: 4 };
      for (const point of known) [low, high] = [Math.min(low, point[2]), Math.max(high, Math.min(point[3], capped(metric, start)))];
      traces.push(trace(["", name, named(metric), "range"], rows, { x: known.map((p) => p[0]), y: known.map((p) => p[1]), error_y: bars, name: plain(short(curve.text)), mode: "lines+markers", line: { color: colour, width: 2, dash: curve.dash }, marker: { color: colour, symbol: curve.mark, size: 8 } }));
    }
    const tried = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
    const log = low > 0 && high / low > 5;
    const layout = { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemclick: false, itemdoubleclick: false }, margin: { l: 64, r: 16, t: BUTTONS + 24, b: 48 },
      xaxis: axis(name, { type: tried[0] > 0 ? "log" : "linear", tickvals: tried, ticktext: tried.map(String) }), yaxis: axis(`${named(metric)} at the end`, { type: log ? "log" : "linear", ...spanned(low, high, log) }) };
    draw("plot-steps", traces, layout, `steps ${steps.setting}`, `${steps.setting ? `On ${steps.setting}. ` : ""}The mean over seeds at the end of the runs, with the range of the seeds; a step at which a run diverged has no point.`);
  };

  // --- workers of one run ---

  let run = null;
  const pace = (worker) => { // the slower, the brighter
    const seconds = [...unpack(run.pace)], own = seconds[run.chosen.indexOf(worker)];
    const [low, high] = [Math.min(...seconds), Math.max(...seconds)];
    const share = high > low ? (low > 0 ? Math.log(own / low) / Math.log(high / low) : (own - low) / (high - low)) : 0.5;
    return visible(along(VIRIDIS, theme.dark ? 0.25 + 0.75 * share : 0.82 * share));
  };
  const limited = () => (run.chosen.length < run.active ? ` Of ${run.active} workers, the ${run.chosen.length} with the smallest and largest mean delays are drawn; the table below has more.` : "");
  const drawJobs = () => {
    const jobs = run.jobs, [time, seconds, worker, delay] = ["time", "seconds", "worker", "delay"].map((name) => unpack(jobs[name]));
    const [draws, version, after, loss] = ["draw", "version", "after", "loss"].map((name) => unpack(jobs[name]));
    const width = Math.min(Number($("window").value), time.length), slider = $("from");
    slider.max = Math.max(0, time.length - width);
    slider.disabled = Number(slider.max) === 0;
    slider.step = Math.max(1, Math.min(width >> 2, Number(slider.max)));
    const from = Math.min(Number(slider.value), Number(slider.max)), places = Array.from({ length: width }, (_, k) => from + k);
    const pick = (column) => places.map((k) => column[k]);
    const begin = Math.min(...places.map((k) => time[k] - seconds[k])), end = Math.max(...pick(time));
    slider.setAttribute("aria-valuetext", `jobs ${from + 1} to ${from + width}, from ${run.clock} ${shown(begin)}`);
    const heads = ["", "computed", "version", "after", "delay", "loss"];
    const rows = places.map((k) => [`worker ${worker[k]}, draw ${draws[k]}`, `${shown(time[k] - seconds[k])} to ${shown(time[k])}`, shown(version[k]), shown(after[k]), shown(delay[k]), shown(loss[k])]);
    const narrow = $("plot-jobs").clientWidth < 560;
    const sorted = [...delay].sort((a, b) => a - b), most = Math.max(2, sorted[Math.floor(0.99 * (sorted.length - 1))]);
    const colours = places.map((k) => along(CIVIDIS, (delay[k] - 1) / (most - 1)));
    const bars = trace(heads, rows, {
      type: "bar", orientation: "h", base: places.map((k) => time[k] - seconds[k]), x: pick(seconds), y: pick(worker), width: 0.78,
      text: width <= 400 ? places.map((k) => String(version[k])) : undefined, textposition: "inside", insidetextanchor: "middle", textangle: 0,
      marker: { color: colours, line: { width: 1, color: theme.paper } },
      insidetextfont: { color: colours.map((colour) => (light(colour) > 0.18 ? "#000000" : "#ffffff")) },
    });
    const beside = { title: { text: "delay in updates", side: "right" }, thickness: 12, outlinewidth: 0 };
    const height = Math.max(narrow ? 330 : 260, Math.min(900, 110 + 26 * run.rows)) + (narrow ? 70 : 0);
    const below = { title: { text: "delay in updates", side: "bottom" }, thickness: 10, outlinewidth: 0, orientation: "h", y: -52 / (height - 140), yanchor: "top" };
    const scale = { // the library's own bars of numbers as colours warn of every text in them
      x: [null], y: [null], mode: "markers", hoverinfo: "skip",
      marker: { color: [1], cmin: 1, cmax: most, showscale: true, colorscale: CIVIDIS.map((colour, k) => [k / 9, colour]), colorbar: narrow ? below : beside },
    };
    const events = []; // what befell a worker at one time is one mark
    for (const event of run.events.filter((one) => one.time >= begin && one.time <= end)) {
      const before = events.find((one) => one.worker === event.worker && one.time === event.time);
      if (before) Object.assign(before, { kind: `${before.kind}, ${event.kind}`, text: before.text || event.text });
      else events.push({ ...event });
    }
    const kinds = [...new Set(run.events.map((event) => event.kind))];
    const marks = trace(["", "worker", run.clock, "why"], events.map((event) => [event.kind, String(event.worker), shown(event.time), short(event.text) || "-"]), {
      x: events.map((event) => event.time), y: events.map((event) => event.worker), mode: "markers",
      marker: { symbol: events.map((event) => MARKS[(kinds.indexOf(event.kind.split(",")[0]) + 4) % MARKS.length]), size: 12, color: theme.dark ? "#ff9e80" : "#b3261e", line: { width: 1.5, color: theme.paper } },
    });
    $("plot-jobs").style.height = `${height}px`;
    const layout = { xaxis: axis(run.clock, { range: [begin, end + 0.01 * (end - begin)] }), yaxis: axis("worker", { range: [run.rows - 0.4, -0.6], dtick: run.rows > 24 ? 5 : 1, fixedrange: true, showgrid: false }), uniformtext: { mode: "hide", minsize: 9 }, barmode: "overlay", bargap: 0, ...(narrow && { margin: { l: 48, r: 8, t: 10, b: 130 } }) };
    const embedded = time.length < run.arrivals ? ` This page has the first ${shown(time.length)} of the run's ${shown(run.arrivals)} jobs${run.workers > run.rows ? `, of workers 0 to ${run.rows - 1} of ${run.workers}` : ""}.` : "";
    draw("plot-jobs", [bars, marks, scale], layout, `jobs ${run.name} ${from} ${width}`, `Jobs ${shown(from + 1)} to ${shown(from + width)} of ${shown(run.arrivals)}.${embedded} A bar is as long as the computing took and ends when its message arrived; the number in it is the version of the model, its colour the delay: the updates from that version to the one that used it.${kinds.length ? ` Red marks: ${kinds.join(", ")}.` : ""}`);
  };
  const lines = (columns, x, y, heads, rowOf, group = "worker") => {
    const who = unpack(columns[group]), xs = unpack(columns[x]), ys = unpack(columns[y]);
    return run.chosen.map((worker, k) => {
      const places = [];
      who.forEach((one, place) => one === worker && places.push(place));
      const colour = pace(worker);
      return trace(heads, places.map((place) => rowOf(worker, place)), {
        x: places.map((place) => xs[place]), y: places.map((place) => ys[place]), mode: "lines+markers", name: `worker ${worker}`,
        line: { color: colour, width: 1.6, dash: ["solid", "dash", "dot", "dashdot"][k % 4] }, marker: { color: colour, symbol: MARKS[k % MARKS.length], size: 6, maxdisplayed: 12 },
      });
    });
  };
  const withLegend = () => {
    const narrow = $("plot-delays").clientWidth < 560;
    return narrow ? { showlegend: false } : { showlegend: true, legend: { itemclick: false, itemdoubleclick: false, font: { size: 12 } } };
  };
  const drawDelays = () => {
    const { delays } = run, [time, mean, most, count] = ["time", "mean", "most", "count"].map((name) => unpack(delays[name]));
    const heads = ["", run.clock, "mean delay", "largest delay", "arrivals"];
    const rowOf = (worker, k) => [`worker ${worker}`, shown(time[k]), shown(mean[k]), shown(most[k]), shown(count[k])];
    const merged = Math.max(...count) > 1 ? ` A line goes from mean to mean of up to ${Math.max(...count)} arrivals in a row; some of them are marked.` : " A line goes from arrival to arrival; some of them are marked.";
    draw("plot-delays", lines(delays, "time", "mean", heads, rowOf), { xaxis: axis(run.clock), yaxis: axis("delay in updates", { rangemode: "tozero" }), ...withLegend() }, `delays ${run.name}`, `How many updates were made from a gradient's model to its use; the brighter a line, the slower its worker.${merged}${limited()}`);
  };
  const drawShares = () => {
    const counts = [...unpack(run.shares)], workers = counts.map((_, k) => k), equal = 100 / run.workers;
    const rows = counts.map((count, k) => [`worker ${k}`, shown(count), `${shown((100 * count) / run.arrivals)}%`]);
    const bars = trace(["", "arrivals", "share"], rows, { type: "bar", x: workers, y: counts.map((count) => (100 * count) / run.arrivals), marker: { color: visible("#0072B2") } });
    const line = { x: [-0.5, counts.length - 0.5], y: [equal, equal], mode: "lines", line: { color: theme.ink, dash: "dash", width: 1.2 }, hoverinfo: "skip" };
    const most = counts.indexOf(Math.max(...counts)), least = counts.indexOf(Math.min(...counts));
    draw("plot-shares", [bars, line], { xaxis: axis("worker", { dtick: counts.length > 24 ? undefined : 1, showgrid: false }), yaxis: axis("% of the arrivals", { rangemode: "tozero" }) }, `shares ${run.name}`, `Worker ${most} sent the most (${shown(counts[most])} of ${shown(run.arrivals)} arrivals), worker ${least} the fewest (${shown(counts[least])}). Dashed: the same for all.${counts.length < run.workers ? ` The first ${counts.length} of ${shown(run.workers)} workers are drawn.` : ""}`);
  };
  const drawLosses = () => {
    const there = Boolean(run.losses.names && run.losses.names.length);
    $("losses").hidden = !there;
    if (!there) return;
    const { names, columns } = run.losses, chooser = $("loss");
    if ([...chooser.options].map((one) => one.value).join() !== names.join()) chooser.replaceChildren(...names.map((name) => option(named(name), name)));
    const name = chooser.value, x = $("loss-axis").value, xname = x === "time" ? run.clock : "updates";
    const [xs, ys] = [unpack(columns[x]), unpack(columns[name])];
    const rowOf = (worker, k) => [`worker ${worker}`, shown(xs[k]), shown(ys[k])];
    draw("plot-losses", lines(columns, x, name, ["", xname, named(name)], rowOf), { xaxis: axis(xname), yaxis: axis(`${named(name)} of the worker`, { type: $("loss-log").checked ? "log" : "linear" }), ...withLegend() }, `losses ${run.name} ${name} ${x} ${$("loss-log").checked}`, `What each worker found on its own data at the evaluations; the brighter a line, the slower its worker.${limited()}`);
  };
  const drawRun = () => [drawJobs, drawDelays, drawShares, drawLosses].forEach((one) => one());
  const choose = () => {
    const chosen = Number(value("run", 0));
    run = data.inside[chosen];
    const own = document.querySelector(`.run[data-run="${chosen}"]`), kept = own.querySelector("noscript");
    if (kept) own.innerHTML = kept.textContent; // the browser has not read it: this page's own HTML, which would make it slow to open
    for (const part of document.querySelectorAll(".run")) part.classList.toggle("chosen", Number(part.dataset.run) === chosen);
    $("from").value = 0;
  };

  // --- what is chosen, and the first drawing ---

  const on = (ids, kind, does) => ids.forEach((id) => $(id) && $(id).addEventListener(kind, does));
  on(["axis", "each", "band", "ylog", "xlog"], "change", drawCurves);
  on(["metric", "setting"], "change", () => {
    if ($("setting")) drawLegend();
    drawCurves();
  });
  on(["setting"], "change", () => pictured && drawSteps());
  on(["legend-all"], "click", (event) => {
    if (!event.target.dataset.show) return;
    show(event.target.dataset.show);
    drawCurves();
  });
  on(["run"], "change", () => { choose(); drawRun(); });
  on(["window"], "change", drawJobs);
  on(["from"], "input", drawJobs);
  on(["loss", "loss-axis", "loss-log"], "change", drawLosses);
  const all = [];
  if (data.runs) all.push(() => { drawLegend(); drawCurves(); });
  const pictured = Object.keys(data.steps ?? {}).length > 0;
  if (pictured) all.push(drawSteps);
  if (data.inside && data.inside.length) all.push(drawJobs, drawDelays, drawShares, drawLosses);
  const redraw = () => { readTheme(); all.forEach((one) => one()); };
  on(["theme"], "change", () => {
    if ($("theme").value) root.dataset.theme = $("theme").value;
    else delete root.dataset.theme;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let broad = innerWidth >= 600;
  addEventListener("resize", () => {
    if (broad !== innerWidth >= 600) { broad = !broad; redraw(); }
  });
  readTheme();
  if (data.runs) {
    const values = data.runs.filter((one) => one.columns[data.main]).flatMap((one) => [...unpack(one.columns[data.main])].filter(Number.isFinite));
    const [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
    $("ylog").checked = low > 0 && high / low > 5; // over less a log scale has too few labels
    if (groups(0).size > 8) show("best");
    if (groups(0).size > 5 && $("band")) $("band").value = "none"; // the bands of many curves hide one another
  }
  if (data.inside && data.inside.length) {
    if (!broad) $("window").value = "50";
    choose();
  }
  const next = () => { // one after the other: the first picture is there at once
    const one = all[next.done++];
    if (!one) {
      root.dataset.drawn = "all";
      return;
    }
    one();
    if (next.done === 1) {
      performance.mark("first picture");
      root.dataset.drawn = "first";
    }
    setTimeout(next);
  };
  next.done = 0;
  next();
})();
