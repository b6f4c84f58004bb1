"use strict";
// A chat with the gateway that serves this page, by OpenAI's protocol.

const at = (id) => document.getElementById(id);
const chat = []; // messages, as the protocol has them
const STOP_MS = 20000; // for a step to end, and the answer with it
let asking = null; // the request under way: what aborts it, its name, and whether it is to stop

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const token = at("token").value.trim();
  return token ? { authorization: `Bearer ${token}` } : {};
}

function shown(role) {
  const item = element("li", role);
  item.append(element("p", "who", role === "user" ? "You" : "Model"), element("p", "text"));
  at("log").append(item);
  return item;
}

function count(number, one) {
  return `${number} ${one}${number === 1 ? "" : "s"}`;
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

function costOf(usage) {
  const cost = usage.spu_llm, online = cost.seconds.prefill + cost.seconds.decode;
  return [
    count(usage.completion_tokens, "token"),
    `${online.toFixed(1)} s, ${megabytes(cost.bytes.online)} online`,
    `${cost.seconds.offline.toFixed(1)} s waited for correlated randomness ` +
      `(${megabytes(cost.bytes.offline)})`,
    cost.drafted ? `${cost.accepted} of ${cost.drafted} drafts accepted` : "no drafts",
    `${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`,
  ].join(" · ");
}

// Splits a stream into events; yields data as text, and comments as news.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield { data: part.slice(6) };
      else if (part.startsWith(": ")) yield { news: JSON.parse(part.slice(2)) };
    }
  }
}

function addText(place, text, drafted) {
  const characters = Array.from(text); // the gateway counts code points
  const parts = [["drafted", characters.slice(0, drafted)], ["", characters.slice(drafted)]];
  for (const [kind, some] of parts) {
    for (const part of some.join("").split(/(\s+)/)) { // a mark under white space looks like text
      if (part) place.append(element("span", part.trim() && kind, part));
    }
  }
}

async function answer() {
  const item = shown("assistant"), place = item.querySelector(".text");
  asking = { abort: new AbortController(), name: "", stops: false };
  settle();
  const began = performance.now();
  const clock = setInterval(() => { item.dataset.s = Math.round((performance.now() - began) / 1000); waits(item); }, 1000);
  let text = "", failed = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      signal: asking.abort.signal,
      body: JSON.stringify({
        model: at("model").value,
        messages: chat,
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number(at("tokens").value),
        temperature: Number(at("temperature").value),
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    asking.name = response.headers.get("x-spu-llm-request");
    for await (const one of events(response.body)) {
      if (one.news) { item.dataset.news = one.news; waits(item); continue; }
      if (one.data === "[DONE]") break;
      const said = JSON.parse(one.data);
      if (said.error) throw new Error(said.error.message);
      const choice = said.choices[0];
      if (choice && choice.delta.content) {
        text += choice.delta.content;
        addText(place, choice.delta.content, said.spu_llm ? said.spu_llm.drafted_characters : 0);
        item.dataset.news = "writing";
      }
      if (said.usage) {
        const cost = costOf(said.usage);
        item.append(element("p", "cost", asking.stops ? `stopped · ${cost}` : cost));
      }
    }
  } catch (error) {
    failed = error.name === "AbortError" ? "Stopped." : error.message;
    item.append(element("p", "cost", failed));
    if (error.name !== "AbortError") item.classList.add("error");
  }
  clearInterval(clock);
  at("news").textContent = "";
  if (text) chat.push({ role: "assistant", content: text });
  asking = null;
  settle();
  look();
  at("words").focus();
}

// Ends the answer after its next step, so that the chat goes on in its session. Where that cannot be,
// or is asked for again, the request is left, and its session ends.
async function stop() {
  const request = asking;
  if (!request) return;
  if (request.name && !request.stops) {
    request.stops = true;
    setTimeout(() => request.abort.abort(), STOP_MS);
    try {
      const response = await fetch(`/v1/requests/${request.name}/stop`, {
        method: "POST",
        headers: { "content-type": "application/json", ...headers() },
        body: "{}",
      });
      if (response.ok) return;
    } catch {
      // the gateway does not answer
    }
  }
  request.abort.abort();
}

function waits(item) {
  const news = asking && asking.stops ? "stopping" : item.dataset.news || "waiting";
  at("news").textContent = `${news} … ${item.dataset.s || 0} s`;
}

function settle() {
  const busy = asking !== null;
  at("send").disabled = busy;
  at("stop").disabled = !busy;
  for (const id of ["retry", "clear", "export"]) at(id).disabled = busy || chat.length === 0;
}

function offer(models) {
  const select = at("model");
  if (models.length && models.join() !== Array.from(select.options, (one) => one.value).join()) {
    select.replaceChildren(...models.map((name) => new Option(name)));
    at("models").hidden = models.length < 2;
  }
}

async function look() {
  try {
    const health = await (await fetch("/health", { headers: headers() })).json();
    offer(health.models || []);
    const ready = (health.ready || []).filter((one) => one.prompt_tokens);
    const best = ready.reduce((a, b) => (b.answer_tokens_at_least > a.answer_tokens_at_least ? b : a), ready[0]);
    const lacking = (health.ready || []).reduce((sum, one) => sum + one.batches_lacking, 0);
    at("ready").textContent = (best
      ? `Ready for ${best.prompt_tokens} tokens of a question and ${best.answer_tokens_at_least} or more of its answer`
      : health.requests ? "A request is being answered"
      : health.conversations ? "A session is open" : "No session is open yet") +
      (lacking ? `; ${count(lacking, "batch").replace("batchs", "batches")} of correlated randomness to make` : "");
    if (at("learned").open) {
      const { learned } = await (await fetch("/privacy", { headers: headers() })).json();
      const facts = Object.entries(learned || {}).map(([party, some]) => {
        const list = element("ul");
        list.append(...some.map((fact) => element("li", "", fact)));
        return [element("h2", "", `The ${party}`), list];
      });
      at("facts").replaceChildren(...facts.flat());
    }
  } catch {
    at("ready").textContent = "The gateway does not answer.";
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = at("words").value.trim();
  if (!words || asking) return;
  at("words").value = "";
  if (chat.length && chat[chat.length - 1].role === "user") chat.pop(); // it got no answer
  chat.push({ role: "user", content: words });
  shown("user").querySelector(".text").textContent = words;
  answer();
});
at("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", stop);
at("retry").addEventListener("click", () => {
  while (chat.length && chat[chat.length - 1].role === "assistant") chat.pop();
  const last = at("log").lastElementChild;
  if (last && last.classList.contains("assistant")) last.remove();
  if (chat.length) answer();
});
at("clear").addEventListener("click", () => {
  chat.length = 0;
  at("log").replaceChildren();
  settle();
});
at("export").addEventListener("click", () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(chat, null, 2)], { type: "application/json" }));
  link.download = "chat.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
at("learned").addEventListener("toggle", look);
setInterval(() => document.hidden || look(), 3000);
look();
