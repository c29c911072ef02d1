// An answer's text as elements: paragraphs, and blocks of code where it has fences.
"use strict";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;

/** Text -> [{code, label, text}]: what lies outside fences and inside, in order. */
function segments(text) {
  const found = [];
  let lines = [];
  let open = null; // the fence that is open
  let label = "";
  const close = () => {
    const body = lines.join("\n");
    if (open || body.trim()) found.push({ code: Boolean(open), label, text: open ? body : body.trim() });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    const closes = open && fence && fence[1].startsWith(open) && !fence[2].trim();
    if (closes || (fence && !open)) {
      close();
      open = closes ? null : fence[1];
      label = closes ? "" : fence[2].trim();
    } else {
      lines.push(line);
    }
  }
  close();
  return found;
}

function element(tag, name, text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}

/** A paragraph's text, with elements for what stands in single backticks. */
function inline(text) {
  // Split by a pattern with a group: what the group holds is at the odd places.
  return text.split(/`([^`\n]+)`/).map((part, index) => (index % 2 ? element("code", "", part) : part));
}

/** Makes `box`, which shows the segments `before`, show those of `text`; returns these. */
function show(box, text, before) {
  const wanted = segments(text);
  wanted.forEach((segment, index) => {
    if (JSON.stringify(segment) === JSON.stringify(before[index])) return;
    const made = element(segment.code ? "pre" : "p");
    if (segment.code) {
      made.tabIndex = 0; // so that a long line can be scrolled by keyboard
      made.setAttribute("aria-label", `Code ${segment.label}`.trim());
      made.append(element("code", "", segment.text));
    } else {
      made.append(...inline(segment.text));
    }
    if (box.children[index]) box.children[index].replaceWith(made);
    else box.append(made);
  });
  while (box.children.length > wanted.length) box.lastChild.remove();
  return wanted;
}
