// The built-in page: a chat over the server's own API, its load, and the machine that it runs on.
// Texts of models and users are only ever set as text, never as markup.

const root = document.body.dataset.root;
const at = (id) => document.getElementById(id);
const HISTORY = 120; // seconds of the graph
const conversation = [];
const rates = [];
let key = sessionStorage.getItem("srv-key") || "";
let last = null; // the state before, to compute rates
let chats = true; // whether the model has a chat template
let running = null; // the AbortController of the answer that is being generated

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

function show(list, rows) {
  list.replaceChildren(
    ...rows.flatMap(([name, value]) => {
      const term = document.createElement("dt");
      const shown = document.createElement("dd");
      term.textContent = name;
      shown.textContent = value;
      return [term, shown];
    }),
  );
}

function setStatus(text, bad = false) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", bad);
}

async function refresh() {
  let response;
  try {
    response = await fetch(`${root}/ui/state`, { headers: headers() });
  } catch {
    setStatus("the server does not answer", true);
    return;
  }
  at("key-section").hidden = response.status !== 401;
  if (!response.ok) {
    setStatus(response.status === 401 ? "an API key is needed" : `status ${response.status}`, true);
    return;
  }
  showState(await response.json());
}

function showState(state) {
  const { load, machine } = state;
  chats = state.chat;
  document.title = state.model;
  at("model").textContent = state.model;
  setStatus(load === null ? "the engine does not answer" : load.paused ? "paused" : "ready", load === null);
  if (load !== null) showLoad(load);
  show(at("machine"), [
    ["Platform", machine.cell],
    ["Device", machine.device],
    ["Model", machine.model],
    ...Object.entries(machine.backends),
    ...Object.entries(machine.slower).map(([what, why]) => [`Slower: ${what}`, why]),
    ["srv", state.version],
  ]);
}

function showLoad(load) {
  const now = performance.now() / 1000;
  if (last !== null && now > last.now) {
    rates.push(Math.max(0, (load.generated_tokens - last.generated) / (now - last.now)));
    if (rates.length > HISTORY) rates.shift();
  }
  last = { now, generated: load.generated_tokens };
  const used = load.pages_total ? Math.round((100 * load.pages_held) / load.pages_total) : 0;
  const hits = load.prompt_tokens ? Math.round((100 * load.cached_tokens) / load.prompt_tokens) : 0;
  show(at("load"), [
    ["Tokens/s", rates.length ? rates[rates.length - 1].toFixed(1) : "0.0"],
    ["Running", load.running],
    ["Waiting", load.waiting],
    ["KV cache in use", `${used} %`],
    ["Prefix cache hits", `${hits} %`],
    ["Generated tokens", load.generated_tokens],
  ]);
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, index) => `${HISTORY - rates.length + index},${29 - (28 * rate) / top}`);
  at("history").querySelector("polyline").setAttribute("points", points.join(" "));
}

function addMessage(who) {
  const message = document.createElement("article");
  message.className = "message";
  for (const part of ["who", "thinking", "text"]) {
    const element = document.createElement("div");
    element.className = part;
    message.append(element);
  }
  message.querySelector(".who").textContent = who;
  message.querySelector(".thinking").hidden = true;
  at("messages").append(message);
  return {
    element: message,
    add(part, text) {
      const place = message.querySelector(`.${part}`);
      place.hidden = false;
      place.append(text);
    },
    note(text, bad = false) {
      const place = message.querySelector(".who");
      place.textContent = `${who} · ${text}`;
      place.classList.toggle("error", bad);
    },
  };
}

async function* eventsOf(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function requestBody(prompt) {
  const body = { stream: true, stream_options: { include_usage: true } };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (at("max-tokens").value !== "") body.max_tokens = Number(at("max-tokens").value);
  return chats ? { ...body, messages: conversation } : { ...body, prompt };
}

async function send(prompt) {
  conversation.push({ role: "user", content: prompt });
  addMessage("You").add("text", prompt);
  const shown = addMessage("Model");
  const started = performance.now();
  let answer = "";
  let first = null;
  let tokens = 0;
  running = new AbortController();
  try {
    const response = await fetch(`${root}/v1/${chats ? "chat/" : ""}completions`, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(requestBody(prompt)),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        const text = chats ? choice.delta.content : choice.text;
        const thinking = chats ? choice.delta.reasoning_content : null;
        if ((text || thinking) && first === null) first = performance.now();
        if (thinking) shown.add("thinking", thinking);
        if (text) {
          answer += text;
          shown.add("text", text);
        }
      }
    }
    const seconds = (performance.now() - started) / 1000;
    const wait = first === null ? 0 : first - started;
    shown.note(`${tokens} tokens, ${(tokens / seconds).toFixed(1)} per second, first after ${wait.toFixed(0)} ms`);
  } catch (error) {
    shown.note(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
    if (answer === "") conversation.pop(); // the next message does not repeat one that got no answer
  } finally {
    running = null;
  }
  if (answer !== "") conversation.push({ role: "assistant", content: answer });
}

at("compose").addEventListener("submit", async (event) => {
  event.preventDefault();
  const prompt = at("prompt").value;
  if (running !== null || prompt.trim() === "") return;
  at("prompt").value = "";
  at("send").disabled = true;
  at("stop").disabled = false;
  await send(prompt);
  at("send").disabled = false;
  at("stop").disabled = true;
  at("prompt").focus();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("compose").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  at("messages").replaceChildren();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("srv-key", key);
  at("key").value = "";
  refresh();
});

await refresh();
setInterval(() => {
  if (!document.hidden) refresh();
}, 1000);
