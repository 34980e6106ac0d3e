// ---- what is shown ----

let view = null; // the newest LiveView
let names = new Map(); // of members, by id
let members = new Map(); // by id
let chosen = null; // {member: id} or {rank: number}
let skew = 0; // seconds that the server's clock is ahead
let control = false; // whether the server takes orders

const name = (id) => names.get(id) ?? id.split("-")[0];
const named = (text) => text.replace(/\bm\d+-[0-9a-f]{8}\b/g, name); // members by their names
const now = () => Date.now() / 1000 + skew;
const role = ([pipeline, stage]) => (view.pipelines > 1 ? `stage ${stage} of pipeline ${pipeline}` : `stage ${stage}`);
const roles = (several) =>
  several.length > 6
    ? `${counted(several.length, "stage")}: ${several.slice(0, 6).map(role).join(", ")}, …`
    : listed(several.map(role));

let asked = false;
function redraw() {
  if (asked || view === null || document.hidden) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    draw();
  });
}
document.addEventListener("visibilitychange", redraw);

function draw() {
  $("main").hidden = false;
  document.title = `${JOB[view.state]?.[0] ?? ""} ${view.job} – bamboo`;
  drawHead();
  drawTiles();
  drawGrid();
  drawMembers();
  drawNext();
  drawChosen();
  drawCharts();
  drawLosses();
  drawAccount();
  drawPlans();
  drawStory();
}

function drawHead() {
  let [sign, tone, words] = JOB[view.state] ?? ["", "note", view.state];
  if (view.state === "ended" && view.exit_code !== null) {
    tone = view.exit_code === 0 ? "good" : "bad";
    words = `ended, exit code ${view.exit_code}`;
  } else if (view.stopping) [tone, words] = ["warn", "stopping"];
  say($("job"), view.job);
  $("job").title = view.command.join(" ");
  once($("state"), [sign, words], () => [
    el("span", { "aria-hidden": "true", class: sign === "↻" ? "spin" : "" }, sign),
    words,
  ]);
  for (const each of ["good", "warn", "bad", "note"]) $("state").classList.toggle(each, each === tone);
  const busy = view.members.filter((member) => member.doing);
  const more = busy.length > 1 ? `, and ${busy.length - 1} more` : "";
  say($("doing"), view.stopping ? view.stopping : busy.length ? `${busy[0].name} ${busy[0].doing}${more}` : "");
  $("stop").hidden = !control || view.state === "ended" || Boolean(view.stopping);
}

function tile(id, value, sub, tone = "") {
  say($(`t-${id}`), value);
  say($(`s-${id}`), sub, tone);
  $(`s-${id}`).title = sub;
}

function drawTiles() {
  const { pace, totals, account, checkpoint, coverage } = view,
    time = view.ended ?? now();
  const present = view.members.filter((member) => member.present);
  const join = (...parts) => parts.filter(Boolean).join(" · ");
  const idle = view.last_step_time === null ? null : time - view.last_step_time;
  const late =
    view.ended === null &&
    idle !== null &&
    pace.median_seconds !== null &&
    idle > Math.max(30, 5 * pace.median_seconds);
  const counts =
    view.global_step !== null && view.global_step !== view.step ? `DeepSpeed's ${number(view.global_step)}` : "";
  tile(
    "step",
    view.step === null ? "–" : number(view.step),
    join(counts, idle === null ? "none yet" : view.ended === null ? `last ${duration(Math.max(0, idle))} ago` : ""),
    late ? "warn" : "",
  );
  const rate =
    pace.samples_per_second !== null
      ? `${number(pace.samples_per_second, 1)} samples/s`
      : pace.steps_per_second !== null
        ? `${number(pace.steps_per_second, 2)} steps/s`
        : "";
  tile(
    "pace",
    pace.seconds === null ? "–" : duration(pace.seconds),
    join(pace.median_seconds === null ? "" : `median ${duration(pace.median_seconds)}`, rate),
  );
  tile(
    "goodput",
    account?.goodput == null ? "–" : percent(account.goodput),
    account ? `of ${duration(account.seconds)} of members` : "",
  );
  const all = present.length;
  tile(
    "members",
    number(all),
    join(
      counted(totals.losses, "lost", "lost"),
      totals.left && `${number(totals.left)} left`,
      totals.joined && `${number(totals.joined)} joined`,
    ),
  );
  const longest = Math.max(0, ...view.losses.map((loss) => loss.pause_seconds ?? 0));
  tile(
    "losses",
    number(totals.losses),
    join(
      totals.restarts && counted(totals.restarts, "restart"),
      longest && `longest pause ${duration(longest)}`,
      totals.pause_seconds && `in all ${duration(totals.pause_seconds)}`,
    ) || "none so far",
  );
  const ahead = coverage.ratio === null ? "" : `${percent(coverage.ratio)} of passes ahead`;
  if (view.unshadowed === null) tile("shadows", "–", view.roles.length ? "no stage has a replica" : "no stages yet");
  else if (view.unshadowed.length)
    tile(
      "shadows",
      `${number(view.unshadowed.length)} of ${number(view.roles.length)}`,
      join("stages without a replica", ahead),
      "warn",
    );
  else tile("shadows", "complete", join("every stage has a replica", ahead));
  const failed = view.checkpoints.at(-1)?.failed;
  const size = checkpoint
    ? join(
        `step ${number(checkpoint.step)}`,
        checkpoint.bytes != null && bytes(checkpoint.bytes),
        checkpoint.seconds != null && `in ${duration(checkpoint.seconds)}`,
      )
    : "none so far";
  tile(
    "saved",
    checkpoint
      ? `${duration(Math.max(0, time - checkpoint.time))}${view.ended === null ? " ago" : " before the end"}`
      : "–",
    failed ? `the newest failed: ${failed}` : size,
    failed ? "bad" : "",
  );
  $("t-saved").title = checkpoint?.path ?? "";
}
