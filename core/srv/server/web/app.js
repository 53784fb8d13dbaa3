// The built-in page: a chat over the server's own API, its load, and the machine that it runs on.
// Texts of models and users are only ever set as text, or as what markdown.js makes of them; never as markup.

const root = document.body.dataset.root;
const at = (id) => document.getElementById(id);
const HISTORY = 120; // seconds of the graph
const rates = [];
let chat = storedChats()[0] ?? newChat();
let key = sessionStorage.getItem("srv-key") || "";
let last = null; // the state before, to compute rates
let chats = true; // whether the model has a chat template
let running = null; // the AbortController of the answer that is being generated

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

// ---- load and machine

function show(list, rows) {
  list.replaceChildren(...rows.flatMap(([name, value, why]) => [make("dt", name), described(value, why)]));
}

// A value; a click on it shows why, if there is a reason.
function described(value, why) {
  if (!why) return make("dd", String(value));
  return make("dd", make("details", make("summary", value), make("p", why)));
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

let machineShown = "";

function showState(state) {
  const { load, machine } = state;
  chats = state.chat;
  document.title = state.model;
  at("model").textContent = state.model;
  at("context").textContent = `${state.context.toLocaleString("en")} tokens of context`;
  setStatus(load === null ? "the engine does not answer" : load.paused ? "paused" : "ready", load === null);
  if (load !== null) showLoad(load);
  if (machineShown !== JSON.stringify(machine)) showMachine(machine, state.version); // else, opened reasons would close
  machineShown = JSON.stringify(machine);
}

function showMachine(machine, version) {
  const backends = Object.entries(machine.backends).map(([slot, why]) => {
    const [name, reason] = why.split(" because ");
    return [slot.replace(/_backend$/, "").replaceAll("_", " "), name, reason && `because ${reason}`];
  });
  const slower = Object.entries(machine.slower).map(([what, why]) => ["Slower", what, why]);
  show(at("machine"), [
    ["Platform", machine.cell],
    ["Device", machine.device],
    ["Model", machine.model],
    ...backends,
    ...slower,
    ["srv", version],
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

// ---- messages

function button(text, act) {
  const element = make("button", text);
  element.type = "button";
  element.addEventListener("click", () => act(element));
  return element;
}

function showMessage({ role, content, thinking = "" }) {
  const who = make("div", role === "user" ? "You" : "Model");
  who.className = "who";
  const thought = make("details", make("summary", "Thinking"), make("div"));
  thought.className = "thinking";
  const text = make("div");
  text.className = "text";
  const actions = make("div", button("Copy", (element) => copyText(element, shown.content)));
  actions.className = "actions";
  const element = make("article", who, thought, text, actions);
  element.className = `message ${role}`;
  const shown = { content, thinking, element };
  let drawn = true;

  function draw() {
    drawn = true;
    thought.hidden = shown.thinking === "";
    thought.lastChild.textContent = shown.thinking;
    if (role === "user") text.textContent = shown.content;
    else text.replaceChildren(...markdown(shown.content));
  }

  shown.add = (part, more) => {
    const below = window.innerHeight + window.scrollY >= document.body.scrollHeight - 80;
    shown[part] += more;
    if (drawn) requestAnimationFrame(() => (draw(), below && window.scrollTo(0, document.body.scrollHeight)));
    drawn = false;
  };
  shown.note = (note, bad = false) => {
    draw();
    who.textContent = `${role === "user" ? "You" : "Model"} · ${note}`;
    who.classList.toggle("error", bad);
  };
  draw();
  at("messages").append(element);
  return shown;
}

// Only the last answer can be generated again.
function offerRegenerate() {
  document.querySelector("#regenerate")?.remove();
  const answers = document.querySelectorAll(".message.assistant .actions");
  if (running !== null || answers.length === 0) return;
  const again = button("Regenerate", () => {
    if (running !== null) return;
    const before = [...chat.messages];
    while (chat.messages.at(-1)?.role === "assistant") chat.messages.pop();
    const prompt = chat.messages.pop()?.content;
    showChat();
    if (prompt !== undefined) send(prompt, before);
  });
  again.id = "regenerate";
  answers[answers.length - 1].append(again);
}

function showChat() {
  at("messages").replaceChildren();
  chat.messages.forEach(showMessage);
  at("system").value = chat.system;
  offerRegenerate();
  showChats();
}

function showChats() {
  const stored = storedChats();
  at("chats-section").hidden = stored.length === 0;
  at("chats").replaceChildren(
    ...stored.map((each) => {
      const open = button(each.title || "Chat", () => choose(each));
      open.className = "chosen-chat";
      open.setAttribute("aria-current", String(each.id === chat.id));
      const remove = button("✕", () => {
        forgetChat(each.id);
        if (each.id === chat.id) choose(newChat());
        else showChats();
      });
      remove.setAttribute("aria-label", `Delete ${each.title || "the chat"}`);
      return make("li", open, remove);
    }),
  );
}

function choose(other) {
  if (other.id === chat.id) return; // its answer goes on
  running?.abort();
  chat = other;
  showChat();
  at("prompt").focus();
}

// ---- a request

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
  if (!chats) return { ...body, prompt };
  const system = chat.system.trim() === "" ? [] : [{ role: "system", content: chat.system }];
  return { ...body, messages: [...system, ...chat.messages.map(({ role, content }) => ({ role, content }))] };
}

// `before`: the messages that the chat has again if there is no answer.
async function send(prompt, before = [...chat.messages]) {
  const own = chat; // another one may be chosen meanwhile
  own.messages.push({ role: "user", content: prompt });
  own.title ||= prompt.trim().slice(0, 60);
  const asked = [...own.messages];
  keepChat(own);
  showChats();
  showMessage({ role: "user", content: prompt });
  const shown = showMessage({ role: "assistant", content: "" });
  shown.element.scrollIntoView({ block: "nearest" });
  running = new AbortController();
  setRunning(true);
  try {
    shown.note(await receive(prompt, shown, running.signal));
  } catch (error) {
    shown.note(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  } finally {
    running = null;
  }
  const { content, thinking } = shown;
  // The next message does not repeat one that got no answer.
  if (content !== "") own.messages.push({ role: "assistant", content, ...(thinking ? { thinking } : {}) });
  else own.messages = before;
  updateChat(own, asked);
  setRunning(false);
  showChats();
}

// Show an answer as it comes; returns what it took.
async function receive(prompt, shown, signal) {
  const started = performance.now();
  let first = null;
  let tokens = 0;
  const response = await fetch(`${root}/v1/${chats ? "chat/" : ""}completions`, {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(requestBody(prompt)),
    signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) tokens = event.usage.completion_tokens;
    for (const choice of event.choices) {
      const text = chats ? choice.delta.content : choice.text;
      const thinking = chats ? choice.delta.reasoning_content : null;
      if (text || thinking) first ??= performance.now();
      if (thinking) shown.add("thinking", thinking);
      if (text) shown.add("content", text);
    }
  }
  const seconds = (performance.now() - started) / 1000;
  const wait = first === null ? 0 : first - started;
  return `${tokens} tokens, ${(tokens / seconds).toFixed(1)} per second, first after ${wait.toFixed(0)} ms`;
}

function setRunning(now) {
  at("send").hidden = now;
  at("stop").hidden = !now;
  at("send").disabled = now;
  offerRegenerate();
  if (!now) at("prompt").focus({ preventScroll: true });
}

// ---- what is clicked and typed

at("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = at("prompt").value;
  if (running !== null || prompt.trim() === "") return;
  at("prompt").value = "";
  send(prompt);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("compose").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => choose(newChat(chat.system)));
at("system").addEventListener("change", () => {
  chat.system = at("system").value;
  updateChat(chat, chat.messages);
});
// Another tab has written to the storage.
window.addEventListener("storage", ({ key, oldValue }) => {
  if (key !== null && key !== STORE) return;
  const stored = storedChat(chat.id);
  const deleted = stored === undefined && (key === null || oldValue?.includes(`"${chat.id}"`));
  if (deleted) choose(newChat(chat.system));
  else if (stored === undefined || running !== null || JSON.stringify(stored) === JSON.stringify(chat)) showChats();
  else {
    chat = stored;
    showChat();
  }
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("srv-key", key);
  at("key").value = "";
  refresh();
});

showChat();
await refresh();
setInterval(() => {
  if (!document.hidden) refresh();
}, 1000);
