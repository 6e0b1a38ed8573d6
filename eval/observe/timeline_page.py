"""A page that shows a run: each segment on its way through the ranks, and the token tree at each moment.

Usage: python3 -m scripts.timeline TRACE_DIR [-o PAGE.html] [--requests FIRST:LAST]

TRACE_DIR is the folder that a run with trace=TRACE_DIR wrote; if it ran on several hosts, first put the rank_N.jsonl
files of all of them into one folder. The page contains all that it needs and opens in any browser. The Chrome trace
TRACE_DIR/trace.json is written again.
"""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Sequence

from config.console import command
from config.dialect import OptionParser
from config.files import fits, read_json_file, write
from eval.observe.timeline import RunHistory
from pipeline.trace import merge, read

PAGE = Path(__file__).with_name("page.html")
DATA_MARK = "/*DATA*/"  # the place of the data in the page
SHOWN_REQUESTS = 20  # default number of requests in a page: more make it slow


def page(folder: Path, first: int = 0, last: int | None = None) -> str:
    """Return the page of a trace, for its requests `first` to `last`, without the last.

    Raise ValueError if the folder holds no trace of one run, or none of these requests.
    """
    spans = read(folder)
    if not any("tokens" in span for span in spans):
        raise ValueError(f"{folder} holds no trace of a run: give the folder of trace=FOLDER, with its rank_N.jsonl")

    run_path = folder / "run.json"
    run = read_json_file(run_path) if run_path.is_file() else {"tokens": {}}
    if not fits(run, {"tokens": dict}):
        raise ValueError(f"{run_path} is not in the form that a run writes: delete it, then the page has no texts")

    try:
        history = RunHistory(spans).data(first, last)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the spans in {folder} do not make one run ({type(error).__name__}: {error}): give a folder "
                         "with the rank_N.jsonl files of one run, as they were written") from error

    used_tokens = {str(node[name])
                   for node in history["nodes"] for name in ("token", "said")}
    token_texts = {token: text for token, text in run["tokens"].items() if token in used_tokens}

    run_facts = {**run, "tokens": token_texts}
    json_text = json.dumps({"run": run_facts, **history}, ensure_ascii=False, separators=(",", ":"))
    return PAGE.read_text(encoding="utf-8").replace(DATA_MARK, json_text.replace("<", "\\u003c"))


def _range(text: str) -> tuple[int, int | None]:
    """Return the range FIRST:LAST, of which either may be missing; a number alone is one request."""
    if not re.fullmatch(r"\d{0,18}(:\d{0,18})?", text, re.ASCII):
        raise ValueError(f"--requests {text} is no range: write FIRST:LAST, as 0:5 for the first five")
    first, colon, last = text.partition(":")
    first_request = int(first or 0)
    if not colon:
        return first_request, first_request + 1
    return first_request, int(last) if last else None


@command
def main(argv: Sequence[str]) -> int:
    parser = OptionParser(prog="python3 -m scripts.timeline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", metavar="TRACE_DIR", type=Path, help="folder that a run with trace=TRACE_DIR wrote")
    parser.add_argument("-o", metavar="PAGE.html", dest="out", type=Path, help="default: TRACE_DIR/timeline.html")
    parser.add_argument("--requests", metavar="FIRST:LAST", default=f"0:{SHOWN_REQUESTS}",
                        help=f"requests to show, from 0, without the last; default 0:{SHOWN_REQUESTS}; 0: for all")

    options = parser.parse_args(argv)
    page_path = options.out or options.folder / "timeline.html"

    html = page(options.folder, *_range(options.requests))
    write(page_path, html, "choose another with -o")
    merge(options.folder)
    print(f"{page_path} ({len(html) / 1e6:.1f} MB): open it in a browser")
    return 0
