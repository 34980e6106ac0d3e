// ---- elements ----

const $ = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function say(node, text, tone) {
  if (node.textContent !== text) node.textContent = text;
  if (tone !== undefined)
    for (const each of ["good", "warn", "bad", "note"]) node.classList.toggle(each, each === tone);
}

// The children of `parent` become those of `items`, in order: one node per key, updated only where its item has changed.
function sync(parent, items, key, make, update) {
  const known = (parent.known ??= new Map()),
    left = new Set(known.keys());
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = key(item),
      now = JSON.stringify(item);
    let node = known.get(name);
    if (node === undefined) known.set(name, (node = make(item)));
    left.delete(name);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
    if (node.item !== now) update(node, item);
    node.item = now;
  }
  for (const name of left) {
    known.get(name).remove();
    known.delete(name);
  }
}

// `draw` fills `node` anew, but only if `what` is not what it was.
function once(node, what, draw) {
  const now = JSON.stringify(what);
  if (node.shown === now) return;
  node.shown = now;
  node.replaceChildren(...[draw()].flat(Infinity).filter((child) => child !== null && child !== undefined));
}

// ---- words ----

const number = (value, digits = 0) =>
  (value + 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const counted = (count, one, several = one + "s") => `${number(count)} ${count === 1 ? one : several}`;
const percent = (share) => `${number(100 * share, 1)} %`;
const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
const date = (time) => new Date(1000 * time).toLocaleString("en-GB");
const listed = (words) => (words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words.join(""));

function duration(seconds) {
  if (seconds < 0.995) return `${number(seconds, 2)} s`;
  if (seconds < 9.95) return `${number(seconds, 1)} s`;
  if (seconds < 119.5) return `${number(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${number(minutes / 1440, 1)} days`;
}

function bytes(size) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(size, 1)) / 3)));
  return `${number(size / 1000 ** power, power && size / 1000 ** power < 10 ? 1 : 0)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

// state of the job: sign, tone, words
const JOB = {
  starting: ["○", "note", "starting"],
  building: ["◐", "note", "building its engines"],
  training: ["▶", "good", "training"],
  recovering: ["↻", "bad", "recovering"],
  waiting: ["…", "warn", "waiting for members"],
  restarting: ["↻", "warn", "restarting from a checkpoint"],
  ended: ["■", "note", "ended"],
  reading: ["◔", "note", "reading what has happened so far"],
};
// state of a role: sign, words
const ROLE = {
  shadowed: ["✓", "shadowed"],
  copying: ["◐", "replica is being copied"],
  unshadowed: ["!", "no replica"],
  lost: ["×", "lost"],
};
const HOW = {
  exit: (d) => `exited (${/^\d+$/.test(d) ? `code ${d}` : d})`,
  signal: (d) => `died (${d})`,
  heartbeat: (d) => `stopped its heartbeat (${d})`,
  hang: (d) => `made no progress (${d})`,
  lease: (d) => `fell silent (its lease ${d})`,
  suspects: (d) => `is out of reach of ${d}`,
  abort: (d) => `could not go on (${d})`,
};
const how = (member) => (HOW[member.reason] ?? ((d) => `${member.reason} (${d})`))(member.detail);
const where = (member) => (member.host ? ` on host ${member.host}` : "");
