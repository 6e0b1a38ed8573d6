"use strict";
// The conversation: what was asked and answered, what is kept, and the requests to the server.

const at = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "seed", "max_tokens"];
const POLL_SECONDS = 3, KEEP_SECONDS = 0.3, MOST_SIGHTS = 2000;
const INTERRUPTED = "interrupted: the page was closed while this answer came";
const QUESTIONS = ["What does a baker do?", "Explain in three steps how rain forms.",
  "Write a Python function that reverses a string."];
const QUESTIONS_OF_TOY = ["Tell me a short story about a curious fox called Maya.", "I have a question. Where is Chile?",
  "Implement this in Python:\n\ndef word_lengths(s: str) -> list[int]:\n    \"\"\"Get the length of each word of s.\"\"\""];

// --- the browser's stores ---

// Where the browser forbids them, as with cookies blocked, the page itself keeps what it needs until it is closed.
const PASSING = { getItem(name) { return this[name] ?? null; }, setItem(name, text) { this[name] = text; },
  removeItem(name) { delete this[name]; } };
const local = storeOf("localStorage"), session = storeOf("sessionStorage");

function storeOf(name) {
  try { return globalThis[name] ?? Object.create(PASSING); } catch { return Object.create(PASSING); }
}

let talk = [];
let settings = { ...kept(local, "settings", {}), key: kept(session, "key", "") };
let asking = null;  // the AbortController of the answer under way
let sights = [];  // of the last answer: the guesses at each step, and the text so far
let model = null;  // its facts, once the server has told them
let emulation = "";  // the cluster of which the times are, if they are not those of these devices
let key_problem = "";  // why a key has to be typed
let kept_at = 0;
let is_leaving = false;  // then the end of a request says nothing about the server

// --- what a reload keeps ---

// A value of the kind of `otherwise`: another program, or an earlier version, may have left another one there.
function kept(storage, name, otherwise) {
  try {
    const value = JSON.parse(storage.getItem("flowspec." + name)) ?? otherwise;
    const is_alike = typeof value === typeof otherwise && Array.isArray(value) === Array.isArray(otherwise);
    return is_alike ? value : otherwise;
  } catch { return otherwise; }
}

function keep(storage, name, value) {
  try { storage.setItem("flowspec." + name, JSON.stringify(value)); } catch { /* full, or forbidden */ }
}

function keepSettings() {
  keep(local, "settings", { ...settings, key: undefined });
  keep(session, "key", settings.key);
}

// --- conversations: each tab has its own, kept under an id in the browser ---

const tab_id = newId(), tabs = new BroadcastChannel("flowspec");
let talk_id = "";

function newId() { return Date.now().toString(36) + Math.random().toString(36).slice(2); }

function keepTalk() {
  kept_at = performance.now();
  if (talk.length) keep(local, "talk." + talk_id, talk);
}

function useId(id) {
  talk_id = id;
  keep(session, "talk_id", id);
}

// The ids of all conversations, the newest first.
function idsKept() {
  return Object.keys(local).filter((name) => name.startsWith("flowspec.talk.")).map((name) => name.slice(14))
    .sort().reverse();
}

function openTalk(id) {
  useId(id);
  talk = kept(local, "talk." + id, []);
  tabs.postMessage({ asks: id, tab: tab_id });
}

function newTalk() {
  keepTalk();
  talk = [];
  useId(newId());
}

function deleteTalk(id) { local.removeItem("flowspec.talk." + id); }

// A tab that opens the conversation of another one, as a duplicate does, goes on with a copy.
tabs.addEventListener("message", ({ data }) => {
  if (data.asks === talk_id && data.tab !== tab_id) tabs.postMessage({ has: talk_id, tab: data.tab });
  if (data.has !== talk_id || data.tab !== tab_id) return;
  useId(newId());
  keepTalk();
});

// A browser of an earlier version kept a single conversation.
function moveOldTalk() {
  const old = kept(local, "talk", []);
  local.removeItem("flowspec.talk");
  if (!old.length) return;
  newTalk();
  talk = old;
  keepTalk();
}

function restoreTalk() {
  const id = kept(session, "talk_id", "");
  if (id) openTalk(id); else newTalk();
  moveOldTalk();
}

// --- display ---

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(label, kind, press) {
  const made = element("button", kind, label);
  made.type = "button";
  made.addEventListener("click", press);
  return made;
}

function modelName() { return model?.id ?? "the model"; }

// An article for a message, and the function that shows what has been added to it.
function turn(message, number) {
  const article = element("article", "turn " + message.role);
  const speaker = element("h2", "", message.role === "user" ? "You" : modelName());
  speaker.id = "speaker" + number;
  article.setAttribute("aria-labelledby", speaker.id);
  const content = element("div", "content"), figures = element("p", "figures"), note = element("p", "note");
  const error = element("p", "error"), tools = element("div", "tools"), thoughts = element("p", "note thoughts");
  const is_last = number === talk.length - 1;
  article.append(speaker, thoughts, content, error, note, figures, tools);
  function update() {
    if (message.role === "user") content.textContent = message.content;
    else content.replaceChildren(renderMarkdown(message.content));
    for (const [line, text] of [[thoughts, message.thoughts], [figures, message.figures], [note, message.note],
      [error, message.error]]) {
      line.textContent = text ?? "";
      line.hidden = !text;
    }
    tools.hidden = Boolean(asking) && is_last;
  }
  if (message.role === "assistant" && message.content)
    tools.append(copyButton("Copy", "Copy this answer", () => message.content));
  if (is_last && !asking) tools.append(button("Ask again", "quiet", retry));
  update();
  return { article, update };
}

function showTalk() {
  const turns = talk.map((message, number) => turn(message, number).article);
  at("talk").replaceChildren(...turns, ...(talk.length ? [] : [emptyStart()]), ...(key_problem ? [unlockForm()] : []));
  at("talk").setAttribute("aria-busy", String(Boolean(asking)));
  at("send").textContent = asking ? "Stop" : "Send";
  toEnd();
}

function toEnd() { at("talk").scrollTop = talk.length ? at("talk").scrollHeight : 0; }

function isAtEnd() { return at("talk").scrollHeight - at("talk").scrollTop - at("talk").clientHeight < 80; }

function emptyStart() {
  const start = element("section"), questions = element("div");
  start.id = "empty";
  questions.id = "questions";
  const facts = model?.flowspec;
  start.append(element("h2", "", model ? `Ask ${model.id}` : "FlowSpec"));
  if (facts?.method) start.append(element("p", "note", methodOf(facts)));
  const bundled = ["toy", "demo"].includes(model?.id);
  if (bundled) start.append(element("p", "note", "A toy model, trained for this demonstration: it answers the kinds of "
    + "questions below."));
  for (const question of model ? (bundled ? QUESTIONS_OF_TOY : QUESTIONS) : [])
    questions.append(button(question.split("\n\ndef ").join(" ").split("(")[0], "", () => ask(question)));
  start.append(questions, ...earlierTalks());
  return start;
}

function earlierTalks() {
  const list = element("ul", "earlier");
  for (const id of idsKept()) {
    const title = kept(local, "talk." + id, [])[0]?.content?.trim().slice(0, 60) || "without a question";
    const open = button(title, "", () => { openTalk(id); showTalk(); });
    const remove = button("Delete", "quiet", () => { deleteTalk(id); showTalk(); });
    remove.setAttribute("aria-label", "Delete " + title);
    const entry = element("li");
    entry.append(open, remove);
    list.append(entry);
  }
  return list.children.length ? [element("h2", "", "Earlier conversations"), list] : [];
}

function methodOf(facts) {
  const guesses = facts.draft === "none" ? "without guesses" : `with guesses from ${facts.draft}`;
  const stages = `${facts.num_stages} stage${facts.num_stages > 1 ? "s" : ""}`;
  const lossy = facts.lossy_rule ? `; lossy verification (${facts.lossy_rule})` : "";
  return `${facts.method} ${guesses}, ${stages}${lossy}` + (emulation ? `; ${emulation}` : "");
}

// Asks for the key where it is needed.
function unlockForm() {
  const form = element("form"), label = element("label", "note", key_problem), input = element("input");
  form.id = "unlock";
  input.id = "unlock_key";
  input.type = "password";
  input.autocomplete = "off";
  label.htmlFor = input.id;
  form.append(label, input, element("button", "main", "Use this key"));
  form.addEventListener("submit", (event) => { event.preventDefault(); unlock(input.value.trim()); });
  return form;
}

async function unlock(key) {
  settings.key = key;
  keepSettings();
  key_problem = "";
  model = null;
  await readModel();
  if (!key_problem && talk.at(-1)?.role === "assistant" && talk.at(-1).needs_key) retry(); else showTalk();
}

function requireKey() {
  key_problem = settings.key ? "The server does not accept this key. Type its key:" : "This server asks for its key:";
}

// --- steps of the last answer ---

function addSight(sight, text) {
  sights.push({ sight, text });
  if (sights.length > MOST_SIGHTS) sights.splice(1, 1);
  at("live").hidden = false;
  showTree(sight, text);
  showMeters(sight);
}

function showStep(number) {
  const { sight, text } = sights[number];
  at("step").value = number;
  at("step_text").textContent = `step ${number + 1} of ${sights.length}`;
  at("step").setAttribute("aria-valuetext", at("step_text").textContent);
  at("step_back").disabled = number === 0;
  at("step_on").disabled = number === sights.length - 1;
  showTree(sight, text);
  showMeters(sight);
}

// The guesses stay until the next answer. Most answers end without any, so the last step with some is shown.
function offerSteps() {
  at("steps").hidden = sights.length < 2;
  if (!sights.length) return;
  at("step").max = sights.length - 1;
  const with_guesses = sights.findLastIndex(({ sight }) => sight.guesses.length);
  showStep(with_guesses < 0 ? sights.length - 1 : with_guesses);
}

// --- requests ---

function headers() {
  const fields = { "Content-Type": "application/json" };
  if (settings.key) fields.Authorization = "Bearer " + settings.key;
  return fields;
}

// The messages that the model reads: questions without an answer are left out, except for the last one.
function messagesOf() {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  talk.forEach(({ role, content }, number) => {
    const is_answered = number === talk.length - 1 || talk[number + 1].content;
    if (content && (role === "assistant" || is_answered)) messages.push({ role, content });
  });
  return messages;
}

function body() {
  const fields = { messages: messagesOf(), stream: true, flowspec_tree: true };
  for (const name of NUMBERS) if (settings[name]) fields[name] = Number(settings[name]);
  return JSON.stringify(fields);
}

// The server-sent events of an answer, as [event, data].
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (unread + value).split("\n\n");
    unread = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n");
      const event = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "";
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6) ?? "";
      if (data && data !== "[DONE]") yield [event, JSON.parse(data)];
    }
  }
}

function take(message, event, data) {
  if (event === "tree") {
    message.figures = figuresOf(data);
    message.rest = restOf(data);
    addSight(data, message.thoughts + message.content);
  } else if (data.error) {
    message.error = data.error.message;
  } else {
    const delta = data.choices[0]?.delta;
    message.content += delta?.content ?? "";
    message.thoughts += delta?.reasoning_content ?? "";
  }
}

async function refusedBy(response, message) {
  message.error = (await response.json()).error.message;
  if (response.status !== 401) return;
  message.needs_key = true;
  message.error = "";
  requireKey();
}

async function answer() {
  const request = body(), mine = talk;
  const message = { role: "assistant", content: "", thoughts: "", note: INTERRUPTED };
  asking = new AbortController();
  sights = [];
  at("steps").hidden = true;
  talk.push(message);
  keepTalk();
  showTalk();
  const shown = turn({ ...message, note: "" }, talk.length - 1);
  at("talk").lastChild.replaceWith(shown.article);
  message.note = await receive(request, message);
  asking = null;
  if (message.rest) message.note = [message.note, message.rest].filter(Boolean).join(" · ");
  if (mine !== talk || is_leaving) return;  // a new conversation was begun, or the page is closed
  keepTalk();
  offerSteps();
  showTalk();
  at("announcement").textContent = message.error || message.note || "The answer is complete.";
}

// Receive an answer into its message; return the note below it.
async function receive(request, message) {
  const number = talk.length - 1;
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: request,
      signal: asking.signal });
    if (!response.ok) await refusedBy(response, message);
    else for await (const [event, data] of eventsOf(response)) {
      take(message, event, data);
      showGrowing(message, number);
    }
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    message.error = "the server cannot be reached: " + error.message;
  }
  return "";
}

function showGrowing(message, number) {
  if (talk[number] !== message) return;
  const was_at_end = isAtEnd();
  const grown = turn({ ...message, note: "" }, number);
  at("talk").lastChild.replaceWith(grown.article);
  if (was_at_end) toEnd();
  if (performance.now() - kept_at > 1000 * KEEP_SECONDS) keepTalk();
}

function ask(content) {
  if (asking || !content) return;
  talk.push({ role: "user", content });
  answer();
}

function send() {
  const content = at("prompt").value.trim();
  if (asking || !content) return;
  at("prompt").value = "";
  fitPrompt();
  ask(content);
}

function retry() {
  if (asking || !talk.length) return;
  if (talk.at(-1).role === "assistant") talk.pop();
  if (talk.length) answer(); else showTalk();
}

function begin() {
  if (asking) asking.abort();
  newTalk();
  sights = [];
  at("live").hidden = true;
  showTalk();
  at("prompt").focus();
}

// --- the state of the server ---

async function readModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (response.status === 401) requireKey();
  if (!response.ok) return;
  [model] = (await response.json()).data;
  const { profile, figures } = model.flowspec;
  emulation = profile ? `${figures} as ${profile}` : "";
  at("model").textContent = model.id;
  document.title = `${model.id} · FlowSpec`;
}

async function look() {
  if (document.hidden) return;
  let state = "the server cannot be reached";
  try {
    const { status, reason } = await (await fetch("/readyz")).json();
    state = status === "ok" ? "" : reason ? `${status}: ${reason}` : status;
    if (status === "ok" && !model && !key_problem) {
      await readModel();
      if (!asking) showTalk();
    }
  } catch { /* it cannot be reached */ }
  if (!key_problem) await readBoards(headers());
  at("health").textContent = state;
  at("health").hidden = !state;
}

// --- user input ---

function fitPrompt() {
  at("prompt").style.height = "auto";
  at("prompt").style.height = at("prompt").scrollHeight + 2 + "px";
  keep(session, "prompt", at("prompt").value);
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); if (asking) asking.abort(); else send(); });
at("prompt").addEventListener("input", fitPrompt);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
at("fresh").addEventListener("click", () => { if (talk.length) begin(); });
at("settings").addEventListener("click", () => {
  for (const field of at("fields").querySelectorAll("input")) field.value = settings[field.name] ?? "";
  at("settings_dialog").showModal();
});
at("settings_dialog").addEventListener("close", () => {
  const key = settings.key;
  for (const field of at("fields").querySelectorAll("input")) settings[field.name] = field.value;
  keepSettings();
  if (settings.key !== key) unlock(settings.key);
});
at("show_boards").addEventListener("click", () => {
  showBoards(at("boards").hidden);
  keep(local, "boards", !at("boards").hidden);
  look();
});
at("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
  keep(local, "theme", dark ? "light" : "dark");
});
at("live").addEventListener("toggle", () => {
  keep(local, "live", at("live").open);
  if (at("live").open && sights.length && !asking) showStep(Number(at("step").value));
});
at("step").addEventListener("input", () => showStep(Number(at("step").value)));
at("step_back").addEventListener("click", () => showStep(Number(at("step").value) - 1));
at("step_on").addEventListener("click", () => showStep(Number(at("step").value) + 1));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && asking) asking.abort();
  if (event.altKey && event.key.toLowerCase() === "r") { event.preventDefault(); retry(); }
});
addEventListener("pagehide", () => {
  if (asking) keepTalk();
  is_leaving = true;
});

setTheme(kept(local, "theme", ""));
showBoards(kept(local, "boards", false));
at("live").open = kept(local, "live", true);
at("prompt").value = kept(session, "prompt", "");
fitPrompt();
restoreTalk();
showTalk();
look();
setInterval(look, 1000 * POLL_SECONDS);
