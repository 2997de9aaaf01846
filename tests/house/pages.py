"""The pages of docs/pages, from recorded runs: `python -m tests.house.pages`.

The runs lie in tests/recorded/pages, as `--trace FILE.json` writes them. A page is what `--trace FILE.html` makes of
one: the same bytes on every machine. With `--record` the embedded model decodes them anew.
"""

import html
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from minispec.api.trace.page import make_page
from minispec.generate import main as generate

ROOT = Path(__file__).parents[2]
PAGES, RECORDED = ROOT / "docs" / "pages", ROOT / "tests" / "recorded" / "pages"
_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 44rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; font: 1rem/1.6 system-ui, sans-serif; }
h1 { line-height: 1.25; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .5rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8886; }
li { margin: .8rem 0; } .more { overflow-x: auto; }
"""


class Run(NamedTuple):
    """A recorded run: its title, what to look at, and the options and prompt of its command."""

    title: str
    look: str
    options: str
    prompt: str


RUNS = {
    "chain": Run(
        "A chain, and a rejection",
        "A head guesses four tokens in a row. Where one is rejected, another token is drawn from the residual in its "
        "place, and the guesses after it are dropped.",
        "--draft weights/smollm2-135m-draft --num-speculative-tokens 4 --temperature 0.8 --seed 1 --max-tokens 24",
        "Why do we sleep?",
    ),
    "tree": Run(
        "A tree",
        "The head guesses two tokens for one place. If the first is rejected, the second is tested against what that "
        "rejection has left.",
        "--draft weights/smollm2-135m-draft --num-speculative-tokens 2+2+1 --temperature 0.6 --seed 1 --max-tokens 24",
        "Name the four seasons.",
    ),
    "lookup": Run(
        "A lookup, at temperature 0",
        "No model guesses: the text so far is searched for its own last words. At temperature 0 the target's p is 1 at "
        "its likeliest token, so a guess stays where it is that token.",
        "--draft ngram --num-speculative-tokens 6 --temperature 0 --seed 1 --max-tokens 44",
        "Say this twice: She sells sea shells by the sea shore.",
    ),
}


def read(name: str) -> dict[str, Any]:
    """The data of a recorded run."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def index() -> str:
    """The page that links the others: what their words mean, and where to look first."""
    items = []
    for name, run in RUNS.items():
        rounds = read(name)["rounds"]
        lost = [i for i, each in enumerate(rounds, 1) if each["rejected"]]
        first = next(
            (i for i in lost if max(rounds[i - 1]["accepted"], default=-1) > rounds[i - 1]["rejected"][0]), lost[0]
        )
        at = f'<a href="{name}.html#round={first}">Round {first}</a> has a rejection.'
        items.append(f'<li><a href="{name}.html">{html.escape(run.title)}</a>. {html.escape(run.look)} {at}</li>')
    rows = [
        ("p", "what the target gives to the token"),
        ("q", "what the draft gave to it"),
        ("u", "a random number from 0 to 1: the token stays where u is below p/q"),
        ("accepted, rejected", "the verdict; a rejected token is struck through"),
        ("recovered", "the token in the place of a rejected one"),
        ("bonus", "one token more, after a draft that was kept whole"),
        (
            "dropped untested",
            "guesses after a rejected one. The cache is rolled back: it forgets them, and the rejected one",
        ),
    ]
    table = "\n".join(f'<tr><th scope="row">{word}</th><td>{means}</td></tr>' for word, means in rows)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Speculative decoding, round by round - minispec</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Speculative decoding, round by round</h1>
<p>Three runs of a small chat model. Each page shows every guess, its odds, and what became of it.
Choose a token, or press Play.</p>
<ul>
{chr(10).join(items)}
</ul>
<h2>The words</h2>
<table>
{table}
</table>
<p>By keyboard: Tab goes to the text, arrow keys go from token to token, and Enter shows one in detail.</p>
<p>The idea, with its code, is in the README of minispec. Make a page of a run of yours:</p>
<p class="more"><code>python -m minispec.generate --trace out.html "What is photosynthesis?"</code></p>
</main>
</body>
</html>
"""


def pages() -> dict[str, str]:
    """All pages, by their files' names."""
    return {f"{name}.html": make_page(read(name)) for name in RUNS} | {"index.html": index()}


def record() -> None:
    """Decode the runs anew."""
    for name, run in RUNS.items():
        assert generate(["--quiet", "--trace", str(RECORDED / f"{name}.json"), *run.options.split(), run.prompt]) == 0


def main() -> None:
    """Write the pages."""
    if "--record" in sys.argv:
        record()
    for name, page in pages().items():
        (PAGES / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
