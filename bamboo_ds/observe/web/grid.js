// ---- stages x pipelines ----

const FEW = 64; // roles up to which a cell has room for words
const grid = { layout: "", cells: [], at: 0 };

function drawGrid() {
  const { pipelines, stages } = view,
    box = $("grid");
  const redundant = view.unshadowed !== null;
  say(
    $("grid-note"),
    view.roles.length
      ? `epoch ${number(view.epoch)} · ${counted(pipelines, "pipeline")} of ${counted(stages, "stage")}`
      : "",
  );
  if (!view.roles.length) {
    grid.layout = "";
    once(box, ["none", view.state], () =>
      el(
        "p",
        { class: "empty" },
        view.ended === null ? "The engines are not built yet." : "The job has ended before its engines were built.",
      ),
    );
    $("legend").replaceChildren();
    return;
  }
  const few = view.roles.length <= FEW,
    sideways = few || stages >= pipelines; // whether stages are columns
  const columns = sideways ? stages : pipelines,
    rows = sideways ? pipelines : stages;
  const head = few ? (rows > 1 ? 76 : 0) : 68,
    width = few ? 136 + 6 : 17 + 2;
  const room = Math.max(1, Math.floor((box.clientWidth - head) / width));
  const bands = Math.ceil(columns / room),
    across = Math.ceil(columns / bands),
    side = Math.min(24, Math.floor((box.clientWidth - head) / across) - 2); // of a cell without words
  const layout = JSON.stringify([few, sideways, rows, columns, across, side]);
  if (layout !== grid.layout) {
    grid.layout = layout;
    if (grid.at >= view.roles.length) grid.at = 0;
    box.shown = null;
    makeGrid(box, { few, sideways, rows, columns, across, side, head });
  }
  for (const one of view.roles) drawCell(grid.cells[one.rank], one, few, redundant);
  markCells();
  const tally = { shadowed: 0, copying: 0, unshadowed: 0, lost: 0, lent: 0 };
  for (const one of view.roles) {
    tally[one.state] += 1;
    if (one.lent) tally.lent += 1;
  }
  once($("legend"), [tally, redundant, few], () =>
    [
      ...Object.entries(ROLE)
        .filter(([state]) => redundant || state === "lost")
        .map(([state, [sign, words]]) =>
          el("span", { class: state }, el("b", {}, sign), ` ${words}: ${number(tally[state])}`),
        ),
      tally.lent
        ? el("span", {}, el("b", {}, few ? "▨" : "◢"), ` shadow computes a part: ${number(tally.lent)}`)
        : null,
      few ? null : el("span", {}, el("b", {}, "2"), " stages' worth of work at its owner"),
    ].filter(Boolean),
  );
}

function makeGrid(box, { few, sideways, rows, columns, across, side, head }) {
  const at = (row, column) => (sideways ? column * view.pipelines + row : row * view.pipelines + column);
  const made = [];
  grid.cells = [];
  grid.move = (rank, key) => {
    const [row, column] = sideways
      ? [rank % view.pipelines, Math.floor(rank / view.pipelines)]
      : [Math.floor(rank / view.pipelines), rank % view.pipelines];
    const to = {
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      Home: [row, 0],
      End: [row, columns - 1],
    }[key];
    return to && to[0] >= 0 && to[0] < rows && to[1] >= 0 && to[1] < columns ? at(...to) : null;
  };
  for (let first = 0; first < columns; first += across) {
    const count = Math.min(across, columns - first),
      band = el("div", { class: few ? "band" : "band tight" });
    const cell = few ? "minmax(0, 1fr)" : `${side}px`;
    band.style.setProperty("--side", `${side}px`);
    band.style.gridTemplateColumns = `${head ? `${head}px ` : ""}repeat(${across}, ${cell})`;
    if (head) band.append(el("span", { class: "axis" }, few ? "" : sideways ? "stage" : "pipeline"));
    for (let n = 0; n < across; n++) {
      const column = first + n,
        told = n < count && (few || n % 4 === 0);
      band.append(el("span", { class: "axis top" }, told ? (few ? `stage ${column}` : String(column)) : ""));
    }
    for (let row = 0; row < rows; row++) {
      if (head) band.append(el("span", { class: "axis" }, `${sideways ? "pipeline" : "stage"} ${row}`));
      for (let n = 0; n < across; n++) {
        if (n >= count) {
          band.append(el("span"));
          continue;
        }
        const rank = at(row, first + n);
        const node = el("button", {
          type: "button",
          tabindex: rank === grid.at ? "0" : "-1",
          click: () => choose({ rank }),
        });
        node.rank = rank;
        grid.cells[rank] = node;
        band.append(node);
      }
    }
    made.push(band);
  }
  box.replaceChildren(...made);
}

$("grid").addEventListener("keydown", (event) => {
  const rank = event.target.rank === undefined ? null : grid.move(event.target.rank, event.key);
  if (rank === null) return;
  event.preventDefault();
  grid.cells[rank].focus();
});
$("grid").addEventListener("focusin", (event) => {
  if (event.target.rank === undefined) return;
  grid.cells[grid.at]?.setAttribute("tabindex", "-1");
  grid.at = event.target.rank;
  event.target.setAttribute("tabindex", "0");
});

function shadowWords(one, redundant) {
  if (one.shadow) return `shadow ${name(one.shadow)}`;
  if (one.copying.length) return `copy to ${one.copying.map(name).join(", ")}`;
  return one.state === "lost" ? "no holder is left" : redundant ? "no replica" : "";
}

function drawCell(node, one, few, redundant) {
  const load = members.get(one.owner)?.load ?? null;
  const now = JSON.stringify([one, few, redundant, name(one.owner), one.shadow && name(one.shadow), load]);
  if (node.item === now) return;
  node.item = now;
  const state = redundant || one.state === "lost" ? one.state : "",
    [sign, words] = ROLE[state] ?? ["", "without redundancy"];
  const held = shadowWords(one, redundant),
    lent = one.lent
      ? `${name(one.shadow ?? "-")} computes ${one.blocks ? `${one.lent[1] - one.lent[0]} of ${one.blocks}` : one.lent[1] - one.lent[0]} blocks`
      : "";
  const work = load !== null && load > 1.25 ? `owner computes ${number(load, 1)} stages` : "";
  node.className = `${few ? "cell" : "tiny"} ${state}${one.lent ? " lends" : ""}`;
  node.setAttribute(
    "aria-label",
    [role([one.pipeline, one.stage]), `owner ${name(one.owner)}`, held, words, lent, work].filter(Boolean).join(", "),
  );
  node.tip = () =>
    [
      role([one.pipeline, one.stage]),
      `owner ${name(one.owner)}${where(members.get(one.owner) ?? {})}`,
      held,
      lent,
      work,
    ]
      .filter(Boolean)
      .join("\n");
  if (!few) {
    say(
      node,
      state === "shadowed" || state === "" ? (work ? number(load, load % 1 > 0.05 && load < 9.5 ? 1 : 0) : "") : sign,
    );
    return;
  }
  const blocks =
    one.lent && one.blocks && one.blocks <= 24
      ? el(
          "span",
          { class: "blocks" },
          [...Array(one.blocks).keys()].map((n) =>
            el("i", { class: n >= one.lent[0] && n < one.lent[1] ? "lent" : "" }),
          ),
        )
      : null;
  node.replaceChildren(
    el("span", { class: "mark", "aria-hidden": "true" }, sign),
    el("span", { class: "owner" }, name(one.owner)),
    el("span", { class: "line" }, held || "\u00a0"),
    ...(lent ? [el("span", { class: "line" }, lent)] : []),
    ...(blocks ? [blocks] : []),
  );
}

// The owner that is chosen, and what it holds the replicas of.
function markCells() {
  const id = chosen === null ? null : (chosen.member ?? view.roles[chosen.rank]?.owner);
  for (const one of view.roles) {
    grid.cells[one.rank].classList.toggle("owned", one.owner === id);
    grid.cells[one.rank].classList.toggle("held", one.shadow === id && id !== null && one.owner !== id);
    grid.cells[one.rank].setAttribute("aria-pressed", String(chosen?.rank === one.rank));
  }
}
