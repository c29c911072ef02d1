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

/** Makes `box` show `text`. It only grows, so that what is already right is left alone. */
function show(box, text) {
  const wanted = segments(text);
  wanted.forEach((segment, index) => {
    let element = box.children[index];
    if (!element || (element.tagName === "PRE") !== segment.code) {
      const made = document.createElement(segment.code ? "pre" : "p");
      if (segment.code) {
        made.tabIndex = 0; // so that a long line can be scrolled to by keyboard
        made.append(document.createElement("code"));
      }
      if (element) element.replaceWith(made);
      else box.append(made);
      element = made;
    }
    const shown = segment.code ? element.firstChild : element;
    if (shown.textContent !== segment.text) shown.textContent = segment.text;
    if (segment.code) element.setAttribute("aria-label", `Code ${segment.label}`.trim());
  });
  while (box.children.length > wanted.length) box.lastChild.remove();
}
