// ---- time, plans, story ----

const TIME = [
  ["productive", "productive", "var(--green)"],
  ["redundancy", "shadows without a stage of their own", "var(--green-mid)"],
  ["standby", "standby", "var(--line)"],
  ["initialization", "starting", "var(--blue-soft)"],
  ["reconfiguration", "reconfiguration", "var(--blue)"],
  ["detection_and_agreement", "detection and agreement", "var(--red)"],
  ["redone", "redone passes", "var(--violet)"],
  ["wasted_progress_from_disruption", "lost progress", "var(--amber)"],
  ["infrastructure_recovery_from_disruption", "waiting for members", "var(--amber-soft)"],
  ["unproductive_checkpoint_save_time", "checkpoints", "var(--soft)"],
  ["other", "other", "var(--ink)"],
];

function drawAccount() {
  const { account } = view;
  say($("account-note"), account ? `member-time, ${duration(account.wall_seconds)} so far` : "");
  once($("account"), account, () => {
    if (!account || !account.seconds) return el("p", { class: "empty" }, "Nothing yet.");
    const rest = Object.keys(account.categories)
      .filter((key) => !TIME.some(([known]) => known === key))
      .map((key) => [key, key.replaceAll("_", " "), "var(--ink)"]);
    const shares = [...TIME, ...rest]
      .map(([key, words, colour]) => ({ words, colour, seconds: account.categories[key] ?? 0 }))
      .filter((each) => each.seconds > 0);
    const paint = (node, colour, share) => {
      node.style.background = colour;
      if (share !== undefined) node.style.width = `${100 * share}%`;
      return node;
    };
    const total = account.seconds;
    return [
      el(
        "div",
        { class: "stack", "aria-hidden": "true" },
        shares.map(({ colour, seconds, words }) => paint(el("i", { title: words }), colour, seconds / total)),
      ),
      el(
        "table",
        {},
        el(
          "tbody",
          {},
          [...shares]
            .sort((a, b) => b.seconds - a.seconds)
            .map(({ words, colour, seconds }) =>
              el(
                "tr",
                {},
                el("td", {}, paint(el("span", { class: "key", "aria-hidden": "true" }), colour), words),
                el("td", { class: "number" }, duration(seconds)),
                el("td", { class: "number" }, percent(seconds / total)),
              ),
            ),
        ),
      ),
      account.repeated_steps
        ? el("p", { class: "soft small" }, `${counted(account.repeated_steps, "step")} done again from a checkpoint`)
        : null,
    ];
  });
}

function drawPlans() {
  const kinds = { start: ["▶", "note"], loss: ["×", "bad"], change: ["~", ""] };
  sync(
    $("plans"),
    [...view.plans].reverse(),
    (plan) => plan.epoch,
    () => el("tr"),
    (node, plan) => {
      const moved = plan.moved
        .slice(0, 6)
        .map((each) => `${role(each.role)}: ${name(each.before)} → ${name(each.after)}`);
      if (plan.moved_count > 6) moved.push(`… ${number(plan.moved_count)} stages in all`);
      const said = [
        counted(plan.members, "member"),
        plan.kind !== "start" && plan.joined.length && `${listed(plan.joined.slice(0, 6).map(name))} joined`,
        plan.gone.length && `without ${listed(plan.gone.slice(0, 6).map(name))}`,
        plan.unshadowed && `${counted(plan.unshadowed, "stage")} without a replica`,
        plan.lent && `${counted(plan.lent, "stage")} divided`,
        ...moved,
      ].filter(Boolean);
      const [sign, tone] = kinds[plan.kind];
      const [why, ...whys] = named(plan.reason).split("; ");
      const first = why + (whys.length ? "; …" : "");
      node.replaceChildren(
        el("td", {}, el("span", { class: tone, "aria-hidden": "true" }, `${sign} `), number(plan.epoch)),
        el("td", { class: "soft" }, clock(plan.time)),
        el(
          "td",
          {},
          whys.length
            ? el(
                "details",
                {},
                el("summary", {}, first),
                whys.map((each) => el("div", {}, each)),
              )
            : first,
          el("div", { class: "soft small" }, said.join(" · ")),
        ),
      );
    },
  );
}

function drawStory() {
  const told = new Map(); // how often the same was told in the same second
  const lines = view.story.map(({ time, text }) => {
    const same = `${time} ${text}`;
    told.set(same, (told.get(same) ?? 0) + 1);
    return { time, text, key: `${same} ${told.get(same)}` };
  });
  sync(
    $("story"),
    lines.reverse(),
    (line) => line.key,
    ({ time, text }) => el("li", {}, el("time", { title: date(time) }, clock(time)), el("span", { title: text }, text)),
    () => {},
  );
}

// ---- hints ----

function hint(event) {
  const node = event.target.closest?.("button, text"),
    box = $("tip");
  if (!node?.tip) return void (box.hidden = true);
  say(box, node.tip());
  box.hidden = false;
  const place = node.getBoundingClientRect(),
    room = box.getBoundingClientRect();
  const under = place.bottom + room.height + 8 < innerHeight;
  box.style.left = `${Math.max(4, Math.min(innerWidth - room.width - 4, place.left))}px`;
  box.style.top = `${under ? place.bottom + 6 : Math.max(4, place.top - room.height - 6)}px`;
}
document.addEventListener("pointerover", hint);
document.addEventListener("focusin", hint);
document.addEventListener("scroll", () => ($("tip").hidden = true), { capture: true, passive: true });

let resized;
new ResizeObserver(() => {
  clearTimeout(resized);
  resized = setTimeout(redraw, 80);
}).observe($("main"));
