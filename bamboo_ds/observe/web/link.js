// ---- the connection ----

const RETRY_S = [1, 2, 4, 8, 15, 30];
const SILENT_S = 20; // of a stream after which a new one is begun
const ANSWER_S = 5;
const link = { heard: 0, tries: 0, again: 0, timer: null, source: null, trouble: null };

function heard() {
  link.heard = performance.now();
  link.tries = 0;
  link.trouble = null;
}

// Takes some of the view's fields, or all of them.
function take(fields) {
  heard();
  view = Object.assign(view ?? {}, fields);
  if (fields.members || fields.losses) {
    members = new Map(view.members.map((member) => [member.id, member]));
    names = new Map(view.losses.flatMap((loss) => loss.members.map((member) => [member.id, member.name])));
    for (const member of view.members) names.set(member.id, member.name);
  }
  redraw();
  tell();
}

async function api(path, options) {
  const answer = await fetch(`api/${path}`, {
    cache: "no-store",
    signal: AbortSignal.timeout(1000 * ANSWER_S),
    ...options,
  });
  if (answer.status === 401) location.assign("login");
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? `${answer.status} ${answer.statusText}`);
  const date = Date.parse(answer.headers.get("date") ?? "");
  skew = Math.abs(date - Date.now()) > 2000 ? (date - Date.now()) / 1000 : 0;
  return body;
}

const problem = (error) =>
  ({ TypeError: "it cannot be reached", TimeoutError: "it does not answer", AbortError: "it does not answer" })[
    error.name
  ] ?? error.message;

async function connect() {
  clearTimeout(link.timer);
  link.source?.close();
  link.source = null;
  link.again = 0;
  try {
    // Asked first, since an EventSource does not tell what is wrong.
    control = (await api("controls")).control;
  } catch (error) {
    return retry(problem(error));
  }
  link.source = new EventSource("api/stream");
  link.source.addEventListener("message", (event) => take(JSON.parse(event.data)));
  link.source.addEventListener("error", () => retry("the connection has broken"));
  link.heard = performance.now();
}

function retry(trouble) {
  link.source?.close();
  link.source = null;
  link.trouble = trouble;
  if (view !== null && view.ended !== null) return; // its server ends with it
  const wait = RETRY_S[Math.min(link.tries++, RETRY_S.length - 1)] * (0.8 + 0.4 * Math.random());
  link.again = performance.now() + 1000 * wait;
  clearTimeout(link.timer);
  link.timer = setTimeout(connect, 1000 * wait);
  tell();
}

// A stream in which nothing comes looks the same whether nothing happens, the server's host is gone, or another member
// has taken its address: a new one begins with all there is to know.
function check() {
  if (link.source !== null && performance.now() - link.heard >= 1000 * SILENT_S) connect();
}

// Says what there is to say about the connection and the job as a whole.
function tell() {
  const ended = view !== null && view.ended !== null,
    stale = link.trouble !== null && !ended;
  const silent = link.heard ? (performance.now() - link.heard) / 1000 : 0;
  document.body.classList.toggle("stale", stale && view !== null);
  say($("freshness"), view === null || ended ? "" : stale ? `as of ${duration(silent)} ago` : "● live");
  const box = $("banner"),
    action = $("banner-do");
  const banner = (tone, text, label) => {
    box.className = tone;
    box.hidden = false;
    say($("banner-text"), text);
    action.hidden = !label;
    say(action, label ?? "");
  };
  if (ended) {
    const ran = view.started === null ? "" : ` after ${duration(view.ended - view.started)}`;
    const code = view.exit_code === null ? "" : ` with exit code ${view.exit_code}`;
    banner(view.exit_code === 0 ? "good" : "bad", `The job has ended${code}${ran}. This is its last state.`);
  } else if (stale) {
    const wait = Math.ceil(Math.max(0, (link.again - performance.now()) / 1000));
    const next = link.again && wait ? `Next try in ${wait} s.` : "Trying …";
    const over = view !== null && (view.stopping || view.members.some((member) => member.state === "finished"));
    const what =
      view === null
        ? ""
        : over
          ? ` It was about to end: bamboo events --job ${view.job} tells how.`
          : ` Another member may lead by now: bamboo web --job ${view.job} prints where its page is.`;
    const age = view === null ? "" : ` What is below is ${duration(silent)} old.`;
    banner("warn", `No word from the job's leader: ${link.trouble}.${age}${what} ${next}`, "Try now");
  } else if (view === null) banner("note", "Connecting …");
  else box.hidden = true;
}
$("banner-do").addEventListener("click", connect);
setInterval(() => {
  check();
  tell();
  if (view !== null && !document.hidden) drawTiles(); // ages
}, 1000);

// ---- orders, where the server takes them ----

let order = "";

function ask(title, text, yes, path) {
  order = path;
  say($("ask-title"), title);
  say($("ask-text"), text);
  say($("ask-yes"), yes);
  say($("ask-error"), "");
  $("ask-yes").disabled = false;
  $("ask").showModal();
  $("ask-no").focus();
}

function askToLeave(member) {
  const text = `Member ${member.id}${where(member)} hands over what it owns, then its worker ends. The job goes on without it.`;
  ask(`Let ${member.name} leave?`, text, `Let ${member.name} leave`, `leave/${encodeURIComponent(member.id)}`);
}

$("stop").addEventListener("click", () => {
  const saved = view.checkpoint
    ? `its newest checkpoint, of step ${number(view.checkpoint.step)}`
    : "the beginning, as it has no checkpoint";
  ask(
    `Stop ${view.job}?`,
    `All workers are ended. If the job is started again it goes on from ${saved}.`,
    "Stop the job",
    "stop",
  );
});
$("ask-no").addEventListener("click", () => $("ask").close());
$("ask-yes").addEventListener("click", async () => {
  $("ask-yes").disabled = true;
  try {
    await api(order, { method: "POST", signal: AbortSignal.timeout(15000) });
    $("ask").close();
    if (order === "stop") take({ stopping: "asked for on this page" }); // its server may not live to say so
  } catch (error) {
    say($("ask-error"), `That was not done: ${problem(error)}.`);
    $("ask-yes").disabled = false;
  }
});

connect();
