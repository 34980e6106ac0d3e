// ---- members ----

const ROWS = 40; // members up to which each has a row
let filter = "";

function drawMembers() {
  const present = view.members.filter((member) => member.present),
    gone = view.members.filter((member) => !member.present);
  const hosts = new Set(present.map((member) => member.host)),
    zones = new Set(present.map((member) => member.zone).filter(Boolean));
  const idle = present.filter((member) => member.load === 0).length;
  say(
    $("members-note"),
    [
      counted(present.length, "member"),
      counted(hosts.size, "host"),
      zones.size ? counted(zones.size, "zone") : "",
      idle ? `${number(idle)} without a stage` : "",
    ]
      .filter(Boolean)
      .join(" · "),
  );
  const many = present.length > ROWS,
    box = $("members");
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
  sync(
    body,
    rows,
    (row) => row.group ?? row.member.id,
    () => el("tr"),
    (node, row) => {
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
        el(
          "td",
          {},
          el("button", { class: "link", type: "button", click: () => choose({ member: member.id }) }, member.name),
          member.leader ? el("span", { class: "soft", title: "leads: its agent writes the plans" }, " ★ leads") : null,
        ),
        el("td", {}, member.host ?? "–"),
        el("td", {}, member.state, said ? el("div", { class: "soft small" }, said) : null),
        el("td", {}, shortly(member.roles)),
        el(
          "td",
          {},
          shortly(member.shadows),
          member.copies.length ? el("div", { class: "soft small" }, `copying ${shortly(member.copies)}`) : null,
        ),
        el("td", {}, member.present ? meter(member.load) : null),
      );
    },
  );
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
    const zone = member.zone ?? "",
      host = member.host ?? "–";
    if (!zones.has(zone)) zones.set(zone, new Map());
    if (!zones.get(zone).has(host)) zones.get(zone).set(host, []);
    zones.get(zone).get(host).push(member);
  }
  const id = chosen === null ? null : (chosen.member ?? view.roles[chosen.rank]?.owner);
  const makeZone = () => el("div", { class: "zone" }, el("h3"), el("div", { class: "hosts" }));
  const zoneItems = [...zones].map(([zone, hosts]) => ({
    zone,
    hosts: [...hosts].map(([host, several]) => ({ host, several: several.map((member) => memberItem(member, id)) })),
  }));
  sync(
    box,
    zoneItems,
    (each) => each.zone,
    makeZone,
    (node, { zone, hosts }) => {
      const most = Math.max(...hosts.map((each) => each.several.length));
      node.lastChild.style.setProperty("--host", `${Math.min(8, Math.max(4, most)) * 22}px`);
      say(node.firstChild, `${zone ? `zone ${zone}` : "no zone"}: ${counted(hosts.length, "host")}`);
      node.firstChild.hidden = zones.size === 1 && !zone;
      sync(
        node.lastChild,
        hosts,
        (each) => each.host,
        () => el("div", { class: "host" }, el("span"), el("div")),
        (place, { host, several }) => {
          say(place.firstChild, host);
          place.firstChild.title = host;
          sync(place.lastChild, several, (each) => each.id, makeMember, drawMember);
        },
      );
    },
  );
}

function memberItem(member, id) {
  const found =
    !filter ||
    [member.name, member.id, member.host, member.zone, member.state].some((text) =>
      (text ?? "").toLowerCase().includes(filter),
    );
  return {
    id: member.id,
    name: member.name,
    state: member.state,
    load: member.load,
    fatal: member.fatal.length,
    leader: member.leader,
    notice: Boolean(member.notice),
    chosen: member.id === id,
    found,
  };
}

function makeMember({ id }) {
  const node = el(
    "button",
    { type: "button", class: "tiny member", click: () => choose({ member: id }) },
    el("span", { "aria-hidden": "true" }),
  );
  node.tip = () => memberTip(members.get(id));
  return node;
}

function drawMember(node, item) {
  const away = !["running", "building", "starting"].includes(item.state);
  node.className = [
    "tiny member",
    item.load > 1.25 ? "heavy" : "",
    item.fatal ? "fatal" : "",
    away ? "away" : "",
    item.chosen ? "owned" : "",
    item.found ? "" : "dim",
  ].join(" ");
  node.style.setProperty("--load", Math.min(2, item.load ?? 0));
  say(
    node.firstChild,
    away ? "×" : item.fatal ? "!" : item.leader ? "★" : item.notice ? "…" : item.load === 0 ? "–" : "",
  );
  const load = item.load === null ? "" : `, load ${number(item.load, 2)}`;
  node.setAttribute(
    "aria-label",
    `${item.name}, ${item.state}${load}${item.leader ? ", leads" : ""}${item.fatal ? ", its loss would be fatal" : ""}`,
  );
}

function memberTip(member) {
  if (!member) return "";
  return [
    `${member.name}${where(member)}${member.zone ? `, zone ${member.zone}` : ""}: ${member.state}${member.leader ? ", leads" : ""}`,
    member.roles.length && `owns ${roles(member.roles)}`,
    member.shadows.length && `shadow of ${roles(member.shadows)}`,
    member.load !== null && `load ${number(member.load, 2)}`,
    member.doing,
    member.notice && `notice: ${member.notice}`,
    member.fatal.length && "its loss would be fatal",
  ]
    .filter(Boolean)
    .join("\n");
}

$("search").addEventListener("input", (event) => {
  filter = event.target.value.trim().toLowerCase();
  redraw();
});
