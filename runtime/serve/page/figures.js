// What an answer took, as the line under it.
"use strict";

/** A name and a number of what an answer took, as `figures` lists them. */
function figure(name, value, label) {
  const pair = element("div");
  pair.dataset.figure = name;
  pair.append(element("dt", "", label), element("dd", "", value));
  return pair;
}

const count = new Intl.NumberFormat("en");
const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** What an answer took, so far or in all. Before the usage comes, an event counts as a token. */
function figures(taken) {
  const { start, first, last, usage } = taken;
  const tokens = usage ? usage.completion_tokens : taken.events;
  const shown = [figure("tokens", count.format(tokens), tokens === 1 ? "token" : "tokens")];
  if (tokens > 1 && last > first) {
    const rate = ((tokens - 1) / (last - first)) * 1000;
    shown.push(figure("rate", rate.toFixed(rate < 100 ? 1 : 0), "tokens/s"));
  }
  if (first) shown.push(figure("ttft", duration(first - start), "to first token"));
  if (usage) {
    shown.push(figure("prompt", count.format(usage.prompt_tokens), "prompt tokens"));
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    shown.push(figure("cached", count.format(cached), "cached"));
  }
  if (taken.end) shown.push(figure("end", "", taken.end));
  return shown;
}
