// The chats of this browser, the newest first: [{id, title, system, messages: [{role, content, thinking?}]}].
// They are kept in the browser's storage of this server's address, and nowhere else.

const STORE = `srv-chats ${document.body.dataset.root}`;
const MOST_CHATS = 50;

function storedChats() {
  try {
    const chats = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return Array.isArray(chats) ? chats.filter((chat) => Array.isArray(chat?.messages)) : [];
  } catch {
    return []; // of another version, damaged, or a browser without storage
  }
}

function storeChats(chats) {
  for (let kept = chats.slice(0, MOST_CHATS); ; kept = kept.slice(0, -1)) {
    try {
      localStorage.setItem(STORE, JSON.stringify(kept));
      return;
    } catch {
      if (kept.length === 0) return; // no storage: the chat lives as long as the page
    }
  }
}

function storedChat(id) {
  return storedChats().find((chat) => chat.id === id);
}

// Put a chat in front of all others. A chat without messages is not kept.
function keepChat(chat) {
  const others = storedChats().filter((each) => each.id !== chat.id);
  storeChats(chat.messages.length ? [chat, ...others] : others);
}

function forgetChat(id) {
  storeChats(storedChats().filter((each) => each.id !== id));
}

// Store what a chat has become since it had these messages, unless it was deleted meanwhile, here or in another tab.
// If another tab has added to it, both are kept: this one becomes a chat of its own.
function updateChat(chat, before) {
  const stored = storedChat(chat.id);
  if (stored === undefined) return;
  if (JSON.stringify(stored.messages) !== JSON.stringify(before)) chat.id = newId();
  keepChat(chat);
}

function newId() {
  return `${Date.now()}-${Math.random()}`;
}

function newChat(system = "") {
  return { id: newId(), title: "", system, messages: [] };
}
