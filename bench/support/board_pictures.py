"""Dashboards drawn without Grafana: a page that reads their files and asks Prometheus for each query, in a headless
Chromium that takes a picture of it.

Not Grafana: panels lie where the files put them, with title, lines, legend and the largest value; units, variables and
links are not shown. A panel without data says so.
"""

import json
import subprocess
import tempfile
import time
from pathlib import Path
from shutil import which

from PIL import Image

from deploy.dashboards.boards import RATE
from deploy.dashboards.outputs import DASHBOARDS

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH = 1500
ROW = 17
"""Pixels of a row of Grafana's grid."""
WAIT_MS = 20_000
"""Longest time in which the page may ask Prometheus, milliseconds."""
DRAWN = ("overview", "slos", "autoscaler")
"""Dashboards on the picture."""
COLOURS = 48
"""Colours of the picture: so few make a small file."""
STEPS = 240
PAGE = """<!doctype html><meta charset="utf-8"><title>Dashboards</title>
<style>
 body { margin: 0; font: 11px sans-serif; background: #f4f5f5; color: #24292e; }
 h1 { font-size: 16px; margin: 10px 8px 4px; } .board { position: relative; }
 .panel, .row { position: absolute; box-sizing: border-box; padding: 4px 6px; overflow: hidden; }
 .panel { background: #fff; border: 1px solid #ddd; } .row { font-weight: bold; font-size: 12px; }
 .title { font-weight: bold; } .legend { height: 26px; overflow: hidden; line-height: 13px; color: #555; }
 .none { color: #a33; } svg { display: block; } i { font-style: normal; margin-right: 8px; }
</style><body><script>
const boards = BOARDS, prometheus = PROMETHEUS, start = START, end = END, step = STEP;
const colours = ["#3274d9", "#37872d", "#e0752d", "#c4162a", "#8f3bb8", "#b7950b", "#0f7b8a", "#555", "#e377c2"];
const plain = expr => expr.replaceAll("RATE", "[15s]").replaceAll("$namespace", ".*").replaceAll("$job", ".*");
const number = value => value >= 1000 ? (value / 1000).toPrecision(3) + "k" : String(+value.toPrecision(3));
const name = (legend, labels) => legend.replace(/{{(\\w+)}}/g, (_, label) => labels[label] ?? "");
async function lines(panel) {
  const found = [];
  for (const target of panel.targets) {
    const query = new URLSearchParams({query: plain(target.expr), start, end, step});
    const answer = await (await fetch(prometheus + "/api/v1/query_range?" + query)).json();
    for (const each of answer.data?.result ?? []) {
      const points = each.values.map(([at, value]) => [+at, +value]).filter(([, value]) => isFinite(value));
      if (points.length) found.push({legend: name(target.legendFormat, each.metric), points});
    }
  }
  return found;
}
function chart(found, width, height) {
  const top = Math.max(...found.flatMap(line => line.points.map(point => point[1]))) || 1;
  const x = at => (at - start) / (end - start) * width, y = value => height - 1 - value / top * (height - 12);
  const paths = found.map((line, index) => {
    let before = null;
    const path = line.points.map(([at, value]) => {
      const move = before === null || at - before > 3 * step ? "M" : "L"; before = at;
      return move + x(at).toFixed(1) + "," + y(value).toFixed(1);
    }).join("");
    return `<path d="${path}" fill="none" stroke="${colours[index % colours.length]}" stroke-width="1.3"/>`;
  });
  return `<svg width="${width}" height="${height}"><text x="0" y="9" font-size="9" fill="#888">${number(top)}</text>
    <line x1="0" x2="${width}" y1="${height - 1}" y2="${height - 1}" stroke="#ccc"/>${paths.join("")}</svg>`;
}
async function draw() {
  for (const board of boards) {
    document.body.insertAdjacentHTML("beforeend", `<h1>${board.title}</h1>`);
    const place = document.createElement("div"); place.className = "board"; document.body.append(place);
    const bottom = Math.max(...board.panels.map(panel => panel.gridPos.y + panel.gridPos.h));
    place.style.height = bottom * ROWPX + "px";
    await Promise.all(board.panels.map(async panel => {
      const box = document.createElement("div"), {x, y, w, h} = panel.gridPos, unit = WIDTHPX / 24;
      box.className = panel.type === "row" ? "row" : "panel";
      box.style = `left:${x * unit}px;top:${y * ROWPX}px;width:${w * unit - 4}px;height:${h * ROWPX - 4}px`;
      box.innerHTML = `<div class="title">${panel.title}</div>`;
      place.append(box);
      if (panel.type === "row") return;
      const found = await lines(panel);
      const legend = found.map((line, index) =>
        `<i style="color:${colours[index % colours.length]}">${line.legend || "all"}</i>`).join("");
      box.innerHTML += found.length ? chart(found, w * unit - 18, h * ROWPX - 56) : '<p class="none">no data</p>';
      box.innerHTML += `<div class="legend">${legend}</div>`;
    }));
  }
  document.title = "drawn";
}
draw();
</script>
"""


def page(url: str, end_s: float, seconds: float) -> str:
    """The page over the last `seconds` before end_s (unix) of the Prometheus at `url`."""
    found = [json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8")) for name in DRAWN]
    values = {
        "BOARDS": json.dumps(found),
        "PROMETHEUS": json.dumps(url),
        "START": f"{end_s - seconds:.0f}",
        "END": f"{end_s:.0f}",
        "STEP": f"{max(1, round(seconds / STEPS))}",
        '"RATE"': json.dumps(RATE),
        "ROWPX": str(ROW),
        "WIDTHPX": str(WIDTH),
    }
    text = PAGE
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def draw(url: str, target: Path, seconds: float, end_s: float | None = None) -> None:
    """A picture (PNG) of DRAWN over the last `seconds`. Raises FileNotFoundError without a Chromium, RuntimeError where
    it makes none."""
    program = next((path for path in map(which, PROGRAMS) if path is not None), None)
    if program is None:
        raise FileNotFoundError(f"there is no Chromium here: {', '.join(PROGRAMS)}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page(url, time.time() if end_s is None else end_s, seconds), encoding="utf-8")
        done = subprocess.run(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={folder}/profile",
                f"--window-size={WIDTH},{height()}",
                f"--virtual-time-budget={WAIT_MS}",
                f"--screenshot={target}",
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode or not target.exists():
        raise RuntimeError(f"Chromium made no picture: {done.stderr[-1000:]}")
    with Image.open(target) as picture:
        smaller = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS)
    smaller.save(target, optimize=True)


def height() -> int:
    """Pixels of the page."""
    found = [json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8")) for name in DRAWN]
    rows = [max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in board["panels"]) for board in found]
    return sum(ROW * each + 40 for each in rows)
