// ---- the connection --------------------------------------------------------------------------------------------------

const RETRY_S = [1, 2, 4, 8, 15, 30];
const SILENT_S = 20; // without a word from the server, which sends a sign of life more often
const link = { heard: 0, tries: 0, again: 0, timer: null, source: null, trouble: null };

function take(text) {
  const found = JSON.parse(text);
  link.heard = performance.now();
  link.tries = 0;
  link.trouble = null;
  view = found;
  control = found.control === true;
  members = new Map(view.members.map((member) => [member.id, member]));
  names = new Map(view.members.map((member) => [member.id, member.name]));
  for (const loss of view.losses) for (const member of loss.members) names.set(member.id, member.name);
  redraw();
  tell();
}

async function connect() {
  clearTimeout(link.timer);
  link.source?.close();
  link.again = 0;
  try {
    // The first view comes by itself: an EventSource does not tell what is wrong.
    const answer = await fetch("api/view", { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 300) || `${answer.status} ${answer.statusText}`);
    const date = Date.parse(answer.headers.get("date") ?? "");
    if (!Number.isNaN(date) && Math.abs(date - Date.now()) > 2000) skew = (date - Date.now()) / 1000;
    take(await answer.text());
  } catch (error) {
    return retry(error instanceof TypeError ? "it cannot be reached" : error.message);
  }
  link.source = new EventSource("api/stream");
  link.source.addEventListener("message", (event) => take(event.data));
  link.source.addEventListener("error", () => retry("the connection has broken"));
}

function retry(trouble) {
  link.source?.close();
  link.source = null;
  link.trouble = trouble;
  const wait = RETRY_S[Math.min(link.tries++, RETRY_S.length - 1)] * (0.8 + 0.4 * Math.random());
  link.again = performance.now() + 1000 * wait;
  clearTimeout(link.timer);
  link.timer = setTimeout(connect, 1000 * wait);
  tell();
}

// Says what there is to say about the connection and the job as a whole.
function tell() {
  const age = link.heard ? (performance.now() - link.heard) / 1000 : null, ended = view !== null && view.ended !== null;
  if (link.source && !ended && age > SILENT_S) return retry("it has fallen silent");
  const stale = link.trouble !== null && !ended;
  document.body.classList.toggle("stale", stale && view !== null);
  say($("freshness"), age === null ? "" : ended ? "" : stale ? `as of ${duration(age)} ago` : age < 3 ? "live" : `live, updated ${duration(age)} ago`);
  const box = $("banner"), action = $("banner-do");
  const banner = (tone, text, label) => {
    box.className = tone;
    box.hidden = false;
    say($("banner-text"), text);
    action.hidden = !label;
    say(action, label ?? "");
  };
  if (ended) {
    const ran = view.started === null ? "" : ` after ${duration(view.ended - view.started)}`;
    banner(view.exit_code === 0 ? "good" : "bad", `The job has ended with exit code ${view.exit_code ?? "unknown"}${ran}. This is its last state.`);
  } else if (stale) {
    const wait = Math.max(0, (link.again - performance.now()) / 1000);
    const what = view === null ? "" : ` What is below is ${duration(age)} old.`;
    banner("warn", `No word from the job's leader: ${link.trouble}.${what} ${link.again ? `Next try in ${Math.ceil(wait)} s.` : "Trying …"}`, "Try now");
  } else if (view === null) banner("note", "Connecting …");
  else box.hidden = true;
}
$("banner-do").addEventListener("click", connect);
setInterval(() => {
  tell();
  if (view !== null && !document.hidden) drawTiles(); // ages
}, 1000);

// ---- orders, where the server takes them -----------------------------------------------------------------------------

let order = null;

function ask(title, text, yes, path, body) {
  order = { path, body };
  say($("ask-title"), title);
  say($("ask-text"), text);
  say($("ask-yes"), yes);
  say($("ask-error"), "");
  $("ask-yes").disabled = false;
  $("ask").showModal();
  $("ask-no").focus();
}

const askToLeave = (member) =>
  ask(`Let ${member.name} leave?`, `Member ${member.id}${where(member)} hands over what it owns, then its worker ends. The job goes on without it.`, `Let ${member.name} leave`, "api/leave", { member: member.id });

$("stop").addEventListener("click", () => ask(`Stop ${view.job}?`, "All workers of the job are ended. It goes on only if somebody starts it again, from its newest checkpoint.", "Stop the job", "api/stop", {}));
$("ask-no").addEventListener("click", () => $("ask").close());
$("ask-yes").addEventListener("click", async () => {
  $("ask-yes").disabled = true;
  try {
    const answer = await fetch(order.path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(order.body) });
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 300) || `${answer.status} ${answer.statusText}`);
    $("ask").close();
  } catch (error) {
    say($("ask-error"), error instanceof TypeError ? "The job's leader cannot be reached." : error.message);
    $("ask-yes").disabled = false;
  }
});

connect();
