// A list of any length of which only the rows in sight exist. Arrow keys, Page, Home and End move the choice.

class VirtualList {
  constructor(box, rowHeight, drawRow, onChoose) {
    Object.assign(this, { box, rowHeight, drawRow, onChoose });
    this.items = [];
    this.chosen = -1;
    this.rows = new Map();
    this.inner = make("div", null, "rows");
    box.append(this.inner);
    box.addEventListener("scroll", () => this.paint(), { passive: true });
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.place));
    });
    new ResizeObserver(() => this.paint()).observe(box);
  }

  // With `stays`, what is in sight stays in sight, although rows are added above it; a list at its top stays at its top.
  set(items, chosen, stays) {
    const top = this.box.scrollTop, anchor = this.items[Math.floor(top / this.rowHeight)];
    this.items = items;
    this.inner.style.height = items.length * this.rowHeight + "px";
    const place = stays && top > 0 ? items.indexOf(anchor) : -1;
    this.box.scrollTop = place >= 0 ? place * this.rowHeight + top % this.rowHeight : 0;
    this.chosen = chosen;
    this.redraw();
    if (chosen > 0 && !stays) this.reveal(chosen);
  }

  redraw() {
    this.inner.replaceChildren();
    this.rows.clear();
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - 4);
    const last = Math.min(this.items.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.rowHeight) + 4);
    for (const [place, row] of this.rows) {
      if (place >= first && last > place) continue;
      row.remove();
      this.rows.delete(place);
    }
    for (let place = first; place < last; place++) if (!this.rows.has(place)) this.add(place);
  }

  add(place) {
    const row = make("div", null, "row");
    row.id = this.box.id + "-" + place;
    row.dataset.place = place;
    row.style.top = place * this.rowHeight + "px";
    row.style.height = this.rowHeight + "px";
    row.setAttribute("role", "option");
    row.setAttribute("aria-setsize", this.items.length);
    row.setAttribute("aria-posinset", place + 1);
    row.setAttribute("aria-selected", place === this.chosen);
    this.drawRow(row, this.items[place]);
    this.rows.set(place, row);
    this.inner.append(row);
  }

  choose(place) {
    if (place < 0 || place >= this.items.length) return;
    const before = this.rows.get(this.chosen);
    if (before) before.setAttribute("aria-selected", "false");
    this.chosen = place;
    this.reveal(place);
    this.rows.get(place).setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", this.box.id + "-" + place);
    this.onChoose(this.items[place]);
  }

  reveal(place) {
    const top = place * this.rowHeight, bottom = top + this.rowHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    if (bottom > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = bottom - this.box.clientHeight;
    this.paint();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.items.length, End: this.items.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.choose(Math.min(this.items.length - 1, Math.max(0, this.chosen + moves[event.key])));
  }
}
