// ---- members ---------------------------------------------------------------------------------------------------------

const ROWS = 40; // members up to which each has a row
let filter = "";

function drawMembers() {
  const present = view.members.filter((member) => member.present), gone = view.members.filter((member) => !member.present);
  const hosts = new Set(present.map((member) => member.host)), zones = new Set(present.map((member) => member.zone).filter(Boolean));
  const idle = present.filter((member) => member.load === 0).length;
  say($("members-note"), [counted(present.length, "member"), counted(hosts.size, "host"), zones.size ? counted(zones.size, "zone") : "", idle ? `${number(idle)} without a stage` : ""].filter(Boolean).join(" · "));
  const many = present.length > ROWS, box = $("members");
  $("search").hidden = !many;
  if (box.many !== many) {
    box.many = many;
    box.replaceChildren(...(many ? [el("div")] : [memberTable()]));
  }
  if (many) drawHosts(box.firstChild, present);
  else drawRows(box.querySelector("tbody"), [...present, ...gone.slice(-16).reverse()]);
}

function memberTable() {
  const heads = ["member", "host", "state", "owns", "shadows", "load"].map((word) => el("th", { scope: "col" }, word));
  return el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody"));
}

function drawRows(body, listed) {
  const groups = new Map();
  for (const member of listed) {
    const place = !member.present ? "gone" : member.zone ? `zone ${member.zone}` : "";
    if (!groups.has(place)) groups.set(place, []);
    groups.get(place).push(member);
  }
  const rows = [];
  for (const [place, several] of groups) {
    if (place && (groups.size > 1 || place !== "gone")) rows.push({ group: place });
    for (const member of several) rows.push({ member, chosen: chosen?.member === member.id });
  }
  sync(body, rows, (row) => row.group ?? row.member.id, () => el("tr"), (node, row) => {
    if (row.group) {
      node.className = "group";
      node.replaceChildren(el("td", { colspan: "6" }, row.group));
      return;
    }
    const { member } = row;
    node.className = member.present ? "" : "gone";
    node.setAttribute("aria-selected", String(row.chosen));
    const said = [member.doing, member.notice && `notice: ${member.notice}`].filter(Boolean).join(" · ");
    node.replaceChildren(
      el("td", {}, el("button", { class: "link", type: "button", click: () => choose({ member: member.id }) }, member.name), member.leader ? el("span", { class: "soft", title: "leads: its agent writes the plans" }, " ★ leads") : null),
      el("td", {}, member.host ?? "–"), el("td", {}, member.state, said ? el("div", { class: "soft small" }, said) : null),
      el("td", {}, shortly(member.roles)), el("td", {}, shortly(member.shadows), member.copies.length ? el("div", { class: "soft small" }, `copying ${shortly(member.copies)}`) : null),
      el("td", {}, member.present ? meter(member.load) : null),
    );
  });
}

function shortly(several) {
  if (!several.length) return "–";
  const each = several.map(([pipeline, stage]) => (view.pipelines > 1 ? `${pipeline}.${stage}` : String(stage)));
  return `${view.pipelines > 1 ? "" : several.length > 1 ? "stages " : "stage "}${each.slice(0, 8).join(", ")}${each.length > 8 ? ", …" : ""}`;
}

function meter(load) {
  if (load === null) return "–";
  const fill = el("i");
  fill.style.width = `${Math.min(100, 50 * load)}%`;
  return [el("span", { class: load > 1.25 ? "meter heavy" : "meter", "aria-hidden": "true" }, fill), number(load, 2)];
}

function drawHosts(box, present) {
  const zones = new Map();
  for (const member of present) {
    const zone = member.zone ?? "", host = member.host ?? "–";
    if (!zones.has(zone)) zones.set(zone, new Map());
    if (!zones.get(zone).has(host)) zones.get(zone).set(host, []);
    zones.get(zone).get(host).push(member);
  }
  const id = chosen === null ? null : chosen.member ?? view.roles[chosen.rank]?.owner;
  const makeZone = () => el("div", { class: "zone" }, el("h3"), el("div", { class: "hosts" }));
  const zoneItems = [...zones].map(([zone, hosts]) => ({ zone, hosts: [...hosts].map(([host, several]) => ({ host, several: several.map((member) => memberItem(member, id)) })) }));
  sync(box, zoneItems, (each) => each.zone, makeZone, (node, { zone, hosts }) => {
    const most = Math.max(...hosts.map((each) => each.several.length));
    node.lastChild.style.setProperty("--host", `${Math.min(8, Math.max(4, most)) * 22}px`);
    say(node.firstChild, `${zone ? `zone ${zone}` : "no zone"}: ${counted(hosts.length, "host")}`);
    node.firstChild.hidden = zones.size === 1 && !zone;
    sync(node.lastChild, hosts, (each) => each.host, () => el("div", { class: "host" }, el("span"), el("div")), (place, { host, several }) => {
      say(place.firstChild, host);
      place.firstChild.title = host;
      sync(place.lastChild, several, (each) => each.id, makeMember, drawMember);
    });
  });
}

function memberItem(member, id) {
  const found = !filter || [member.name, member.id, member.host, member.zone, member.state].some((text) => (text ?? "").toLowerCase().includes(filter));
  return { id: member.id, name: member.name, state: member.state, load: member.load, fatal: member.fatal.length, leader: member.leader, notice: Boolean(member.notice), chosen: member.id === id, found };
}

function makeMember({ id }) {
  const node = el("button", { type: "button", class: "tiny member", click: () => choose({ member: id }) }, el("span", { "aria-hidden": "true" }));
  node.tip = () => memberTip(members.get(id));
  return node;
}

function drawMember(node, item) {
  const away = !["running", "building", "starting"].includes(item.state);
  node.className = ["tiny member", item.load > 1.25 ? "heavy" : "", item.fatal ? "fatal" : "", away ? "away" : "", item.chosen ? "owned" : "", item.found ? "" : "dim"].join(" ");
  node.style.setProperty("--load", Math.min(2, item.load ?? 0));
  say(node.firstChild, away ? "×" : item.fatal ? "!" : item.leader ? "★" : item.notice ? "…" : item.load === 0 ? "–" : "");
  const load = item.load === null ? "" : `, load ${number(item.load, 2)}`;
  node.setAttribute("aria-label", `${item.name}, ${item.state}${load}${item.leader ? ", leads" : ""}${item.fatal ? ", its loss would be fatal" : ""}`);
}

function memberTip(member) {
  if (!member) return "";
  return [
    `${member.name}${where(member)}${member.zone ? `, zone ${member.zone}` : ""}: ${member.state}${member.leader ? ", leads" : ""}`,
    member.roles.length && `owns ${roles(member.roles)}`, member.shadows.length && `shadow of ${roles(member.shadows)}`,
    member.load !== null && `load ${number(member.load, 2)}`, member.doing, member.notice && `notice: ${member.notice}`,
    member.fatal.length && "its loss would be fatal",
  ].filter(Boolean).join("\n");
}

$("search").addEventListener("input", (event) => {
  filter = event.target.value.trim().toLowerCase();
  redraw();
});

// ---- the next loss, and what is chosen -------------------------------------------------------------------------------

function drawNext() {
  const present = view.members.filter((member) => member.present && member.roles.length), fatal = present.filter((member) => member.fatal.length);
  const behind = view.checkpoint && view.step !== null ? Math.max(0, view.step - view.checkpoint.step) : null;
  const back = view.checkpoint ? `the checkpoint of step ${number(view.checkpoint.step)}${behind ? ` (${counted(behind, "step")} again)` : ""}` : "the beginning: there is no checkpoint";
  const copying = view.roles.filter((one) => one.state === "copying").length;
  once($("next"), [fatal.map((m) => [m.id, m.name, m.fatal]), present.length, view.roles.length, back, copying, view.ended, view.unshadowed], () => {
    if (view.ended !== null) return el("p", { class: "soft" }, "The job has ended.");
    if (!view.roles.length) return el("p", { class: "soft" }, "The engines are not built yet.");
    if (!fatal.length) return el("p", {}, el("b", { class: "good" }, "✓ Any one member can be lost: "), "every stage has another holder that takes it over within the iteration.");
    const rest = present.length - fatal.length;
    return [
      el("p", {}, el("b", { class: "warn" }, `! The loss of ${fatal.length === present.length ? "any member" : `one of ${counted(fatal.length, "member")}`} would be fatal`), `: the job would go on from ${back}.`,
        rest ? ` ${counted(rest, "other")} can be lost.` : "", copying ? ` ${counted(copying, "replica is", "replicas are")} being copied.` : ""),
      el("ul", {}, fatal.slice(0, 12).map((member) => el("li", {}, el("button", { class: "link", type: "button", click: () => choose({ member: member.id }) }, member.name), ` alone holds ${roles(member.fatal)}`)),
        fatal.length > 12 ? el("li", { class: "soft" }, `and ${number(fatal.length - 12)} more`) : null),
    ];
  });
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
  const one = chosen?.rank === undefined ? null : view.roles[chosen.rank] ?? null;
  const member = members.get(chosen?.member ?? one?.owner) ?? null;
  $("chosen-card").hidden = one === null && member === null;
  if ($("chosen-card").hidden) return;
  say($("chosen-title"), one ? role([one.pipeline, one.stage]).replace(/^s/, "S") : `Member ${member.name}`);
  once($("chosen"), [one, member, control, view.ended], () => [...(one ? aboutRole(one) : []), ...(member ? aboutMember(member, one !== null) : [])]);
}

const facts = (pairs) => el("dl", { class: "facts" }, pairs.filter(([, text]) => text !== null && text !== "" && text !== undefined).map(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]));

function aboutRole(one) {
  const redundant = view.unshadowed !== null;
  return [facts([
    ["state", redundant || one.state === "lost" ? `${ROLE[one.state][0]} ${ROLE[one.state][1]}` : "without redundancy"],
    ["owner", name(one.owner)], ["shadow", one.shadow ? name(one.shadow) : "none"], ["copies", one.copying.map(name).join(", ")],
    ["blocks", one.blocks], ["lent", one.lent && `blocks ${one.lent[0]} to ${one.lent[1] - 1}, computed by the shadow`], ["rank", one.rank],
  ])];
}

function aboutMember(member, below) {
  const heirs = member.heirs.slice(0, 12).map(({ role: each, heir }) => el("li", {}, `${role(each)} → ${name(heir)}`));
  const fate = !member.present || view.ended !== null || !member.roles.length ? [] : [
    el("h3", {}, "If it were lost now"),
    member.fatal.length ? el("p", { class: "warn" }, `! fatal: no other member holds ${roles(member.fatal)}`) : null,
    el("ul", {}, heirs, member.heirs.length > 12 ? el("li", { class: "soft" }, `and ${member.heirs.length - 12} more`) : null),
  ];
  const leave = control && member.present && view.ended === null && member.state !== "leaving"
    ? el("p", {}, el("button", { class: "button bad", type: "button", click: () => askToLeave(member) }, `Let ${member.name} leave …`)) : null;
  return [
    below ? el("h3", {}, `Its owner ${member.name}`) : null,
    facts([
      ["id", el("span", { class: "id" }, member.id)], ["state", member.state + (member.leader ? ", leads" : "")], ["does", member.doing], ["notice", member.notice],
      ["host", member.host], ["zone", member.zone], ["since", member.joined === null ? null : date(member.joined)], ["script's rank", member.home],
      ["owns", member.roles.length ? roles(member.roles) : "nothing"], ["shadow of", member.shadows.length ? roles(member.shadows) : "nothing"],
      ["copies", member.copies.length ? roles(member.copies) : null], ["load", member.load === null ? null : el("span", {}, meter(member.load))],
    ]),
    ...fate, leave,
  ].filter(Boolean);
}
