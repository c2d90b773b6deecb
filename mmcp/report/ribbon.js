// The sequence as a ribbon: what each token is, who holds it, who encodes it. Drawn anew for every stretch zoomed into.
"use strict";

const MOST_BARS = 300; // about as many as a screen tells apart
const NOBODY = -1;

// Number of the last entry of ascending `starts` that is not above `value`.
function before(starts, value) {
  let low = 0, high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= value) { low = middle + 1; } else { high = middle; }
  }
  return low - 1;
}

// Edges of the bars of a stretch: bounds of what `starts` begin if there are few, else equal parts.
function barEdges(starts, low, high) {
  const first = before(starts, low) + 1, last = before(starts, high - 1);
  if (last - first < MOST_BARS) {
    return [low, ...starts.slice(first, last + 1), high];
  }
  const count = Math.min(MOST_BARS, high - low);
  return Array.from({ length: count + 1 }, (_, i) => low + Math.floor(i * (high - low) / count));
}

function clock(seconds) {
  const whole = Math.floor(seconds), two = (value) => String(value).padStart(2, "0");
  const part = (seconds - whole).toFixed(2).slice(1);
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${part === ".00" ? "" : part}`;
}

function short(value) {
  const prefixes = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, prefix] = prefixes.find(([size]) => value >= 0.9995 * size) || [1, ""];
  return Number((value / size).toPrecision(3)) + prefix;
}

const COSTS = {
  decode_ns: (value) => `${short(value / 1e6)} ms to decode`,
  encoder_flops: (value) => `${short(value)} FLOPs to encode`,
  backbone_flops: (value) => `${short(value)} FLOPs in the backbone`,
};

function escapeText(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// The clip's time at a token: that of its piece, or of the next piece that has one.
function timeAt(row, token) {
  for (let i = Math.max(0, before(row.start, token)); i < row.start.length; i++) {
    if (row.time[i] !== null) { return row.time[i]; }
  }
  return null;
}

// Sums over the pieces of a stretch: tokens by kind, time span, costs in proportion to the tokens inside.
function describe(row, low, high) {
  const first = before(row.start, low), last = before(row.start, high - 1);
  const shares = row.kinds.map(() => 0), costs = {};
  let from = null, until = null;
  for (let i = first; i <= last; i++) {
    const end = i + 1 < row.start.length ? row.start[i + 1] : row.tokens;
    const inside = Math.min(end, high) - Math.max(row.start[i], low);
    shares[row.kind[i]] += inside;
    if (row.time[i] !== null) {
      from = from === null ? row.time[i] : Math.min(from, row.time[i]);
      until = until === null ? row.until[i] : Math.max(until, row.until[i]);
    }
    for (const name of Object.keys(row.costs)) {
      costs[name] = (costs[name] || 0) + row.costs[name][i] * inside / (end - row.start[i]);
    }
  }
  return { shares, from, until, costs, words: first === last ? row.words[first] : `${last - first + 1} pieces`, first, last };
}

function hoverText(row, plan, low, high, told) {
  const total = high - low, lines = [];
  const parts = row.kinds.map((kind, i) => [kind, told.shares[i]]).filter(([, count]) => count > 0);
  lines.push(parts.map(([kind, count]) => parts.length > 1 ? `${kind} ${(100 * count / total).toFixed(0)}%` : `<b>${kind}</b>`).join(", "));
  lines.push(escapeText(told.words));
  lines.push(`tokens ${low.toLocaleString("en")} to ${(high - 1).toLocaleString("en")}`);
  if (told.from !== null) {
    lines.push(`clip time ${clock(told.from)} to ${clock(told.until)}`);
  }
  const costs = Object.entries(told.costs).filter(([, value]) => value > 0);
  if (costs.length) {
    lines.push(...costs.map(([name, value]) => COSTS[name](value)));
  }
  lines.push(`held by ${whose(plan.owner, low, high)}`, `encoded by ${whose(plan.encoder, low, high)}`);
  return lines.join("<br>");
}

// The ranks of a stretch in words.
function whose(runs, low, high) {
  const first = before(runs.start, low), last = before(runs.start, high - 1);
  const ranks = [...new Set(runs.rank.slice(first, Math.min(last, first + 2000) + 1))].filter((rank) => rank !== NOBODY);
  if (!ranks.length) { return "nobody"; }
  if (ranks.length === 1 && !runs.sampled) { return `rank ${ranks[0]}`; }
  return `ranks ${Math.min(...ranks)} to ${Math.max(...ranks)}${runs.sampled ? " in turn" : ""}`;
}

// The rank of a stretch: of several, the first.
function rankOf(runs, low, high) {
  for (let i = before(runs.start, low); i <= before(runs.start, high - 1); i++) {
    if (runs.rank[i] !== NOBODY) { return runs.rank[i]; }
  }
  return NOBODY;
}

function modalityTraces(row, plan, low, high) {
  const edges = barEdges(row.start, low, high);
  const bars = edges.slice(1).map((end, i) => ({ start: edges[i], end, told: describe(row, edges[i], end) }));
  return row.kinds.map((kind, number) => {
    const shown = bars.filter((bar) => bar.told.shares[number] > 0);
    return {
      type: "bar", name: kind, x: shown.map((bar) => (bar.start + bar.end) / 2), width: shown.map((bar) => bar.end - bar.start),
      y: shown.map((bar) => bar.told.shares[number] / (bar.end - bar.start)), yaxis: "y", showlegend: true,
      marker: { color: plan.colours.kinds[kind], line: { width: 0 },
                pattern: { shape: plan.colours.patterns[kind], size: 6, solidity: 0.25, fillmode: "overlay" } },
      hovertext: shown.map((bar) => hoverText(row, plan, bar.start, bar.end, bar.told)), hovertemplate: "%{hovertext}<extra></extra>",
    };
  });
}

function rankTrace(row, plan, runs, name, axis, low, high, width) {
  const edges = barEdges(runs.start, low, high), { paper } = pageColours();
  const bars = [];
  for (let i = 0; i + 1 < edges.length; i++) {
    const rank = rankOf(runs, edges[i], edges[i + 1]);
    const last = bars[bars.length - 1];
    if (last && last.rank === rank && last.end === edges[i]) { last.end = edges[i + 1]; }
    else { bars.push({ rank, start: edges[i], end: edges[i + 1] }); }
  }
  const shown = bars.filter((bar) => bar.rank !== NOBODY);
  const pixels = (bar) => width * (bar.end - bar.start) / (high - low);
  const palette = plan.colours.ranks, place = (rank) => Math.floor(rank * (palette.length - 1) / Math.max(1, plan.ranks - 1));
  return {
    type: "bar", name, showlegend: false, yaxis: axis,
    x: shown.map((bar) => (bar.start + bar.end) / 2), width: shown.map((bar) => bar.end - bar.start), y: shown.map(() => 1),
    marker: { color: shown.map((bar) => palette[place(bar.rank)]),
              line: { color: paper, width: shown.map((bar) => pixels(bar) > 5 ? 1 : 0) } },
    text: shown.map((bar) => pixels(bar) > 9 * String(bar.rank).length + 4 ? String(bar.rank) : ""),
    textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none",
    insidetextfont: { size: 12, color: shown.map((bar) => place(bar.rank) < palette.length / 2 ? "#ffffff" : "#000000") },
    hovertext: shown.map((bar) => `${name} <b>rank ${bar.rank}</b><br>` +
                         hoverText(row, plan, bar.start, bar.end, describe(row, bar.start, bar.end))),
    hovertemplate: "%{hovertext}<extra></extra>",
  };
}

function ribbonAxis(row, low, high, width) {
  const count = Math.max(2, Math.min(9, Math.floor(width / 110)));
  const values = Array.from({ length: count }, (_, i) => Math.round(low + (high - low) * (i + 0.5) / count));
  const words = values.map((token) => {
    const time = row.tokens ? timeAt(row, Math.min(token, row.tokens - 1)) : null;
    return token.toLocaleString("en") + (time === null ? "" : `<br>${clock(Math.floor(time))}`);
  });
  return { tickvals: values, ticktext: words };
}

function drawRibbon(picture) {
  const row = readJson(picture.dataset.ribbon), plan = readJson(picture.dataset.figure);
  const isTimed = row.time.some((time) => time !== null);
  const show = (from, to) => {
    const low = Math.max(0, Math.floor(from)), high = Math.min(Math.max(1, row.tokens), Math.max(low + 1, Math.ceil(to)));
    const isNarrow = picture.clientWidth < NARROW, left = isNarrow ? 62 : 85, width = picture.clientWidth - left - 30;
    const traces = row.tokens ? [
      ...modalityTraces(row, plan, low, high),
      rankTrace(row, plan, plan.owner, "held by", "y2", low, high, width),
      rankTrace(row, plan, plan.encoder, "encoded by", "y3", low, high, width),
    ] : [];
    const strip = (domain, name) => ({ domain, range: [0, 1], fixedrange: true, showgrid: false, zeroline: false,
                                       tickvals: [0.5], ticktext: [name], ticks: "" });
    const layout = {
      height: picture.clientHeight, margin: { l: left, r: 30, t: 40, b: 70 }, barmode: "stack", bargap: 0, hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", itemclick: false, itemdoubleclick: false },
      font: { size: isNarrow ? 10 : 12 }, hoverlabel: { align: "left" }, dragmode: "zoom",
      xaxis: { range: [low, high], anchor: "y3", showgrid: false, zeroline: false,
               title: { text: isTimed ? "token, and time of the clip" : "token", standoff: 8 }, ...ribbonAxis(row, low, high, width) },
      yaxis: strip([0.62, 1], isNarrow ? "kind" : "modality"), yaxis2: strip([0.31, 0.57], "held by"),
      yaxis3: strip([0, 0.26], isNarrow ? "enc. by" : "encoded by"),
    };
    return Plotly.react(picture, traces, coloured(layout), { displayModeBar: false, responsive: true });
  };
  const whole = () => show(0, Math.max(1, row.tokens));
  const drawn = whole();
  if (!picture.dataset.listens) {
    picture.dataset.listens = "yes";
    picture.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) { show(change["xaxis.range[0]"], change["xaxis.range[1]"]); }
      else if (change["xaxis.autorange"]) { whole(); }
    });
  }
  return drawn;
}
