"""The Markdown of the built-in page, in Node: what lines of some forms become, and that no line takes long."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from every import every

import srv

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs the program node")
# Elements as arrays of a name and children, in place of a browser's document.
SCRIPT = """
const document = {createElement: (name) => {
  const element = [name]; element.nodeName = name.toUpperCase();
  element.append = (...children) => element.push(...children); element.addEventListener = () => {};
  Object.defineProperty(element, "childNodes", {get: () => element.slice(1)});
  return element;
}};
const markdown = new Function("document", process.argv[1] + "; return markdown;")(document);
const texts = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => markdown(text))));
"""
SOURCE = (Path(srv.__file__).parent / "server" / "web" / "markdown.js").read_text(encoding="utf-8")


def rendered(*texts: str) -> list[Any]:
    command = [str(NODE), "-e", SCRIPT, SOURCE]
    process = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True, timeout=120)
    outputs: list[Any] = json.loads(process.stdout)
    return outputs


@every(
    ("text", "expected"),
    [
        ("# a b ##", [["h3", "a b"]]),
        ("## C#", [["h4", "C#"]]),
        ("# ##", [["h3"]]),
        ("# a #b", [["h3", "a #b"]]),
        ("# a\r\nb", [["h3", "a"], ["p", "b"]]),
        ("#a", [["p", "#a"]]),
        ("- a\r", [["ul", ["li", "a\r"]]]),
        ("a|b\n-|", "table"),
        ("a|b\n | :-- | --: | ", "table"),
        ("a|b\n-|-", "table"),
        ("a|b\n|-|", "table"),
        ("a|b\n|-", [["p", "a|b\n|-"]]),
        ("a|b\n---", "p"),
        ("a|b\n-|:", [["p", "a|b\n-|:"]]),
        ("https://a.b/c.?!", [["p", ["a", "https://a.b/c"], ".?!"]]),
    ],
)
def test_lines(text: str, expected: object) -> None:
    (nodes,) = rendered(text)
    assert (nodes[0][1][0] if nodes[0][0] == "div" else nodes[0][0] if expected == "p" else nodes) == expected


def test_no_line_takes_a_time_that_grows_with_its_square() -> None:
    """No assertion on seconds: a quadratic expression would run for minutes, and the time limit ends it."""
    many = 400_000
    blanks = " " * many
    lines = [f"# a{blanks}b", f"# {'#' * many}x", f"# a{' #' * many}x", f"#{blanks}\u2028", f"-{blanks}\u2028"]
    lines += [f"a|b\n{row}x" for row in (blanks, "|" * many, "-" * many, "-|" * many, f"-|{blanks}", f"|{blanks}")]
    lines += [f"-{blanks}x", "- " * many + "x", "~" * many, f"```{blanks}`", ">" * many, f"1.{blanks}x", "`" * many]
    assert len(rendered(*lines)) == len(lines)
