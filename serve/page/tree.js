"use strict";
// The guesses of an answer and its speed. All that a model wrote is set as text.

const LINE_HEIGHT = 18, LETTER_WIDTH = 7.25, DOT_RADIUS = 3.6;  // pixels
const MOST_LETTERS = 14, COLUMN_GAP = 30;  // letters of a guess; pixels between two columns

function drawn(name, attributes, text) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
  if (text !== undefined) shape.textContent = text;
  return shape;
}

// Depth is a column. The likeliest child stands on the line of its parent, and the others below.
function layout(guesses) {
  const children = new Map();
  const best_first = [...guesses].sort((one, other) => other.score - one.score);
  for (const guess of best_first) children.set(guess.parent, [...(children.get(guess.parent) ?? []), guess]);
  const spots = new Map();
  let line = 0;
  (function put(parent, depth) {
    for (const guess of children.get(parent) ?? []) {
      spots.set(guess.id, { guess, depth, line });
      if (children.has(guess.id)) put(guess.id, depth + 1); else line += 1;
    }
  })(null, 0);
  return spots;
}

// The likeliest guesses that fit this many lines: each further child of a guess takes a line of its own.
function fitting(guesses, lines) {
  const num_children = new Map([[null, 0]]);  // shown ones, by parent
  const best_first = [...guesses].sort((one, other) => other.score - one.score || one.id - other.id);
  return best_first.filter(({ id, parent }) => {
    const siblings = num_children.get(parent);
    if (siblings === undefined || (siblings && lines < 2)) return false;
    if (siblings) lines -= 1;
    num_children.set(parent, siblings + 1);
    num_children.set(id, 0);
    return true;
  });
}

function shortText(guess) { return guess.text.replace(/\n/g, "⏎").trim().slice(0, MOST_LETTERS); }

// Show the end of the text, followed by the guesses. The likelier a path, the stronger its line.
function showTree(sight, text) {
  const num_lines = Math.max(1, Math.floor(at("tree").clientHeight / LINE_HEIGHT - 1.2));
  const spots = layout(fitting(sight.guesses, num_lines));
  const trunk = "…" + text.trimEnd().slice(innerWidth < 560 ? -8 : -MOST_LETTERS).replace(/\s+/g, " ");
  const widths = [];
  for (const { guess, depth } of spots.values())
    widths[depth] = Math.max(widths[depth] ?? 0, shortText(guess).length);
  const columns = [LETTER_WIDTH * trunk.length + COLUMN_GAP];
  for (const width of widths) columns.push(columns.at(-1) + LETTER_WIDTH * (width || 1) + COLUMN_GAP);
  const lines = Math.max(0, ...[...spots.values()].map((spot) => spot.line)) + 1;
  const svg = drawn("svg", { width: columns.at(-1), height: LINE_HEIGHT * lines + 4 });
  for (const spot of spots.values()) svg.append(...shapesOf(spot, spots, columns, trunk));
  svg.append(drawn("text", { x: 0, y: LINE_HEIGHT * 0.7 + 4, class: "trunk" }, trunk));
  at("tree").replaceChildren(svg);
  at("tree").setAttribute("aria-label", describe(sight, trunk, spots));
}

function shapesOf({ guess, depth, line }, spots, columns, trunk) {
  const parent = spots.get(guess.parent);
  const ends = parent ? columns[parent.depth] + DOT_RADIUS + LETTER_WIDTH * shortText(parent.guess).length
    : LETTER_WIDTH * trunk.length;
  const from = ends + 7, x = columns[depth], middle = (from + x - DOT_RADIUS) / 2;
  const y = LINE_HEIGHT * (line + 0.7), above = LINE_HEIGHT * ((parent ? parent.line : 0) + 0.7);
  const chance = Math.exp(Math.max(guess.score, -8));
  return [
    drawn("path", { class: line ? "" : "likely", "stroke-width": 1 + 2 * chance,
      d: `M${from},${above} C${middle},${above} ${middle},${y} ${x - DOT_RADIUS - 1},${y}` }),
    drawn("circle", { cx: x, cy: y, r: DOT_RADIUS, class: guess.sent ? "sent" : "unsent" }),
    drawn("text", { x: x + DOT_RADIUS + 4, y: y + 4, opacity: 0.55 + 0.45 * chance }, shortText(guess))];
}

// What somebody hears who does not see the tree.
function describe(sight, trunk, spots) {
  const likeliest = [...spots.values()].filter((spot) => spot.line === 0).map((spot) => shortText(spot.guess));
  if (!likeliest.length) return `No guesses after ${trunk}`;
  return `${sight.live ?? spots.size} guesses after ${trunk}; the likeliest go on: ${likeliest.join(" ")}`;
}

function labelled(kind, text) {
  const label = document.createElement("span");
  label.className = kind;
  label.textContent = text;
  return label;
}

function bar(share, kind, label) {
  const meter = document.createElement("div"), filled = document.createElement("i");
  const percent = Math.round(100 * Math.min(1, share));
  meter.className = "bar";
  filled.className = kind;
  filled.style.width = percent + "%";
  for (const [name, value] of Object.entries({ role: "meter", "aria-label": label, "aria-valuenow": percent,
    "aria-valuemin": 0, "aria-valuemax": 100 })) meter.setAttribute(name, value);
  meter.append(filled);
  return meter;
}

// Tokens per second after the first token.
function speedOf(sight) { return sight.decode ? (sight.tokens - 1) / sight.decode : 0; }

// Where the figures do not tell of this machine: its kind, and the emulated cluster.
function markOf(sight) { return sight.kind === "real" ? "" : ` (${sight.kind}, ${sight.profile})`; }

function showMeters(sight) {
  const speed = speedOf(sight), most = Math.max(speed, sight.plain, 0.001);
  at("speed_text").textContent = `${speed.toFixed(1)} tokens/s${markOf(sight)}`;
  at("speed").title = "Plain decoding: measured in this answer, while guessing rested, since it was slower.";
  at("speed").replaceChildren(
    labelled("", "this answer"), bar(speed / most, "", "speed of this answer"),
    labelled("number", speed.toFixed(1) + " tokens/s"));
  if (sight.plain) at("speed").append(
    labelled("", "plain decoding"), bar(sight.plain / most, "plain", "speed of plain decoding"),
    labelled("number", sight.plain.toFixed(1)));
  at("ranks").title = "Share of the last two seconds in which each rank was busy";
  at("ranks").replaceChildren(...sight.busy.map((share, rank) => {
    const meter = document.createElement("div");
    meter.className = "rank";
    const name = board_names[rank] ?? `rank ${rank}`;
    meter.append(labelled("name", name), labelled("number", Math.round(100 * share) + " %"), bar(share, "", `${name} busy`));
    return meter;
  }));
}

function figuresOf(sight) {
  const plain = sight.plain ? `, while guessing rested ${sight.plain.toFixed(1)}` : "";
  return `${sight.tokens} tokens, ${speedOf(sight).toFixed(1)} tokens/s${markOf(sight)}${plain}; ` +
    `${sight.accepted} of ${sight.sent} guesses accepted, ${sight.tokens_per_miss.toFixed(2)} tokens per miss`;
}

// Why there are few guesses or none to see, in one line; empty if there are.
function restOf(sight) {
  if (sight.plain_tokens * 2 <= sight.tokens) return "";
  return "Guessing rested, since plain decoding is faster on these devices. To see guesses at work: " +
    "bash run_server.sh toy profile=jetson-7b";
}
