"use strict";
// An answer's Markdown as elements. A model's own markup is shown as text, and what remains is sanitized.

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "strong", "em", "del", "code", "pre", "ul", "ol", "li", "blockquote", "a", "span",
    "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "class", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

function escapeMarkup(text) {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}

marked.use({ gfm: true, breaks: true, renderer: {
  html: ({ text }) => escapeMarkup(text),
  image: ({ href, text }) => escapeMarkup(`${text || "image"} (${href})`),  // a picture would be a request
} });

// Return a document fragment.
function renderMarkdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const code of fragment.querySelectorAll("pre > code")) frameCode(code);
  return fragment;
}

// Put a block of code below a line with its language and a button that copies it.
function frameCode(code) {
  const block = document.createElement("div"), head = document.createElement("div");
  const language = document.createElement("span");
  block.className = "block";
  head.className = "head";
  language.textContent = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "code";
  head.append(language, copyButton("Copy", "Copy this code", () => code.textContent));
  code.parentElement.replaceWith(block);
  const lines = document.createElement("pre");
  lines.append(code);
  lines.tabIndex = 0;
  block.append(head, lines);
}

function copyButton(label, description, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = label;
  button.setAttribute("aria-label", description);
  button.addEventListener("click", async () => {
    const is_copied = await copy(text());
    button.textContent = is_copied ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

// Return whether a text was copied. Without TLS, as at another device's address, browsers have only the old way.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* the old way */ }
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const is_copied = document.execCommand("copy");
  field.remove();
  return is_copied;
}
