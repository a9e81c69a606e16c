"""A page in headless Chromium, without a network."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def CHROMIUM(test: Callable[..., None]) -> Callable[..., None]:
    """Slow, and skipped where there is no Chromium."""
    missing = shutil.which("chromium") is None
    skipped = pytest.mark.skipif(missing, reason="chromium is not installed")(test)
    marked: Callable[..., None] = pytest.mark.slow(skipped)
    return marked


PROBE = """
<script>
window.addEventListener("load", async () => {
  const graph = document.getElementById("figure1");
  const bars = graph.querySelectorAll(".bars .point path").length;
  const number = graph.data.findIndex(trace => trace.name == "backward");
  Plotly.Fx.hover(graph, [{curveNumber: number, pointNumber: 0}]);
  await new Promise(done => setTimeout(done, 300));
  const hover = graph.querySelector(".hoverlayer").textContent;
  const loaded = performance.getEntriesByType("resource").map(entry => entry.name)
    .filter(name => !name.startsWith("data:"));
  const plots = document.querySelectorAll(".js-plotly-plot .main-svg").length;
  const ticks = [...graph.querySelectorAll(".ytick text")].map(tick => tick.textContent);
  document.body.setAttribute("data-probe", btoa(JSON.stringify({bars, hover, loaded, plots, ticks, errors})));
});
</script>
"""
ERRORS = """<script>
const errors = [];
window.addEventListener("error", event => errors.push(String(event.message)));
window.addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
for (const name of ["error", "warn"]) console[name] = (...args) => errors.push(args.join(" "));
</script>"""


def opened(text: str, folder: Path) -> dict[str, Any]:
    """Open a page and look at its first figure.

    Args:
        text: of the page.
        folder: for files.

    Returns:
        errors: messages of the page; loaded: what it fetched; plots: figures on it; bars: of the first one;
        hover: what hovering over the first backward task says; ticks: names of the rows of the first figure.
    """
    path = folder / "probed.html"
    path.write_text(text.replace("<head>", "<head>" + ERRORS, 1).replace("</body>", PROBE + "</body>"))
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--proxy-server=127.0.0.1:1", f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=20000", "--window-size=1400,1000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = re.search(r'data-probe="([^"]+)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    probe: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return probe
