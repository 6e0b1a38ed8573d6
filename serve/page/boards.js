"use strict";
// The boards of the pipeline, from /cluster: a card for each.

const FIGURES = [  // a label, and the field of a card with its unit and digits
  ["free memory", "free_gb", "GB", 1], ["rows", "rows_per_second", "a second", 1], ["a segment", "segment_ms", "ms", 1],
  ["round trip", "round_trip_ms", "ms", 1], ["wire", "mbps", "Mbit/s", 0], ["sends", "sent_mbps", "Mbit/s", 2]];
let board_names = [];  // by rank

function showBoards(open) {
  at("boards").hidden = !open;
  document.querySelector("main").classList.toggle("beside", open);
  at("show_boards").setAttribute("aria-expanded", String(open));
}

async function readBoards(fields) {
  if (at("boards").hidden && board_names.length) return;
  try {
    const response = await fetch("/cluster", { headers: fields });
    if (response.ok) showCluster(await response.json());
  } catch { /* it cannot be reached, which the page says */ }
}

function showCluster(cluster) {
  board_names = cluster.boards.map(({ name }) => name);
  const mark = cluster.kind === "real" || !cluster.kind ? "" : ` (times ${cluster.kind})`;
  at("advice").textContent = (cluster.advice ?? "") && cluster.advice + mark;
  at("version").textContent = cluster.version ? `version ${cluster.version} on all boards` : "";
  at("cards").replaceChildren(...cluster.boards.map((card, rank) => cardOf(card, rank, cluster)));
}

function cardOf(card, rank, cluster) {
  const article = element("article", "card"), name = element("h3", "", card.name), figures = element("dl");
  const is_slowest = rank > 0 && rank === cluster.slowest;
  article.classList.toggle("slowest", is_slowest);
  article.classList.toggle("lost", card.state === "lost");
  name.id = "board" + rank;
  article.setAttribute("aria-labelledby", name.id);
  const busy = Math.round(100 * card.busy);
  const notes = [card.rank === card.name ? "" : card.rank, card.state, is_slowest ? "the slowest" : "", `${busy} % at work`];
  const rows = [["layers", card.layers || "none, but the draft"]];
  for (const [label, field, unit, digits] of FIGURES)
    if (typeof card[field] === "number") rows.push([label, `${card[field].toFixed(digits)} ${unit}`]);
  for (const [label, value] of rows) figures.append(element("dt", "", label), element("dd", "", value));
  article.append(name, element("p", "state", notes.filter(Boolean).join(" · ")),
    bar(card.busy, "", `${card.name} at work`), figures);
  return article;
}
