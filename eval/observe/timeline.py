"""The history of a run, from the spans of its ranks: requests, guesses with their fates, and segments on their way.

Times are milliseconds since the first request. A small tree follows the spans of rank 0: guesses are born when the
draft grows; text settles when rank 0 prunes, sends text or ends a request; then guesses that are not below the tip
die.
"""
from __future__ import annotations

from collections import deque
from itertools import chain, repeat
from typing import Any, Dict

Span = Dict[str, Any]
# Fields of a node besides id, token, parent, kind, request and birth. `kind`: prompt, own (from the target, without a
# guess) or guess. `why` it died: wrong (the text continued differently), dropped (not worth sending) or over (the
# request ended).
FATE = dict.fromkeys(("score", "segment", "saidAt", "said", "settled", "died", "why"))
# Fields of a segment's stay on a rank besides the rows that came; rows that did not pass on were pruned there. All of
# them may have died before they were computed.
STAY: Span = {"from": None, "to": None, "computed": 0, "left": None, "passed": None}
OF_SEGMENT = ("send", "forward", "back", "judge")  # events of a segment; the others are of a node or a request
SHOWN = ("wait", "grow", "judge", "send", "prune", "reset", "forward")  # spans of rank 0 that the page draws
SHOWN_ON_STAGES = ("wait", "prune")


class RunHistory:
    """The history of a run; `data` returns it as JSON objects."""

    def __init__(self, spans: list[Span]) -> None:
        begins = {span["name"]: span["t0"] for span in reversed(spans)}
        start: float = begins.get("request", begins.get("send", 0.0))

        def moment(seconds: float) -> float:
            return round((seconds - start) * 1e3, 4)

        self.spans = [{**span, "t0": moment(span["t0"]), "t1": moment(span["t1"])}
                      for span in spans]
        self.ranks = sorted({span["rank"] for span in spans})
        self.root = self.ranks[0] if self.ranks else 0
        self.nodes: dict[int, Span] = {}
        self.live: set[int] = set()
        self.requests: list[Span] = []
        self.segments: list[Span] = []
        self.events: list[Span] = []
        self._away: deque[int] = deque()  # segments that are not judged yet
        self._number: dict[int, int] = {}  # of a row's segment, by the ids that the row has on its way
        self._dealt = any("ids" in span for span in spans)  # whether segments go to several replicas
        self._answer: list[int] | None = None  # the answer of the next request
        follow = {
            "send": self._send, "grow": self._grow, "judge": self._judge,
            "prune": self._prune, "reset": self._reset, "request": self._request}
        for span in self.spans:
            if span["rank"] == self.root and span["name"] in follow:
                follow[span["name"]](span)
        self._add_stays()

    def _note(self, at: float, kind: str, what: int, many: int, **stage: int) -> None:
        """Add an event of rank 0, or of the stage that is given."""
        self.events.append({"at": at, "kind": kind, "what": what, "many": many, "rank": self.root, **stage})

    # --- rank 0: the tree ---------------------------------------------------------------------------------------------

    def _node(self, node: int, token: int, parent: int, at: float) -> Span:
        """Return the node of this id, creating it if it is new. Raise LookupError if its parent is younger."""
        if parent > node:  # else a path to the root might not end
            raise LookupError(f"node {node} stands below {parent}, which is younger")
        if node not in self.nodes:
            self.nodes[node] = {"id": node, "token": token, "parent": parent, "kind": "guess",
                                "request": len(self.requests) - 1, "born": at, **FATE}
        return self.nodes[node]

    def _send(self, span: Span) -> None:
        at, number = span["t0"], len(self.segments)
        nodes, text = span["nodes"], span["text"]
        if any(node == parent for node, parent in zip(nodes, span["parents"])):
            self.requests.append({"from": at, "to": None,
                                  "answer": self._answer, "said": False})
            self._answer = None
        request = self.requests[-1] if self.requests else {}
        for i, row in enumerate(zip(nodes, span["tokens"], span["parents"])):
            if i >= text and row[0] not in self.nodes:  # a draft that was not traced
                self.live.add(row[0])
            entry = self._node(*row, at)
            entry["segment"] = number
            if i < text and not request["said"]:
                entry.update(kind="prompt", born=request["from"], settled=request["from"])
        if text and request["said"]:
            self._settle(nodes[text - 1], at)
        self.segments.append({"request": len(self.requests) - 1,
                              "nodes": nodes, "text": text, "sent": at,
                              "stops": [], "back": None, "judged": None})
        self._away.append(number)
        ids = [*nodes, *span.get("ids", ())]
        self._number.update(dict.fromkeys(ids, number))
        self._note(at, "send", number, len(nodes))

    def _grow(self, span: Span) -> None:
        at = span["t1"]
        for node in span.get("gone", ()):
            self._die(node, at, "dropped")
        if new := span.get("nodes"):
            guesses = zip(new, span["tokens"], span["parents"], span["scores"])
            for node, token, parent, score in guesses:
                self._node(node, token, parent, at)["score"] = round(score, 4)
            self.live.update(new)
            self._note(at, "grow", new[0], len(new))

    def _judge(self, span: Span) -> None:
        begin, at = span["t0"], span["t1"]
        for node, token in span.get("answers", {}).items():
            self.nodes[int(node)].update(said=token, saidAt=at)
            self.requests[-1]["said"] = True
        # round a ring, segments come back in order, even those of which all rows have died
        number = self._segment_of(span) if self._dealt else self._away.popleft() if self._away else None
        if number is not None:
            self.segments[number].update(judged=[begin, at], back=begin)
            self._note(at, "judge", number, len(span.get("answers", ())))

    def _segment_of(self, span: Span) -> int | None:
        """Return the segment of a span, if any of its rows is left to identify it."""
        return next(map(self._number.get, span["nodes"]), None)

    def _prune(self, span: Span) -> None:
        if span.get("parent") in self.nodes:  # unless the request sent nothing, or rank 0 is a stage as well
            self._node(span["tip"], span["token"], span["parent"], span["t0"])
            self._settle(span["tip"], span["t0"])

    def _reset(self, span: Span) -> None:
        self._prune(span)
        for node in list(self.live):
            self._die(node, span["t0"], "over")
        self._away.clear()
        if self.requests:
            self.requests[-1]["to"] = span["t1"]
            self._note(span["t0"], "end", len(self.requests) - 1, 0)

    def _request(self, span: Span) -> None:
        """Keep the settled tokens of the answer; this span begins before all others."""
        self._answer = span["answer"]

    def _settle(self, tip: int, at: float) -> None:
        """Continue the text to `tip`: the nodes on the way there settle, and guesses beside it die."""
        many, entry = 0, self.nodes[tip]
        while entry["settled"] is None:
            many += 1
            entry["settled"] = at
            if entry["id"] not in self.live:
                entry["kind"] = "own"
            self.live.discard(entry["id"])
            entry = self.nodes[entry["parent"]]  # the first node of a text is its own
        for node in sorted(self.live):  # parents first
            parent = self.nodes[node]["parent"]
            if parent != tip and parent not in self.live:
                self._die(node, at, "wrong")
        if many:
            self._note(at, "settle", tip, many)

    def _die(self, node: int, at: float, why: str) -> None:
        if node in self.live:
            self.live.remove(node)
            self.nodes[node].update(died=at, why=why)

    # --- the segments on their way ------------------------------------------------------------------------------------

    def _add_stays(self) -> None:
        """Add the segments' stays, also without rows: messages leave a rank in the order in which they came."""
        for here in self.ranks:
            mine = [span for span in self.spans if span["rank"] == here]
            came = [span for span in mine if span["name"] == "recv" and span["kind"] != "Prune"]
            left = (span for span in mine if span["name"] == "send")
            forwards = {self._segment_of(span): span for span in mine
                        if span["name"] == "forward" and span["nodes"]}
            numbers = iter(range(len(self.segments)))
            for span, departed in zip(came, chain(left, repeat(None))):
                number = None
                if span["kind"] == "Segment":
                    number = self._segment_of(span) if self._dealt else next(numbers, None)
                if number is not None and here == self.root:
                    self.segments[number]["back"] = span["t1"]
                    self._note(span["t1"], "back", number, len(span["nodes"]))
                elif number is not None:
                    self._stay(number, span, forwards.get(number), departed)
        self.events.sort(key=lambda event: float(event["at"]))

    def _stay(self, number: int, came: Span,
              forward: Span | None, left: Span | None) -> None:
        """Add the stay of a segment on a stage; `forward` is None if all of its rows had died before."""
        stop = {**STAY, "rank": came["rank"], "came": came["t1"]}
        stop["rows"] = len(came["nodes"])
        if forward:
            stop.update(_bounds(forward), computed=len(forward["nodes"]))
            self._note(stop["from"], "forward", number, stop["computed"], rank=came["rank"])
        if left:
            stop.update(left=left["t0"], passed=len(left["nodes"]))
        self.segments[number]["stops"].append(stop)

    # --- for the page -------------------------------------------------------------------------------------------------

    def data(self, first: int = 0, last: int | None = None) -> Span:
        """Return requests `first` to `last`, without the last; they and their segments are numbered from 0.

        Raise ValueError if the trace has none of them.
        """
        wanted = [number for number, request in enumerate(self.requests) if request["answer"] is not None]
        asked = wanted or list(range(len(self.requests)))  # requests without an answer only measured the pipeline
        numbers = asked[first:last]
        if not numbers:
            raise ValueError(f"there are {len(asked)} requests in the trace: choose among 0:{len(asked)}")
        chosen = [self.requests[number] for number in numbers]
        begin, end = chosen[0]["from"], chosen[-1]["to"] or float("inf")
        requests = {number: place for place, number in enumerate(numbers)}
        sent = [number for number, segment in enumerate(self.segments) if segment["request"] in requests]
        segments = {number: place for place, number in enumerate(sent)}
        places = {**dict.fromkeys(OF_SEGMENT, segments), "end": requests}
        events = [event.copy() for event in self.events if begin <= event["at"] <= end]
        for event in events:
            event["what"] = places.get(event["kind"], {}).get(event["what"], event["what"])
        meanwhile = [span for span in self.spans if begin <= span["t1"] and span["t0"] <= end]
        shown = [span for span in meanwhile
                 if span["name"] in (SHOWN if span["rank"] == self.root else SHOWN_ON_STAGES)]

        def placed(entry: Span) -> Span:
            """Return a segment or a node with the new numbers of its request and segment."""
            here = {**entry, "request": requests[entry["request"]]}
            return {**here, "segment": segments.get(entry["segment"])} if "segment" in entry else here

        return {
            "ranks": self.ranks,
            "left_out": len(asked) - len(numbers),
            "requests": [{key: request[key] for key in ("from", "to", "answer")} for request in chosen],
            "segments": [placed(self.segments[number]) for number in sent],
            "nodes": [placed(node) for node in self.nodes.values() if node["request"] in requests],
            "events": events,
            "spans": [_bar(span) for span in shown]}


def _bar(span: Span) -> Span:
    return {"rank": span["rank"], "name": span["name"], "tip": span.get("tip"), **_bounds(span)}


def _bounds(span: Span) -> Span:
    return {"from": span["t0"], "to": span["t1"]}
