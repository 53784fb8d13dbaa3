"""Headless Chromium for tests of the site. Must not know what any test asserts."""

from __future__ import annotations

import shutil
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

WAIT_S = 20

# The text within a selector whose contrast with its background is below WCAG's level AA (4.5, for large text 3).
_LOW_CONTRAST = """
const [selector] = arguments;
const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(color[i] / 255), 0);
const background = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255, 1]);
};
const low = [];
let seen = 0;
for (const element of document.querySelectorAll(`${selector} *`)) {
  const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
  if (!text || element.closest("script, style, noscript, .headerlink, option")) continue;
  if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
  seen += 1;
  const style = getComputedStyle(element);
  let opacity = 1;
  for (let at = element; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
  const under = background(element);
  const foreground = parse(style.color);
  const shown = over([...foreground.slice(0, 3), foreground[3] * opacity], under);
  const [a, b] = [luminance(shown), luminance(under)].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (large ? 3 : 4.5)) low.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  if (seen > 1500) break;
}
return [seen, low];
"""


class Browser:
    """One window. `address`: the root of the site, to which every path is relative."""

    keys = Keys

    def __init__(self, address: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for switch in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        self.driver.set_page_load_timeout(60)
        self.address = address

    def close(self) -> None:
        self.driver.quit()

    def emulate(self, size: tuple[int, int] = (1440, 900), *, scheme: str = "light") -> None:
        """Emulate a window of this size (a phone if narrower than 600), with this preferred color scheme."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)

    def open(self, path: str) -> None:
        """Load a page, even if it is shown already."""
        self.driver.get("about:blank")
        self.driver.get(path if "://" in path else self.address + path)

    @property
    def path(self) -> str:
        """The current URL without the site's address."""
        return self.driver.current_url.removeprefix(self.address)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """The text of each matching element."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText.trim())"
        return list(self.run(script, selector))

    def click(self, selector: str) -> None:
        """Scroll to an element, without the theme's smooth scrolling, and click it."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({ block: 'center', inline: 'center', behavior: 'instant' })", element)
        element.click()

    def choose(self, selector: str, value: str) -> None:
        Select(self.find(selector)).select_by_value(value)

    def press(self, *keys: str) -> None:
        """Type into the focused element."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        """The focused cell, or the platform that the focused button folds, or else the id of the focused element."""
        script = "const at = document.activeElement; return at.dataset.cell || at.dataset.fold || at.id || at.tagName"
        return str(self.run(script))

    def wait(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        WebDriverWait(self.driver, WAIT_S).until(lambda _: self.run(f"return {script}"), script)

    def low_contrast(self, selector: str) -> tuple[int, list[str]]:
        """The number of texts that were checked, and the texts whose contrast is too low."""
        checked, low = self.run(_LOW_CONTRAST, selector)
        return checked, low

    def console(self) -> list[str]:
        """The messages of the console since the last call."""
        return [f"{entry['level']} {entry['message']}" for entry in self.driver.get_log("browser")]
