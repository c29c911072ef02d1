// The page itself. All text from elsewhere is set as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const scroller = $("scroller");
const prompt = $("prompt");
const settings = $("settings");
const inputs = [...document.querySelectorAll("[data-setting]")];

// The conversation is here and nowhere else.
let messages = [];
let context = 0; // most tokens that fit, once known
let stopper = null; // of the answer that is being made

// --- Colours ---------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}

$("theme").addEventListener("click", () => {
  const shown = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
  const theme = shown === "dark" ? "light" : "dark";
  setTheme(theme);
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // storage is switched off; the choice lasts until the page is closed
  }
});

try {
  setTheme(localStorage.getItem("theme"));
} catch {
  // the same
}

// --- Settings --------------------------------------------------------------------------------

/** Fields of a request. Throws Problem when one is not a number that the field takes. */
function chosen() {
  const wrong = inputs.find((input) => !input.checkValidity());
  if (wrong) {
    openSettings(wrong);
    wrong.reportValidity();
    throw new Problem("One of the settings is not a value that it can have.");
  }
  const given = inputs.filter((input) => input.value !== "");
  return Object.fromEntries(given.map((input) => [input.dataset.setting, input.valueAsNumber]));
}

function openSettings(field) {
  if (!settings.open) settings.showModal();
  field?.focus();
}

$("defaults").addEventListener("click", () => {
  for (const input of [...inputs, $("system")]) input.value = input.defaultValue;
});
$("open-settings").addEventListener("click", () => openSettings());
settings.addEventListener("click", (event) => {
  if (event.target === settings) settings.close(); // beside the panel
});
settings.addEventListener("close", () => {
  prompt.focus();
  if (!context) greet(); // maybe there is a key now
});

// --- What is shown ---------------------------------------------------------------------------

/** Adds to the log; goes to the end if that was in sight, or `always`. */
function add(item, always = false) {
  keepingEnd(() => $("log").append(item), always);
  return item;
}

function keepingEnd(change, always = false) {
  const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  change();
  if (always || left < 60) scroller.scrollTop = scroller.scrollHeight;
}

function showProblem(problem) {
  const card = add(element("div", "problem"), true);
  card.setAttribute("role", "alert");
  card.append(element("p", "", problem.message));
  if (problem.status === 401) {
    const enter = element("button", "plain", "Enter the key");
    enter.type = "button";
    enter.addEventListener("click", () => openSettings($("key")));
    card.append(enter);
  }
}

function dropProblems() {
  for (const card of document.querySelectorAll(".problem")) card.remove();
}

// --- Asking and answering --------------------------------------------------------------------

function ask(text) {
  if (stopper || !text.trim()) return;
  dropProblems();
  $("welcome").hidden = true;
  for (const button of document.querySelectorAll(".again")) button.remove();
  const question = element("article", "question", text);
  question.setAttribute("aria-label", "You");
  add(question, true);
  messages.push({ role: "user", content: text });
  prompt.value = "";
  fit();
  answer(question);
}

/** Has the conversation answered. `question` is taken back if nothing comes of it. */
async function answer(question) {
  const conversation = messages;
  stopper = new AbortController();
  busy(true);
  const article = element("article", "answer");
  article.setAttribute("aria-label", "Answer");
  const body = element("div", "text");
  const list = element("dl", "figures");
  article.append(body, list);
  add(article, true);
  const taken = { start: performance.now(), first: 0, last: 0, events: 0, usage: null, end: "" };
  let text = "";
  let shown = [];
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    keepingEnd(() => {
      shown = show(body, text, shown);
      list.replaceChildren(...figures(taken));
    });
  };
  try {
    const system = $("system").value.trim();
    const request = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
      ...chosen(),
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await call("/v1/chat/completions", $("key").value, {
      method: "POST",
      body: JSON.stringify(request),
      signal: stopper.signal,
    });
    for await (const event of events(response)) {
      const [choice] = event.choices;
      if (event.usage) taken.usage = event.usage;
      if (!choice) continue;
      taken.last = performance.now();
      taken.first ||= taken.last;
      taken.events += 1;
      text += choice.delta.content ?? "";
      if (choice.finish_reason === "length") taken.end = "cut at the limit";
      drawing ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error.name === "AbortError") {
      taken.end = "stopped";
    } else {
      taken.end = "not complete";
      showProblem(error instanceof Problem ? error : new Problem(`Something went wrong: ${error}`));
    }
  }
  cancelAnimationFrame(drawing);
  draw();
  stopper = null;
  busy(false);
  if (conversation !== messages) return; // another one has begun
  if (taken.events) finish(article, text, taken);
  else takeBack(article, question);
}

function finish(article, text, taken) {
  messages.push({ role: "assistant", content: text });
  if (taken.usage && context) {
    showContext(taken.usage.prompt_tokens + taken.usage.completion_tokens);
  }
  const tools = element("div", "tools");
  if (navigator.clipboard) tools.append(tool("Copy", "copy", () => copy(text)));
  const again = () => {
    dropProblems();
    messages.pop();
    article.remove();
    answer(null);
  };
  tools.append(tool("Try again", "again", again));
  keepingEnd(() => article.append(tools));
  $("status").textContent = `Answer: ${text}`;
}

function showContext(used) {
  $("context").textContent = `${count.format(used)} of ${count.format(context)} tokens used`;
}

/** No answer came: the question goes back to where it can be sent again. */
function takeBack(article, question) {
  article.remove();
  const { content } = messages.pop();
  question ??= [...document.querySelectorAll(".question")].pop();
  question.remove();
  if (!prompt.value) prompt.value = content;
  fit();
  if (!messages.length && !document.querySelector(".problem")) $("welcome").hidden = false;
  $("status").textContent = "No answer.";
}

function tool(label, name, act) {
  const button = element("button", `tool ${name}`, label);
  button.type = "button";
  button.addEventListener("click", act);
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    $("status").textContent = "Copied.";
  } catch {
    $("status").textContent = "The browser does not let this page copy.";
  }
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  document.body.classList.toggle("busy", is);
  if (is) $("status").textContent = "Answering.";
  if (!settings.open) prompt.focus();
}

function stop() {
  stopper?.abort();
}

// --- The field that is typed into ------------------------------------------------------------

/** As high as its text, within what the style allows. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  $("send").disabled = !prompt.value.trim();
}

prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask(prompt.value);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !settings.open) stop();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(prompt.value);
});
$("stop").addEventListener("click", stop);
for (const button of document.querySelectorAll(".starter")) {
  button.addEventListener("click", () => ask(button.textContent));
}
$("new").addEventListener("click", () => {
  stop();
  messages = []; // an answer that is being stopped ends the old one
  $("log").replaceChildren();
  $("welcome").hidden = false;
  if (context) showContext(0);
  prompt.focus();
});

// --- Where the end is ------------------------------------------------------------------------

function watchEnd() {
  const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  $("to-end").hidden = left < 120;
}
scroller.addEventListener("scroll", watchEnd, { passive: true });
new ResizeObserver(watchEnd).observe($("log"));
$("to-end").addEventListener("click", () => {
  scroller.scrollTop = scroller.scrollHeight;
  prompt.focus();
});

// --- Which model -----------------------------------------------------------------------------

async function greet() {
  try {
    const response = await call("/v1/models", $("key").value);
    const [model] = (await response.json()).data;
    context = model.max_model_len;
    $("model").textContent = model.id;
    document.title = `${model.id} · Ortolan`;
    showContext(0);
    dropProblems();
  } catch (error) {
    $("model").textContent = "";
    if (error instanceof Problem && error.status === 401) {
      dropProblems();
      showProblem(error);
    } else {
      setTimeout(greet, 2000); // it starts, or is away; what is asked meanwhile says why not
    }
  }
}

fit();
greet();
