"""What a run did, told from the spans of its ranks: requests, guesses with their fates, segments with their journeys.

It knows nothing about pages. Times are milliseconds since the first request. Rank 0's spans are followed with a small
tree: guesses are born when the draft grows, text settles when rank 0 prunes, sends text or ends a request, and what
does not stand below the tip has died then.
"""
from __future__ import annotations

from collections import deque
from typing import Any, Dict

Span = Dict[str, Any]
# A node, as the page gets it. kind: prompt, own (said by the target, guessed by nobody) or guess. why it died: wrong
# (the text went on otherwise), dropped (not worth sending) or over (the request ended).
NODE = ("id", "token", "parent", "score", "kind", "request", "born", "segment", "saidAt", "said", "settled", "died",
        "why")
# A segment's stay on a rank: rows that came, were computed and went on; their difference was pruned there.
STOP = ("rank", "came", "rows", "from", "to", "computed", "left", "passed")
OF_SEGMENT = ("send", "forward", "back", "verify")  # events that a segment has; the others have a node or a request
SHOWN = ("wait", "grow", "verify", "send", "prune", "reset", "forward")


class Story:
    """Everything that happened; `tell` makes plain lists of it."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.start = next((span["t0"] for name in ("request", "send") for span in spans if span["name"] == name), 0.0)
        self.ranks = sorted({span["rank"] for span in spans})
        self.root = self.ranks[0] if self.ranks else 0
        self.nodes: dict[int, Span] = {}
        self.live: set[int] = set()
        self.requests: list[Span] = []
        self.segments: list[Span] = []
        self.events: list[list[Any]] = []  # time, kind, rank, what, how many
        self._away: deque[int] = deque()  # segments that have not been judged
        self._told: list[int] | None = None  # the answer of the next request
        for span in spans:
            if span["rank"] == self.root and span["name"] in ("send", "grow", "verify", "prune", "reset", "request"):
                getattr(self, f"_{span['name']}")(span)
        self._travel()

    def _ms(self, seconds: float) -> float:
        return round((seconds - self.start) * 1e3, 4)

    # --- rank 0: the tree ---------------------------------------------------------------------------------------------

    def _node(self, node: int, token: int, parent: int, at: float) -> Span:
        """A node, made if it is new."""
        if parent > node:  # then a way up might have no end
            raise LookupError(f"node {node} stands below {parent}, which is younger")
        if node not in self.nodes:
            self.nodes[node] = {**dict.fromkeys(NODE), "id": node, "token": token, "parent": parent, "born": at,
                                "kind": "guess", "request": len(self.requests) - 1}
        return self.nodes[node]

    def _send(self, span: Span) -> None:
        at, number = self._ms(span["t0"]), len(self.segments)
        if any(node == parent for node, parent in zip(span["nodes"], span["parents"])):
            self.requests.append({"from": at, "to": None, "answer": self._told, "said": False})
            self._told = None
        for i, (node, token, parent) in enumerate(zip(span["nodes"], span["tokens"], span["parents"])):
            new = node not in self.nodes
            entry = self._node(node, token, parent, at)
            entry["segment"] = number
            if i < span["text"] and not self.requests[-1]["said"]:
                entry.update(kind="prompt", born=self.requests[-1]["from"], settled=self.requests[-1]["from"])
            elif i >= span["text"] and new:  # a draft that was not traced
                self.live.add(node)
        if span["text"] and self.requests[-1]["said"]:
            self._settle(span["nodes"][span["text"] - 1], at)
        self.segments.append({"request": len(self.requests) - 1, "nodes": span["nodes"], "text": span["text"],
                              "sent": at, "stops": [], "back": None, "judged": None})
        self._away.append(number)
        self.events.append([at, "send", self.root, number, len(span["nodes"])])

    def _grow(self, span: Span) -> None:
        at = self._ms(span["t1"])
        for node in span.get("gone", ()):
            self._die(node, at, "dropped")
        new = span.get("nodes", ())
        for node, token, parent, score in zip(new, span["tokens"], span["parents"], span["scores"]) if new else ():
            self._node(node, token, parent, at)["score"] = round(score, 4)
            self.live.add(node)
        if new:
            self.events.append([at, "grow", self.root, new[0], len(new)])

    def _verify(self, span: Span) -> None:
        at = self._ms(span["t1"])
        for node, token in span.get("said", {}).items():
            self.nodes[int(node)].update(said=token, saidAt=at)
            self.requests[-1]["said"] = True
        if self._away:
            number = self._away.popleft()
            self.segments[number].update(judged=[self._ms(span["t0"]), at], back=self._ms(span["t0"]))
            self.events.append([at, "verify", self.root, number, len(span.get("said", ()))])

    def _prune(self, span: Span) -> None:
        if span.get("parent") in self.nodes:  # not of a request that sent nothing, nor where rank 0 is a stage as well
            self._node(span["tip"], span["token"], span["parent"], self._ms(span["t0"]))
            self._settle(span["tip"], self._ms(span["t0"]))

    def _reset(self, span: Span) -> None:
        self._prune(span)
        at = self._ms(span["t0"])
        for node in list(self.live):
            self._die(node, at, "over")
        self._away.clear()
        if self.requests:
            self.requests[-1]["to"] = self._ms(span["t1"])
            self.events.append([at, "end", self.root, len(self.requests) - 1, 0])

    def _request(self, span: Span) -> None:
        """Which of the settled tokens are the answer, told by who asked; this span begins before all of the others."""
        self._told = span["answer"]

    def _settle(self, tip: int, at: float) -> None:
        """The text goes on to `tip`."""
        path = []
        node = tip
        while self.nodes[node]["settled"] is None:
            path.append(node)
            if self.nodes[node]["parent"] == node:  # where a text begins
                break
            node = self.nodes[node]["parent"]
        for node in path:
            self.nodes[node]["settled"] = at
            if node not in self.live:
                self.nodes[node]["kind"] = "own"
            self.live.discard(node)
        for node in sorted(self.live):  # parents first
            parent = self.nodes[node]["parent"]
            if parent != tip and parent not in self.live:
                self._die(node, at, "wrong")
        if path:
            self.events.append([at, "settle", self.root, tip, len(path)])

    def _die(self, node: int, at: float, why: str) -> None:
        if node in self.live:
            self.live.remove(node)
            self.nodes[node].update(died=at, why=why)

    # --- the segments' ways -------------------------------------------------------------------------------------------

    def _travel(self) -> None:
        """What came to a rank leaves it in that order, a Prune aside: so a segment is known though all rows died."""
        home = {node: number for number, segment in enumerate(self.segments) for node in segment["nodes"]}
        for here in self.ranks:
            mine = [span for span in self.spans if span["rank"] == here]
            came = [span for span in mine if span["name"] == "recv" and span["kind"] != "Prune"]
            left = [span for span in mine if span["name"] == "send"] if here != self.root else []
            computed = {home[span["nodes"][0]]: span for span in mine
                        if span["name"] == "forward" and span["nodes"] and span["nodes"][0] in home}
            numbers = iter(range(len(self.segments)))
            for i, span in enumerate(came):
                number = next(numbers, None) if span["kind"] == "Segment" else None
                if number is None:
                    continue
                if here == self.root:
                    self.segments[number]["back"] = self._ms(span["t1"])
                    self.events.append([self._ms(span["t1"]), "back", here, number, len(span["nodes"])])
                else:
                    self._stay(number, span, computed.get(number), left[i] if i < len(left) else None)
        self.events.sort(key=lambda event: event[0])

    def _stay(self, number: int, came: Span, forward: Span | None, left: Span | None) -> None:
        """A segment at one of its stops, see STOP."""
        begin, end = (self._ms(forward["t0"]), self._ms(forward["t1"])) if forward else (None, None)
        rows = len(forward["nodes"]) if forward else 0
        self.segments[number]["stops"].append([
            came["rank"], self._ms(came["t1"]), len(came["nodes"]), begin, end, rows,
            self._ms(left["t0"]) if left else None, len(left["nodes"]) if left else None])
        if forward:
            self.events.append([begin, "forward", came["rank"], number, rows])

    # --- for the page -------------------------------------------------------------------------------------------------

    def tell(self, first: int = 0, last: int | None = None) -> dict[str, Any]:
        """Requests `first` to `last`, the last not included, as lists that JSON can hold."""
        told = [number for number, request in enumerate(self.requests) if request["answer"] is not None]
        asked = told or list(range(len(self.requests)))  # what nobody asked only measured the pipeline
        place = {number: i for i, number in enumerate(asked[first:last])}
        if not place:
            raise ValueError(f"there are {len(asked)} requests in the trace: choose among 0:{len(asked)}")
        chosen = [self.requests[number] for number in place]
        begin, end = chosen[0]["from"], chosen[-1]["to"] or float("inf")
        segments = [number for number, segment in enumerate(self.segments) if segment["request"] in place]
        where = {number: i for i, number in enumerate(segments)}
        names = {**dict.fromkeys(OF_SEGMENT, where), "end": place}
        events = [(at, kind, rank, names.get(kind, {}).get(what, what), many)
                  for at, kind, rank, what, many in self.events if begin <= at <= end]
        return {
            "ranks": self.ranks, "columns": {"node": NODE, "stop": STOP}, "left_out": len(asked) - len(place),
            "requests": [{key: request[key] for key in ("from", "to", "answer")} for request in chosen],
            "segments": [{**self.segments[i], "request": place[self.segments[i]["request"]]} for i in segments],
            "nodes": [[where.get(node[name]) if name == "segment" else place[node[name]] if name == "request"
                       else node[name] for name in NODE] for node in self.nodes.values() if node["request"] in place],
            "events": events,
            "spans": [self._shown(span) for span in self.spans if span["name"] in SHOWN
                      and begin <= self._ms(span["t1"]) and self._ms(span["t0"]) <= end
                      and (span["rank"] == self.root or span["name"] in ("wait", "prune"))],
        }

    def _shown(self, span: Span) -> list[Any]:
        return [span["rank"], span["name"], self._ms(span["t0"]), self._ms(span["t1"]), span.get("tip")]
