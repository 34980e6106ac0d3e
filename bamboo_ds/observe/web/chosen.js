// ---- the next loss, and what is chosen ----

function drawNext() {
  const present = view.members.filter((member) => member.present && member.roles.length),
    fatal = present.filter((member) => member.fatal.length);
  const behind = view.checkpoint && view.step !== null ? Math.max(0, view.step - view.checkpoint.step) : null;
  const back = view.checkpoint
    ? `the checkpoint of step ${number(view.checkpoint.step)}${behind ? ` (${counted(behind, "step")} again)` : ""}`
    : "the beginning: there is no checkpoint";
  const copying = view.roles.filter((one) => one.state === "copying").length;
  once(
    $("next"),
    [
      fatal.map((m) => [m.id, m.name, m.fatal]),
      present.length,
      view.roles.length,
      back,
      copying,
      view.ended,
      view.unshadowed,
    ],
    () => {
      if (view.ended !== null) return el("p", { class: "soft" }, "The job has ended.");
      if (!view.roles.length) return el("p", { class: "soft" }, "The engines are not built yet.");
      if (!fatal.length)
        return el(
          "p",
          {},
          el("b", { class: "good" }, "✓ Any one member can be lost: "),
          "every stage has another holder that takes it over within the iteration.",
        );
      const rest = present.length - fatal.length;
      return [
        el(
          "p",
          {},
          el(
            "b",
            { class: "warn" },
            `! The loss of ${fatal.length === present.length ? "any member" : `one of ${counted(fatal.length, "member")}`} would be fatal`,
          ),
          `: the job would go on from ${back}.`,
          rest ? ` ${counted(rest, "other")} can be lost.` : "",
          copying ? ` ${counted(copying, "replica is", "replicas are")} being copied.` : "",
        ),
        el(
          "ul",
          {},
          fatal
            .slice(0, 12)
            .map((member) =>
              el(
                "li",
                {},
                el(
                  "button",
                  { class: "link", type: "button", click: () => choose({ member: member.id }) },
                  member.name,
                ),
                ` alone holds ${roles(member.fatal)}`,
              ),
            ),
          fatal.length > 12 ? el("li", { class: "soft" }, `and ${number(fatal.length - 12)} more`) : null,
        ),
      ];
    },
  );
}

function choose(what) {
  chosen = JSON.stringify(what) === JSON.stringify(chosen) ? null : what;
  redraw();
}
$("unchoose").addEventListener("click", () => choose(null));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("ask").open) return;
  $("tip").hidden = true;
  choose(null);
});

function drawChosen() {
  const one = chosen?.rank === undefined ? null : (view.roles[chosen.rank] ?? null);
  const member = members.get(chosen?.member ?? one?.owner) ?? null;
  $("chosen-card").hidden = one === null && member === null;
  if ($("chosen-card").hidden) return;
  say($("chosen-title"), one ? role([one.pipeline, one.stage]).replace(/^s/, "S") : `Member ${member.name}`);
  once($("chosen"), [one, member, control, view.ended], () => [
    ...(one ? aboutRole(one) : []),
    ...(member ? aboutMember(member, one !== null) : []),
  ]);
}

const facts = (pairs) =>
  el(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, text]) => text !== null && text !== "" && text !== undefined)
      .map(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]),
  );

function aboutRole(one) {
  const redundant = view.unshadowed !== null;
  return [
    facts([
      [
        "state",
        redundant || one.state === "lost" ? `${ROLE[one.state][0]} ${ROLE[one.state][1]}` : "without redundancy",
      ],
      ["owner", name(one.owner)],
      ["shadow", one.shadow ? name(one.shadow) : "none"],
      ["copies", one.copying.map(name).join(", ")],
      ["blocks", one.blocks],
      ["lent", one.lent && `blocks ${one.lent[0]} to ${one.lent[1] - 1}, computed by the shadow`],
      ["rank", one.rank],
    ]),
  ];
}

function aboutMember(member, below) {
  const heirs = member.heirs.slice(0, 12).map(({ role: each, heir }) => el("li", {}, `${role(each)} → ${name(heir)}`));
  const fate =
    !member.present || view.ended !== null || !member.roles.length
      ? []
      : [
          el("h3", {}, "If it were lost now"),
          member.fatal.length
            ? el("p", { class: "warn" }, `! fatal: no other member holds ${roles(member.fatal)}`)
            : null,
          el(
            "ul",
            {},
            heirs,
            member.heirs.length > 12 ? el("li", { class: "soft" }, `and ${member.heirs.length - 12} more`) : null,
          ),
        ];
  const leave =
    control && member.present && view.ended === null && member.state !== "leaving"
      ? el(
          "p",
          {},
          el(
            "button",
            { class: "button bad", type: "button", click: () => askToLeave(member) },
            `Let ${member.name} leave …`,
          ),
        )
      : null;
  return [
    below ? el("h3", {}, `Its owner ${member.name}`) : null,
    facts([
      ["id", el("span", { class: "id" }, member.id)],
      ["state", member.state + (member.leader ? ", leads" : "")],
      ["does", member.doing],
      ["notice", member.notice],
      ["host", member.host],
      ["zone", member.zone],
      ["since", member.joined === null ? null : date(member.joined)],
      ["script's rank", member.script_rank],
      ["owns", member.roles.length ? roles(member.roles) : "nothing"],
      ["shadow of", member.shadows.length ? roles(member.shadows) : "nothing"],
      ["copies", member.copies.length ? roles(member.copies) : null],
      ["load", member.load === null ? null : el("span", {}, meter(member.load))],
    ]),
    ...fate,
    leave,
  ].filter(Boolean);
}
