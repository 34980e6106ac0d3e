// ---- losses and recoveries ----

const open = new Map(); // number of a loss: its LossDetail, null until that has come, or an error
const PHASES = [
  ["detection", "detection_seconds"],
  ["plan", "plan_seconds"],
  ["rebuild", "rebuild_seconds"],
  ["redone and remaining work", "redo_seconds"],
];

function drawLosses() {
  const { losses, totals } = view;
  say(
    $("losses-note"),
    totals.losses
      ? `${counted(totals.losses, "member")} lost${losses.length === 64 ? "; the newest 64 losses" : ""}`
      : "",
  );
  drawLanes();
  if (!losses.length) {
    once($("losses"), "none", () => el("li", { class: "empty" }, "No member has been lost so far."));
    $("losses").known = undefined;
    return;
  }
  if ($("losses").shown) {
    $("losses").replaceChildren();
    $("losses").shown = null;
  }
  const items = losses
    .map((loss) => ({ loss, opened: open.has(loss.number), detail: open.get(loss.number) ?? null }))
    .reverse();
  sync($("losses"), items, ({ loss }) => loss.number, makeLoss, drawLoss);
}

function makeLoss({ loss }) {
  const button = el("button", {
    type: "button",
    "aria-expanded": "false",
    "aria-controls": `loss-${loss.number}`,
    click: () => toggleLoss(loss.number),
  });
  return el("li", {}, button, el("div", { class: "detail", id: `loss-${loss.number}`, hidden: true }));
}

function outcome(loss) {
  if (loss.fatal) return ["fatal", "bad"];
  if (!loss.recovered) return ["recovering …", "warn"];
  return [loss.pause_seconds === null ? "recovered" : duration(loss.pause_seconds), "good"];
}

function drawLoss(node, { loss, opened, detail }) {
  const [button, box] = node.children,
    [told, tone] = outcome(loss);
  const who =
    listed(loss.members.slice(0, 4).map((member) => `${member.name}${where(member)} ${how(member)}`)) +
    (loss.members.length > 4 ? ` and ${loss.members.length - 4} more` : "");
  const heirs = new Map();
  for (const { role: each, after } of loss.moved) heirs.set(after, [...(heirs.get(after) ?? []), each]);
  const taken = [...heirs].slice(0, 4).map(([heir, several]) => `${roles(several)} taken over by ${name(heir)}`);
  const parts = [
    ...taken,
    heirs.size > 4 ? "…" : "",
    loss.epoch !== null && !loss.moved_count ? "no stage moved" : "",
    loss.left !== null ? `${number(loss.left)} of ${number(loss.before)} left` : "",
    loss.replicas_back_seconds !== null ? `replicas back in ${duration(loss.replicas_back_seconds)}` : "",
  ];
  button.setAttribute("aria-expanded", String(opened));
  button.replaceChildren(
    el("span", { class: "fold", "aria-hidden": "true" }),
    el("time", { class: "soft", title: date(loss.time) }, clock(loss.time)),
    el("span", {}, who),
    el("b", { class: tone }, told),
    el("span", { class: "sub" }, parts.filter(Boolean).join("; ")),
  );
  box.hidden = !opened;
  if (opened) once(box, [loss, detail], () => aboutLoss(detail?.loss ?? loss, detail));
  if (opened && detail?.loss && JSON.stringify(detail.loss) !== JSON.stringify(loss) && !detail.again) {
    detail.again = true; // survivors have told more since
    fetchLoss(loss.number);
  }
}

function aboutLoss(loss, detail) {
  const noticed = loss.members
    .slice(0, 16)
    .map((member) =>
      el(
        "li",
        {},
        `${member.name} (`,
        el("span", { class: "id" }, member.id),
        `)${where(member)} ${how(member)}${member.detection_seconds === null ? "" : `, noticed ${duration(member.detection_seconds)} after the fault`}`,
      ),
    );
  const moved = loss.moved
    .slice(0, 16)
    .map((each) => el("li", {}, `${role(each.role)}: ${name(each.before)} → ${name(each.after)}`));
  const passes = loss.forwards_redone + loss.backwards_redone;
  return [
    facts([
      ["who, and why", el("ul", {}, noticed)],
      [
        "heirs",
        moved.length
          ? el(
              "ul",
              {},
              moved,
              loss.moved_count > moved.length
                ? el("li", { class: "soft" }, `and ${number(loss.moved_count - moved.length)} more`)
                : null,
            )
          : loss.fatal
            ? "none: no living member held the stage"
            : loss.epoch === null
              ? "not decided yet"
              : "no stage moved",
      ],
      ["step", loss.step === null ? null : `${number(loss.step)} was interrupted`],
      ["plan", loss.epoch === null ? "not written yet" : `epoch ${number(loss.epoch)}`],
      [
        "pause",
        loss.pause_seconds === null
          ? null
          : `${duration(loss.pause_seconds)} at most, from the notice to the agreement on how to go on`,
      ],
      [
        "redone",
        loss.survivors
          ? passes
            ? `${counted(loss.forwards_redone, "forward pass", "forward passes")} and ${counted(loss.backwards_redone, "backward pass", "backward passes")}`
            : "no pass"
          : null,
      ],
      [
        "replicas",
        loss.replicas_back_seconds === null
          ? null
          : `every stage had one again ${duration(loss.replicas_back_seconds)} after the loss`,
      ],
    ]),
    detail === null
      ? el("p", { class: "soft" }, "Asking for the survivors …")
      : detail.error
        ? el("p", { class: "bad" }, `The survivors' times cannot be had: ${detail.error}`)
        : survivors(detail.survivors),
  ];
}

function survivors(several) {
  if (!several.length) return el("p", { class: "soft" }, "No survivor has told of its recovery.");
  const whole = (each) => PHASES.reduce((sum, [, field]) => sum + (each[field] ?? 0), 0);
  const listed = [...several].sort((a, b) => whole(b) - whole(a)).slice(0, 12),
    most = Math.max(1e-9, whole(listed[0]));
  const bars = listed.flatMap((each) => {
    const times = PHASES.map(
      ([words, field]) => `${words} ${each[field] === null ? "unknown" : duration(each[field])}`,
    ).join(", ");
    const bar = el(
      "span",
      { class: "bar", role: "img", "aria-label": times, title: times },
      PHASES.map(([, field], n) => {
        const part = el("i", { class: `p${n}` });
        part.style.width = `${(100 * (each[field] ?? 0)) / most}%`;
        return part;
      }),
    );
    const redone = each.forwards_redone + each.backwards_redone;
    return [
      el("span", { title: each.id }, each.name),
      bar,
      el(
        "span",
        { class: "soft small" },
        `${duration(whole(each))}${redone ? `, ${counted(redone, "pass", "passes")} redone` : ""}`,
      ),
    ];
  });
  return [
    el(
      "h3",
      {},
      several.length > listed.length
        ? `The slowest ${listed.length} of ${number(several.length)} survivors`
        : "Survivors",
    ),
    el("div", { class: "phases" }, bars),
    el(
      "p",
      { class: "legend" },
      PHASES.map(([words], n) => el("span", {}, el("span", { class: `key p${n}`, "aria-hidden": "true" }), words)),
    ),
  ];
}

function toggleLoss(number) {
  if (open.has(number)) open.delete(number);
  else {
    open.set(number, null);
    fetchLoss(number);
  }
  redraw();
}

async function fetchLoss(number) {
  try {
    const detail = await api(`losses/${number}`);
    if (open.has(number)) open.set(number, detail);
  } catch (error) {
    if (open.has(number)) open.set(number, { error: problem(error) });
  }
  redraw();
}

const LANES = ["losses", "members", "checkpoints", "plans"];

function drawLanes() {
  const box = $("lanes"),
    width = box.clientWidth,
    begin = view.started ?? view.plans[0]?.time ?? view.time,
    end = Math.max(view.ended ?? view.time ?? 0, (begin ?? 0) + 1);
  const lost = new Set(view.losses.flatMap((loss) => loss.members.map((member) => member.id)));
  const marks = [];
  for (const loss of view.losses)
    marks.push([0, loss.time, "×", "loss", `${listed(loss.members.map((member) => member.name))} lost`, loss.number]);
  for (const plan of view.plans) {
    const came = plan.kind === "start" ? [] : plan.joined,
      went = plan.gone.filter((id) => !lost.has(id));
    if (came.length) marks.push([1, plan.time, "▲", "join", `${listed(came.slice(0, 8).map(name))} joined`]);
    if (went.length) marks.push([1, plan.time, "▼", "left", `${listed(went.slice(0, 8).map(name))} left`]);
    marks.push([3, plan.time, "|", "plan", `epoch ${plan.epoch}: ${plan.reason}`]);
  }
  for (const each of view.checkpoints)
    marks.push([
      2,
      each.time,
      each.failed ? "×" : "◆",
      each.failed ? "loss" : "saved",
      each.failed ? `checkpoint failed: ${each.failed}` : `${each.own ? "own " : ""}checkpoint of step ${each.step}`,
    ]);
  if (begin === null || !width) return;
  once(box, [marks, begin, end, width], () => {
    const tall = LANES.length * 20,
      picture = svg("svg", {
        viewBox: `0 0 ${width} ${tall + 18}`,
        height: tall + 18,
        role: "img",
        "aria-label":
          "When members were lost, came and went, checkpoints were saved and plans written; the lists tell the same",
      });
    const left = 88,
      x = (time) => left + 6 + ((Math.max(begin, time) - begin) / (end - begin)) * (width - left - 18);
    LANES.forEach((label, n) =>
      picture.append(
        svg("text", { x: 0, y: 20 * n + 15 }, label),
        svg("line", { class: "lane", x1: left, x2: width, y1: 20 * n + 10.5, y2: 20 * n + 10.5 }),
      ),
    );
    for (const [lane, time, sign, kind, words, loss] of marks) {
      const mark = svg(
        "text",
        { class: `point ${kind}${loss === undefined ? "" : " hit"}`, x: x(time), y: 20 * lane + 15 },
        sign,
      );
      mark.tip = () => `${clock(time)} ${words}`;
      if (loss !== undefined) mark.addEventListener("click", () => showLoss(loss));
      picture.append(mark);
    }
    timeAxis(picture, begin, end, x, tall + 14);
    return picture;
  });
}

function showLoss(number) {
  if (!open.has(number)) toggleLoss(number);
  $("losses").known?.get(number)?.scrollIntoView({ block: "nearest" });
}
