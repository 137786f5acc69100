// The stretch of time that is looked at, and how the mouse, the wheel and the keys change it.

const SMALLEST = 1000; // a microsecond across the whole width

/** The visible range [begin, end) and the selected one, in ns of the common axis. Listeners hear of every change. */
export class View {
  constructor() {
    this.low = 0;
    this.high = 1;
    this.begin = 0;
    this.end = 1;
    this.selection = null;
    this.listeners = [];
    this.following = false;
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  changed(what) {
    for (const listener of this.listeners) listener(what);
  }

  /** How far the traces reach; a view that showed all of it goes on to. */
  reach(low, high) {
    const all = this.begin <= this.low && this.end >= this.high;
    const latest = this.following && this.end >= this.high;
    const width = this.end - this.begin;
    this.low = low;
    this.high = Math.max(high, low + 1);
    if (all) this.show(this.low, this.high);
    else if (latest) this.show(this.high - width, this.high);
  }

  get width() {
    return this.end - this.begin;
  }

  show(begin, end) {
    const whole = this.high - this.low;
    const width = Math.min(Math.max(end - begin, Math.min(SMALLEST, whole)), whole);
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(middle - width / 2, this.low), this.high - width);
    this.end = this.begin + width;
    this.changed("view");
  }

  fit() {
    this.show(this.low, this.high);
  }

  /** Zoom by ``factor`` (below 1: in) so that ``at`` stays where it is. */
  zoom(factor, at = (this.begin + this.end) / 2) {
    const whole = this.high - this.low;
    const width = Math.min(Math.max(this.width * factor, SMALLEST), whole);
    const begin = at - ((at - this.begin) * width) / this.width;
    this.show(begin, begin + width);
  }

  pan(ns) {
    this.show(this.begin + ns, this.end + ns);
  }

  select(begin, end) {
    this.selection = begin === null ? null : [Math.min(begin, end), Math.max(begin, end)];
    this.changed("selection");
  }

  /** Show [begin, end) with some room around it. */
  focus(begin, end, room = 0.5) {
    const margin = Math.max((end - begin) * room, SMALLEST);
    this.show(begin - margin, end + margin);
  }
}

/**
 * Have the mouse on ``canvas`` steer ``view``: the wheel zooms, dragging pans, with Shift or from the ruler it selects.
 * ``area`` says where the time axis is: {left, width, ruler}, in CSS pixels. ``click(x, y)`` and ``hover(x, y)`` are
 * called for what is no drag.
 */
export function steer(canvas, view, area, click, hover) {
  let drag = null;
  const timeAt = (x) => view.begin + ((x - area().left) / area().width) * view.width;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener(
    "wheel",
    (event) => {
      const [x] = place(event);
      if (x < area().left) return; // over the labels the page scrolls
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        view.pan(((event.deltaX || event.deltaY) / area().width) * view.width);
      } else view.zoom(1.0015 ** event.deltaY, timeAt(x));
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    if (event.button !== 0 || x < area().left) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x, y, begin: view.begin, moved: false, select: event.shiftKey || y < area().ruler };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!drag) {
      hover(x, y);
      return;
    }
    if (Math.abs(x - drag.x) > 3) drag.moved = true;
    if (!drag.moved) return;
    if (drag.select) view.select(timeAt(drag.x), timeAt(x));
    else {
      const begin = drag.begin - ((x - drag.x) / area().width) * view.width;
      view.show(begin, begin + view.width);
    }
  });
  const finish = (event) => {
    if (drag && !drag.moved && event.type === "pointerup") click(drag.x, drag.y);
    drag = null;
  };
  canvas.addEventListener("pointerup", finish);
  canvas.addEventListener("pointercancel", finish);
  canvas.addEventListener("pointerleave", () => hover(-1, -1));
}

/** The keys of the view; returns whether ``key`` was one of them. */
export function steerByKey(view, key) {
  const actions = {
    w: () => view.zoom(0.7),
    s: () => view.zoom(1 / 0.7),
    a: () => view.pan(-0.2 * view.width),
    d: () => view.pan(0.2 * view.width),
    ArrowUp: () => view.zoom(0.7),
    ArrowDown: () => view.zoom(1 / 0.7),
    ArrowLeft: () => view.pan(-0.2 * view.width),
    ArrowRight: () => view.pan(0.2 * view.width),
    0: () => view.fit(),
    Home: () => view.show(view.low, view.low + view.width),
    End: () => view.show(view.high - view.width, view.high),
    e: () => view.select(view.begin, view.end),
    z: () => view.selection && view.focus(...view.selection, 0.02),
    Escape: () => view.select(null),
  };
  if (!Object.hasOwn(actions, key)) return false;
  actions[key]();
  return true;
}
