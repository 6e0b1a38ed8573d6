"""What a person reads when the server is ready: where the page is, what answers there, and how to end it."""
from __future__ import annotations

import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from cluster.board import way_to
from config.methods import METHODS
from config.serve_config import is_loopback
from launch.pipeline import Pipeline

ALL_INTERFACES = ("0.0.0.0", "::")
FOREIGN_ADDRESS = "192.0.2.1"  # of a network that is reserved for documents: the way there is that to other devices


class PipelineFacts(NamedTuple):
    """The facts of a pipeline that stay the same.

    `profile` is that of an emulated cluster, `lossy_rule` a rule of verification that changes the distribution of texts
    above temperature 0; both are else empty.
    """

    method: str
    draft: str
    num_stages: int
    layers_per_rank: str
    figures: str  # real, emulated or simulated
    profile: str
    lossy_rule: str = ""

    @staticmethod
    def of(pipeline: Pipeline) -> PipelineFacts:
        config, stages = pipeline.config, pipeline.spec.part.stages
        guesses = METHODS[config.pipeline_type].draft != "none"
        profile = config.profile if config.cluster else ""
        return PipelineFacts(config.pipeline_type, config.draft if guesses else "none", max(1, len(stages) - 1),
                             "+".join(map(str, stages)), config.kind, profile, config.lossy_rule)


def reachable_url(host: str, port: int) -> str:
    """Return the address of a page as another device can open it, if it can, for the `host` that is listened at."""
    name = (way_to(FOREIGN_ADDRESS) or socket.gethostname()) if host in ALL_INTERFACES else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def start_lines(url: str, model: str, facts: PipelineFacts) -> str:
    """Return the lines that are printed once the server can answer."""
    only_here = is_loopback(urlsplit(url).hostname or "")
    audience = "   this machine only; for others add host=0.0.0.0 api_key=SECRET" if only_here else ""
    stage_text = f"{facts.num_stages} stage{'s' * (facts.num_stages > 1)}, layers {facts.layers_per_rank}"
    draft_text = "" if facts.draft == "none" else f", guesses from {facts.draft}"
    emulation = f"   times {facts.figures} as {facts.profile}" if facts.profile else ""
    lossy_text = f", lossy verification ({facts.lossy_rule})" if facts.lossy_rule else ""

    rows = {
        "page": f"{url}{audience}",
        "API": f"{url}/v1",
        "model": f"{model}, {stage_text}",
        "method": f"{facts.method}{draft_text}{lossy_text}{emulation}",
        "end": "Ctrl-C"}
    return "\n".join(["flowspec: ready", *(f"  {name:<8}{value}" for name, value in rows.items())])
